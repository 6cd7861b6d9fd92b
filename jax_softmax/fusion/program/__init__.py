"""A program as a graph: its equations, where values lie, what of them is an expression."""
