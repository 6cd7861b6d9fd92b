"""What a kernel computes, reads and writes, and the call of it in a program."""
