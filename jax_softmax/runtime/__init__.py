"""How primitives become programs, what running CUDA kernels takes, and `explain`, which describes both."""
