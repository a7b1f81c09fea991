"""The two matrix products of attention, on Hopper's wgmma and on the older, portable mma."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._compat import plgpu
from pallas_kernels.dequantize import TILE
from pallas_kernels.sides import swizzled

# The accumulators of both instructions have this layout.
LAYOUT = plgpu.Layout.WGMMA


class Products(Protocol):
    """scores^T = K Q^T and output^T += V^T weights^T, tokens on the long side."""

    def key_layout(self, dtype: Any) -> Any:
        """The register layout in which decoded keys [64, D] are multiplied."""

    def weights_scratch(self, rows: int, dtype: Any) -> Any:
        """Shared memory for the weights of a tile."""

    def store_weights(self, target: Any, weights: jax.Array) -> None:
        """Stores weights^T [64, rows], already of the target's dtype."""

    def query(self, q_tile: Any) -> Any:
        """The query operand, from its tile [rows, D] in shared memory."""

    def scores(self, keys: Any, query: Any) -> jax.Array:
        """f32 [64, rows], from keys [64, D] in shared memory or registers."""

    def accumulate(self, out: jax.Array, v_tile: Any, weights: Any) -> jax.Array:
        """Out f32 [D, rows] + v_tile^T weights^T, from [64, D] and [rows, 64] in shared memory."""


class Wgmma:
    """Hopper: asynchronous warpgroup products over shared memory."""

    def __init__(self, interpret: bool) -> None:
        """The interpreter has no accumulator that starts from a value."""
        self._interpret = interpret

    def key_layout(self, dtype: Any) -> Any:
        """Keys lie as accumulators do."""
        del dtype
        return LAYOUT

    def weights_scratch(self, rows: int, dtype: Any) -> Any:
        """[rows, 64], swizzled as wgmma reads its right operand."""
        return plgpu.SMEM((rows, TILE), dtype, transforms=swizzled(TILE, dtype))

    def store_weights(self, target: Any, weights: jax.Array) -> None:
        """See `Products`."""
        target.T[...] = weights

    def query(self, q_tile: Any) -> Any:
        """A transposed view: wgmma reads it from shared memory."""
        return q_tile.T

    def scores(self, keys: Any, query: Any) -> jax.Array:
        """See `Products`."""
        return self._multiply(keys, query)

    def accumulate(self, out: jax.Array, v_tile: Any, weights: Any) -> jax.Array:
        """See `Products`."""
        return self._accumulate(out, v_tile.T, weights.T)

    def accumulate_rows(self, out: jax.Array, weights: Any, v_tile: Any) -> jax.Array:
        """Out f32 [rows, D] + weights [rows, 64] v_tile [64, D], both in shared memory."""
        return self._accumulate(out, weights, v_tile)

    def _accumulate(self, out: jax.Array, a: Any, b: Any) -> jax.Array:
        if self._interpret:
            return out + self._multiply(a, b)

        def run(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, a, b)

        return plgpu.layout_cast(pl.run_state(run)(plgpu.ACC.init(out)), LAYOUT)

    def _multiply(self, a: Any, b: Any) -> jax.Array:
        def run(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, a, b)
            return plgpu.layout_cast(accumulator[...], LAYOUT)

        return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


class Mma:
    """Ampere and later: synchronous warp products over registers."""

    def __init__(self, interpret: bool) -> None:
        """The interpreter knows no mma; there the products are plain."""
        self._interpret = interpret

    def key_layout(self, dtype: Any) -> Any:
        """The left operand's fragments."""
        return plgpu.Layout.MMA_LHS(dtype)

    def weights_scratch(self, rows: int, dtype: Any) -> Any:
        """[64, rows]: before Hopper there is no transposing store."""
        return plgpu.SMEM((TILE, rows), dtype)

    def store_weights(self, target: Any, weights: jax.Array) -> None:
        """See `Products`."""
        target[...] = weights

    def query(self, q_tile: Any) -> Any:
        """Loaded once, as the right operand's fragments."""
        return self._load(q_tile.T, q_tile.dtype, plgpu.Layout.MMA_RHS)

    def scores(self, keys: Any, query: Any) -> jax.Array:
        """See `Products`."""
        if not isinstance(keys, jax.Array):
            keys = self._load(keys, query.dtype, plgpu.Layout.MMA_LHS)
        zero = jnp.zeros((keys.shape[0], query.shape[1]), jnp.float32)
        return self._multiply(plgpu.layout_cast(zero, LAYOUT), keys, query)

    def accumulate(self, out: jax.Array, v_tile: Any, weights: Any) -> jax.Array:
        """See `Products`."""
        values = self._load(v_tile.T, weights.dtype, plgpu.Layout.MMA_LHS)
        right = self._load(weights, weights.dtype, plgpu.Layout.MMA_RHS)
        return self._multiply(out, values, right)

    def _load(self, ref: Any, dtype: Any, layout: Any) -> jax.Array:
        if self._interpret:
            return ref[...]
        return plgpu.load(ref, layout=layout(dtype), optimized=False)

    def _multiply(self, accumulator: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if self._interpret:
            return accumulator + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.layout_cast(plgpu.mma(accumulator, a, b), LAYOUT)
