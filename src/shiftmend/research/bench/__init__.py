"""Benchmarks: plan the cells, run them, store the results, and set them beside the paper's."""
