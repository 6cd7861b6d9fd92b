"""`fuse`: a program's equations before and after an operator become a part of its kernel."""
