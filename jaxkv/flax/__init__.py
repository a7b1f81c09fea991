"""Flax (nnx) modules that keep their keys and values in a paged cache."""

from jaxkv.flax.attention import PagedAttention

__all__ = ["PagedAttention"]
