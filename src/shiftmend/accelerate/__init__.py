"""Acceleration that does not change results: CUDA graphs, compilation, memory formats, bfloat16."""
