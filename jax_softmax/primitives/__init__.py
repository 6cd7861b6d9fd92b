"""The primitives: their types, derivatives and batching, and the same operators in jax.numpy."""
