"""Paged attention for few query rows: decode and verification, and the portable path.

Tokens lie on the long side of both products: scores^T = K [64, D] x Q^T [D, rows] and
output^T = V^T [D, 64] x weights^T [64, rows], so that a handful of rows does not waste a matrix
product's 64. Parts of the context are merged outside (`merge`). Online softmax as in
FlashAttention (https://arxiv.org/abs/2205.14135), parts as in Flash-Decoding. On the wgmma path
barriers are placed here; on the mma path the compiler places them.
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
from pallas_kernels.products import Mma, Products, Wgmma
from pallas_kernels.stream import LAYOUT, Limits, Problem, Stream, matrix, ring_scratch


def _products(problem: Problem, interpret: bool) -> Products:
    return (Wgmma if problem.tuning.path == "wgmma" else Mma)(interpret)


def _keys_in_shared(problem: Problem, interpret: bool) -> bool:
    """Whether decoded keys pass through shared memory; the interpreter's wgmma needs them there."""
    needs = interpret and problem.tuning.path == "wgmma"
    return problem.k.is_decoded and (needs or not problem.tuning.key_in_registers)


def decode_scratch(problem: Problem, interpret: bool) -> dict[str, Any]:
    """Shared memory of a program."""
    k, v, rows = problem.k, problem.v, problem.tuning.rows
    scratch = ring_scratch(problem)
    scratch["weights"] = _products(problem, interpret).weights_scratch(rows, v.dtype)
    if problem.tuning.path == "wgmma":
        scratch["out"] = plgpu.SMEM((v.spec.head_dim, rows), jnp.float32)
    if _keys_in_shared(problem, interpret):
        scratch["k_tile"] = matrix((TILE, k.spec.head_dim), k.dtype)
    if v.is_decoded:
        scratch["v_tile"] = matrix((TILE, v.spec.head_dim), v.dtype)
    return scratch


class Decode(Stream):
    """One program; its outputs are [V head_dim, rows]."""

    row_layout = LAYOUT.reduce(0)

    def _prepare(self) -> None:
        self.products = _products(self.problem, self.interpret)
        self.query = self.products.query(self.scratch["q_tile"])

    def _initial_sums(self) -> tuple[jax.Array, jax.Array]:
        rows, v_dim = self.problem.tuning.rows, self.problem.v.spec.head_dim
        # Sums stay spread over the tile's tokens until the end.
        sums = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), LAYOUT)
        return sums, plgpu.layout_cast(jnp.zeros((v_dim, rows), jnp.float32), LAYOUT)

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
        scores = self._mask(self._cap(self._scores(slot)), 0, bounds, start, limits)
        running_max = jnp.maximum(running_max, scores.max(axis=0))
        new_max = self._exponent(running_max)
        shrink = jnp.exp2(scaled_max - new_max)
        exponent = self._exponent(scores)
        weights = jnp.exp2(exponent - lax.broadcast_in_dim(new_max, scores.shape, (1,)))
        sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (1,)) + weights
        self._store_weights(slot, keep, weights)
        v_tile = self._value_tile(slot, keep)
        self._commit()
        # Every warp has now left the previous tile, whose slot the next copy takes.
        self._issue(tile + (self.problem.tuning.stages - 1), last, previous_slot)
        out = out * lax.broadcast_in_dim(shrink, out.shape, (1,))
        out = self.products.accumulate(out, v_tile, self.scratch["weights"])
        return running_max, new_max, sums, out

    def _scores(self, slot: Any) -> jax.Array:
        """Raw scores^T [64, rows] of a tile."""
        side = self.problem.k
        if not side.is_decoded:
            return self.products.scores(self.k_ring[0].at[slot], self.query)
        in_shared = _keys_in_shared(self.problem, self.interpret)
        layout = LAYOUT if in_shared else self.products.key_layout(side.dtype)
        keys: Any = side.decode(self.k_ring, slot, None, self.opaque_zero, layout, self.interpret)
        if in_shared:
            self.scratch["k_tile"][...] = keys
            self._commit()
            keys = self.scratch["k_tile"]
        scores = self.products.scores(keys, self.query)
        if has_row_scale(side.spec):
            scale = side.row_scales(self.k_ring, slot, None, self.interpret)
            scores *= lax.broadcast_in_dim(scale, scores.shape, (0,))
        return scores

    def _store_weights(self, slot: Any, keep: tuple[Any | None, Any], weights: jax.Array) -> None:
        """Puts weights^T into shared memory for the second product, row scales of V included."""
        side = self.problem.v
        if has_row_scale(side.spec):
            scale = side.row_scales(self.v_ring, slot, keep, self.interpret)
            weights *= lax.broadcast_in_dim(scale, weights.shape, (0,))
        self.products.store_weights(self.scratch["weights"], weights.astype(side.dtype))

    def _value_tile(self, slot: Any, keep: tuple[Any | None, Any]) -> Any:
        """The tile's values [64, D] in shared memory, rows that nobody sees zeroed.

        Whatever those rows hold, NaN included, must not meet its zero weight.
        """
        side = self.problem.v
        if side.is_decoded:
            self.scratch["v_tile"][...] = side.decode(
                self.v_ring, slot, keep, self.opaque_zero, LAYOUT, self.interpret
            )
            return self.scratch["v_tile"]
        tile = self.v_ring[0].at[slot]
        self._zero_unseen(tile, keep)
        return tile

    def _write(self, count: Any, results: Sequence[jax.Array], outputs: Sequence[Any]) -> None:
        scaled_max, sums, out = results
        self._write_sums(outputs, scaled_max, sums.sum(axis=0))
        out_ref, part = outputs[0], (self.block, self.head, self.split)

        @pl.when(count > 0)
        def _() -> None:
            if self.problem.tuning.path == "mma":
                store(out_ref.at[part], out)
                return
            self.scratch["out"][...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.scratch["out"], out_ref.at[part])
            plgpu.wait_smem_to_gmem(0)
