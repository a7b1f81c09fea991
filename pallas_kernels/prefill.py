"""Paged attention for many query rows: prefill and long chunks (Hopper).

Query rows lie on the long side of both products: scores = Q [64, D] x K^T [D, 64] and
output = weights [64, 64] x V [64, D], so that the softmax stays inside a warp's rows. Each tile of
pages is decoded once, into shared memory, for all 64 rows. The compiler places barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._compat import plgpu, store
from pallas_kernels.dequantize import TILE, has_row_scale
from pallas_kernels.products import Wgmma
from pallas_kernels.sides import Side
from pallas_kernels.stream import LAYOUT, Limits, Problem, Stream, matrix, ring_scratch
from pallas_kernels.tuning import PREFILL_ROWS as ROWS


def prefill_scratch(problem: Problem) -> dict[str, Any]:
    """Shared memory of a program."""
    scratch = ring_scratch(problem)
    scratch["weights"] = matrix((ROWS, TILE), problem.v.dtype)
    for name, side in (("k_tile", problem.k), ("v_tile", problem.v)):
        if side.is_decoded:
            scratch[name] = matrix((TILE, side.spec.head_dim), side.dtype)
    return scratch


class Prefill(Stream):
    """One program; its outputs are [rows, V head_dim]."""

    row_layout = LAYOUT.reduce(1)

    def _prepare(self) -> None:
        self.products = Wgmma(self.interpret)

    def _initial_sums(self) -> tuple[jax.Array, jax.Array]:
        sums = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), self.row_layout)
        zero = jnp.zeros((ROWS, self.problem.v.spec.head_dim), jnp.float32)
        return sums, plgpu.layout_cast(zero, LAYOUT)

    def _step(
        self,
        tile: Any,
        last: Any,
        slot: Any,
        previous_slot: Any,
        state: Sequence[jax.Array],
        limits: Limits | None,
    ) -> tuple[jax.Array, ...]:
        running_max, scaled_max, sums, out = state
        start, bounds, keep = self._bounds(tile)
        self._wait_tile(slot)
        k_tile = self._tile("k_tile", self.problem.k, self.k_ring, slot, None)
        self._commit()
        scores = self._cap(self.products.scores(self.scratch["q_tile"], k_tile.T))
        scores = self._mask(scores, 1, bounds, start, limits)
        running_max = jnp.maximum(running_max, scores.max(axis=1))
        new_max = self._exponent(running_max)
        shrink = jnp.exp2(scaled_max - new_max)
        exponent = self._exponent(scores)
        weights = jnp.exp2(exponent - lax.broadcast_in_dim(new_max, scores.shape, (0,)))
        sums = sums * shrink + weights.sum(axis=1)
        self.scratch["weights"][...] = weights.astype(self.problem.v.dtype)
        v_tile = self._tile("v_tile", self.problem.v, self.v_ring, slot, keep)
        self._commit()
        self._issue(tile + (self.problem.tuning.stages - 1), last, previous_slot)
        out = out * lax.broadcast_in_dim(shrink, out.shape, (0,))
        out = self.products.accumulate_rows(out, self.scratch["weights"], v_tile)
        return running_max, new_max, sums, out

    def _tile(self, name: str, side: Side, ring: Sequence[Any], slot: Any, keep: Any) -> Any:
        """A tile [64, D] in shared memory, decoded; rows outside `keep` zeroed."""
        if not side.is_decoded:
            tile = ring[0].at[slot]
            if keep is not None:
                self._zero_unseen(tile, keep)
            return tile
        values = side.decode(ring, slot, keep, self.opaque_zero, LAYOUT, self.interpret)
        if has_row_scale(side.spec):
            scale = side.row_scales(ring, slot, keep, self.interpret)
            scaled = values.astype(jnp.float32) * lax.broadcast_in_dim(scale, values.shape, (0,))
            values = scaled.astype(side.dtype)
        self.scratch[name][...] = values
        return self.scratch[name]

    def _write(self, count: Any, results: Sequence[jax.Array], outputs: Sequence[Any]) -> None:
        scaled_max, sums, out = results
        self._write_sums(outputs, scaled_max, sums)
        part = (self.block, self.head, self.split)

        @pl.when(count > 0)
        def _() -> None:
            store(outputs[0].at[part], out)
