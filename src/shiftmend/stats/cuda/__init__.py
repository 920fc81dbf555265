"""CUDA kernels for soft histograms, compiled at run time."""
