"""Speed that leaves results unchanged: CUDA graphs, compilation, memory formats, bfloat16."""
