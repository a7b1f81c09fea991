"""Chunks of blocks, decoded to matrix operands.

A chunk is read from the pages a few blocks at a time and decoded to *fields*: arrays whose last
axes, one after the other, make up the head.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.codecs import Pages, decode_rows
from jaxkv.formats import SideSpec


@dataclasses.dataclass(frozen=True)
class Fields:
    """A decoded chunk.

    Attributes:
      values: arrays [blocks, heads, block_size, n], f32 or bf16; their n sum to head_dim.
    """

    values: tuple[jax.Array, ...]


def read_blocks(pages: Pages, ids: jax.Array) -> Pages:
    """The blocks `ids`, int32 [n] and in range, of one side."""
    return jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), pages)


def decode(chunk: Pages, spec: SideSpec) -> Fields:
    """Decodes a chunk, without the layer's fp8 scale."""
    scales = chunk.scales
    if scales is not None and scales.ndim == 4:
        scales = jnp.swapaxes(scales, -1, -2)
    return Fields((decode_rows(chunk.data, scales, spec),))
