"""The Hadamard rotation of a tile, as butterflies in f32.

A head is [words, 4, 16] and the Hadamard matrix of natural order is the Kronecker product of those
of the three axes, in any order. Threads first hold all groups of a few elements, then, after one
exchange through shared memory, all elements of a group, so every butterfly is between registers.
Sums and differences in f32 round less than a product with the matrix: log2(n) additions deep
instead of n.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.codecs import rotation_factor, sign_tables
from jaxkv.formats import GROUP_SIZE, SideSpec
from pallas_kernels._compat import store
from pallas_kernels.write import tiles
from pallas_kernels.write.tiles import Tile

# Four elements of padding: stmatrix needs its rows on 16 bytes, and vectors of four stay free of
# bank conflicts.
PADDED_GROUP = GROUP_SIZE + 4


def butterflies(x: jax.Array, axis: int) -> jax.Array:
    """Unscaled Walsh-Hadamard transform along an axis, natural order."""
    size = x.shape[axis]
    if size == 1:
        return x
    low = tiles.slice_axis(x, axis, 0, size // 2)
    high = tiles.slice_axis(x, axis, size // 2, size)
    halves = [butterflies(low + high, axis), butterflies(low - high, axis)]
    return jnp.concatenate(halves, axis)


def _flip_signs(x: jax.Array, signs: np.ndarray, tile: Tile, *, transposed: bool) -> jax.Array:
    """Multiplies by signs f32 [head_dim] of +1 and -1, by their sign bits."""
    masks = [
        sum(1 << int(i) for i in np.flatnonzero(group < 0))
        for group in signs.reshape(-1, GROUP_SIZE)
    ]
    word = tile.iota(1, transposed=transposed)
    group = tile.iota(2, transposed=transposed) + word * np.uint32(tiles.GROUPS_PER_WORD)
    mask = jnp.full(tile.shape, np.uint32(masks[0]), jnp.uint32)
    for index, bits in enumerate(masks[1:], start=1):
        mask = jnp.where(group == np.uint32(index), np.uint32(bits), mask)
    bit = (mask >> tile.iota(3, transposed=transposed)) & np.uint32(1)
    return tiles.float_of(tiles.bits_of(x) ^ (bit << np.uint32(31)))


def rotate(x: jax.Array, spec: SideSpec, tile: Tile, exchange: Any, sync: Any) -> jax.Array:
    """Rotates a tile.

    Args:
      x: f32, the tile's shape, in `tile.transposed`.
      spec: the side, rotated.
      tile: the tile.
      exchange: shared memory, f32 [tokens, words, 4, PADDED_GROUP].
      sync: makes shared memory stores visible to all threads.

    Returns:
      f32, the tile's shape, in `tile.grouped`.
    """
    signs = sign_tables(spec.head_dim) if spec.rotation == "signs" else None
    if signs is not None:
        x = _flip_signs(x, signs[0], tile, transposed=True)
    x = butterflies(butterflies(x, 1), 2)
    view = exchange.at[:, :, :, :GROUP_SIZE]
    store(view, x)
    sync()
    x = butterflies(tiles.load(view, tile.grouped), 3)
    if signs is not None:
        x = _flip_signs(x, signs[1], tile, transposed=False)
    return x * rotation_factor(spec.head_dim)
