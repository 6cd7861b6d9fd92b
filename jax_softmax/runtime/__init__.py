"""From primitives to programs that run, what CUDA takes for it, and what looks at it: `explain` and the doctor."""
