"""`fuse`: what stands before and after an operator in a program becomes a part of its kernel."""
