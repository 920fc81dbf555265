"""Tensor statistics: soft histograms, divergences, slices, Gaussians."""
