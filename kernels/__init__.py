"""Implementations of the score. ``k2i_jax.score`` chooses among them and validates for all of them."""
