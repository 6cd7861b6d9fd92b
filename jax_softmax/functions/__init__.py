"""The public functions, and what they ask of their arguments. They bind primitives; nothing below knows of them."""
