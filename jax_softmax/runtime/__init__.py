"""From primitives to programs that run, what CUDA takes for it, and `explain`, which looks at it."""
