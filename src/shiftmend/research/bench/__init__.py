"""Benchmarks: plan the cells, run them, store the results, and compare them with the paper's."""
