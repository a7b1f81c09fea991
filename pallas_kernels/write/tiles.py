"""How a warpgroup holds a tile of heads.

A tile is 128 scale groups: `tokens` tokens of one head, shape [tokens, words, 4, 16] for scale word
(four groups), group in the word and element in the group. One thread owns one group, so amax,
search and packing need no exchange between threads, and a tile is small enough that a decode step
of a few tokens fills it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.formats import GROUP_SIZE
from pallas_kernels._compat import mgpu, plgpu

THREADS = 128
WARPS = 4
LANES = 32
GROUPS_PER_WORD = 4


def tiled_layout(
    tiles: tuple[tuple[int, ...], ...], warps: tuple[Any, ...], lanes: tuple[Any, ...], vector: int
) -> Any:
    """A tiled register layout, given without care for its canonical form."""
    layout = mgpu.TiledLayout(
        plgpu.Tiling(tiles), warps, lanes, vector, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads a reference, strided ones too, into a register layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Geometry and register layouts of a tile of one head.

    Attributes:
      head_dim: elements of the head: 64, 128 or 256.
      interpreted: whether the kernel runs in the interpreter, which takes no inline PTX.
    """

    head_dim: int
    interpreted: bool = False

    @property
    def words(self) -> int:
        """Scale words (four groups) of one head."""
        return self.head_dim // (GROUP_SIZE * GROUPS_PER_WORD)

    @property
    def tokens(self) -> int:
        """Tokens of one tile."""
        return THREADS * GROUP_SIZE // self.head_dim

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[tokens, words, groups per word, elements]."""
        return (self.tokens, self.words, GROUPS_PER_WORD, GROUP_SIZE)

    @property
    def grouped(self) -> Any:
        """Thread = (token, group); the 16 elements of the group are its registers."""
        t, w = self.tokens, self.words
        base = (t, w, GROUPS_PER_WORD, 1)
        warp = (t // WARPS, w, GROUPS_PER_WORD, 1)
        return tiled_layout((base, warp, (1, 1, 1, 1)), (-12,), (-8, -7, -6), -1)

    @property
    def transposed(self) -> Any:
        """Thread = (token, some elements of every group); the groups are its registers."""
        t, lanes = self.tokens, self.head_dim // GROUP_SIZE
        base = (t, 1, 1, lanes)
        warp = (t // WARPS, 1, 1, lanes)
        return tiled_layout((base, warp, (1, 1, 1, 1)), (-12,), (-8, -5), -1)

    @property
    def token_layout(self) -> Any:
        """One value per token, on all threads of the token."""
        return self.grouped.reduce((1, 2, 3))

    def spread(self, value: jax.Array) -> jax.Array:
        """[tokens, words, 4] or [tokens] to the tile's shape."""
        dims = tuple(range(value.ndim))
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.shape, dims), self.grouped)

    def iota(self, axis: int, dtype: Any = jnp.uint32, *, transposed: bool = False) -> jax.Array:
        """Index along an axis, in the tile's shape."""
        layout = self.transposed if transposed else self.grouped
        return plgpu.broadcasted_iota(dtype, self.shape, axis, layout=layout)


def row_layout(shape: tuple[int, int, int]) -> Any:
    """Spreads one row's words [a, b, c] over the threads; what is left over repeats them."""
    a, b, c = shape
    count = a * b * c
    vector = max(1, count // THREADS)
    threads = count // vector
    lanes = min(threads, LANES)
    warps = threads // lanes
    # Rows of a warp, taken from the minor end: first within c, then within b, then within a.
    lane_c = min(c // vector, lanes)
    lane_b = min(b, lanes // lane_c)
    lane_a = lanes // (lane_c * lane_b)
    warp_b = b // lane_b
    warp_a = warps // warp_b
    assert c == lane_c * vector and a == lane_a * warp_a, shape
    warp = (a // warp_a, b // warp_b, c)
    lane = (1, 1, vector)
    # Tiled: warps_a, warps_b, 1 | lanes_a, lanes_b, lanes_c | 1, 1, vector.
    return tiled_layout(
        (shape, warp, lane),
        (plgpu.Replicated(WARPS // warps), -9, -8) if warps < WARPS else (-9, -8),
        (plgpu.Replicated(LANES // lanes), -6, -5, -4) if lanes < LANES else (-6, -5, -4),
        -1,
    )


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of f32 as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def float_of(bits: jax.Array) -> jax.Array:
    """uint32 bits as f32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def slice_axis(x: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    """x[..., start:stop, ...] along an axis, without strides."""
    starts, stops = [0] * x.ndim, list(x.shape)
    starts[axis], stops[axis] = start, stop
    return lax.slice(x, starts, stops)


def f32(value: float) -> np.float32:
    """A constant in f32."""
    return np.float32(value)
