"""What happens to a query or key head before it is stored: RMSNorm and RoPE, in f32 registers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.formats import GROUP_SIZE
from pallas_kernels._compat import plgpu, store
from pallas_kernels.write import tiles
from pallas_kernels.write.tiles import GROUPS_PER_WORD, Tile

RopeStyle = Literal["none", "half", "interleaved"]


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The static part of normalisation and rotary embedding of one head.

    Attributes:
      tile: the tile.
      rope_style: how dims are paired.
      rotary_dim: how many of the first dims are rotated.
      eps: epsilon of the norm.
    """

    tile: Tile
    rope_style: RopeStyle
    rotary_dim: int
    eps: float

    @property
    def layout(self) -> Any:
        """The register layout in which pairs of RoPE are in one thread."""
        return self.tile.transposed if self.rope_style == "half" else self.tile.grouped

    def angle_shape(self) -> tuple[int, int, int]:
        """A token's cosines, split so that `rope` can load them."""
        if self.rope_style == "half":
            return (1, self.rotary_dim // (2 * GROUP_SIZE), GROUP_SIZE)
        return (self.tile.words, GROUPS_PER_WORD, GROUP_SIZE // 2)

    def norm(self, x: jax.Array, weight: Any) -> jax.Array:
        """RMSNorm of each token's head.

        Args:
          x: f32 of the tile's shape, in `layout`.
          weight: [words, 4, 16] reference, any float dtype.
        """
        total = x * x
        for axis in (3, 2, 1):
            total = jnp.sum(total, axis=axis)
        mean = total * tiles.f32(1 / self.tile.head_dim)
        inverse = lax.rsqrt(mean + tiles.f32(self.eps))
        scale = tiles.load(weight, self.layout.reduce(0)).astype(jnp.float32)
        return x * self._spread(inverse, (0,)) * self._spread(scale, (1, 2, 3))

    def _spread(self, value: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.tile.shape, dims), self.layout)

    def rope(self, x: jax.Array, cos: Any, sin: Any) -> jax.Array:
        """Rotates pairs of dims.

        Args:
          x: f32 of the tile's shape, in `layout`.
          cos: f32 [tokens, *angle_shape()] reference, the tile's tokens.
          sin: as cos.
        """
        if self.rope_style == "half":
            return self._rope_half(x, cos, sin)
        return self._rope_interleaved(x, cos, sin)

    def _rope_half(self, x: jax.Array, cos: Any, sin: Any) -> jax.Array:
        groups = [
            tiles.slice_axis(tiles.slice_axis(x, 1, w, w + 1), 2, g, g + 1)
            for w in range(self.tile.words)
            for g in range(GROUPS_PER_WORD)
        ]
        half = self.rotary_dim // (2 * GROUP_SIZE)
        for i in range(half):
            angle = (slice(None), slice(None), slice(i, i + 1), slice(None))
            c, s = (tiles.load(table.at[angle], self.layout) for table in (cos, sin))
            a, b = groups[i], groups[i + half]
            groups[i], groups[i + half] = a * c - b * s, b * c + a * s
        words = [
            jnp.concatenate(groups[w * GROUPS_PER_WORD : (w + 1) * GROUPS_PER_WORD], axis=2)
            for w in range(self.tile.words)
        ]
        return words[0] if len(words) == 1 else jnp.concatenate(words, axis=1)

    def _rope_interleaved(self, x: jax.Array, cos: Any, sin: Any) -> jax.Array:
        c, s = (tiles.load(table, self.layout) for table in (cos, sin))
        pieces = []
        for i in range(GROUP_SIZE // 2):
            a = tiles.slice_axis(x, 3, 2 * i, 2 * i + 1)
            b = tiles.slice_axis(x, 3, 2 * i + 1, 2 * i + 2)
            ci, si = (tiles.slice_axis(t, 3, i, i + 1) for t in (c, s))
            pieces += [a * ci - b * si, b * ci + a * si]
        return jnp.concatenate(pieces, axis=3)

    def relayout(self, x: jax.Array, layout: Any, exchange: Any, sync: Any) -> jax.Array:
        """Moves a tile into another register layout, through shared memory where they differ."""
        if layout == self.layout:
            return x
        view = exchange.at[:, :, :, :GROUP_SIZE]
        store(view, x)
        sync()
        return tiles.load(view, layout)
