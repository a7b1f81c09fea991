"""Paged attention: 64-token tiles of pages against a few query rows.

Tokens lie on the long side of both products: scores^T = K [64, D] x Q^T [D, rows] and
output^T = V^T [D, 64] x weights^T [64, rows]. One warpgroup works on a part of one sequence's
context; parts are merged outside (`merge`). On Hopper tiles come by TMA and barriers are placed
here; before Hopper they come by cp.async and the compiler places barriers. Online softmax as in
FlashAttention (https://arxiv.org/abs/2205.14135), parts as in Flash-Decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import cp_async
from pallas_kernels._compat import plgpu, store
from pallas_kernels.dequantize import TILE, has_row_scale
from pallas_kernels.products import LAYOUT as _LAYOUT
from pallas_kernels.products import Mma, Products, Wgmma
from pallas_kernels.sides import Side, swizzled
from pallas_kernels.tuning import Tuning

_COLUMNS = _LAYOUT.reduce(0)
LOG2_E = 1.4426950408889634
# Below every raw score, and finite, so that differences of running maxima are never NaN. A power of
# two, so that its product with any factor is exact, fused into a difference or not.
_LOWEST = np.float32(-(2.0**64))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything static about one attention kernel.

    Attributes:
      k: the key side.
      v: the value side.
      tuning: how to build it.
      splits: parts of the context.
      split_tiles: 64-token tiles of a part.
      used_rows: query rows that hold anything, at most `tuning.rows`.
      one_token: whether a block's rows all belong to one query token.
      window: keys that a query sees, itself included; None for all.
      soft_cap: bound of the scores, or None.
      has_tma: whether the target has the copy engine of Hopper and later.
    """

    k: Side
    v: Side
    tuning: Tuning
    splits: int
    split_tiles: int
    used_rows: int
    one_token: bool
    window: int | None
    soft_cap: float | None
    has_tma: bool = True


def attend_tiles(
    problem: Problem,
    q: jax.Array,
    k_arrays: Sequence[jax.Array],
    v_arrays: Sequence[jax.Array],
    block_tables: jax.Array,
    tiles: jax.Array,
    limits: jax.Array,
    factor: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends row blocks of queries to parts of their contexts.

    Args:
      problem: the static part.
      q: [row_blocks, kv_heads, rows, K head_dim] in the K side's compute dtype, columns in its
        register order.
      k_arrays: `Side.global_arrays` of the keys.
      v_arrays: `Side.global_arrays` of the values.
      block_tables: int32 [sequences, columns], every entry a valid block id.
      tiles: int32 [row_blocks, 4]: the sequence, the first and one past the last position that
        any of the block's queries sees, and 0.
      limits: int32 [row_blocks, rows]: one past the last position a row sees; 0 for no row.
      factor: f32 [1], positive: from raw scores to scores; in base 2 unless there is a soft cap.
      interpret: interpreter parameters, or None to compile.

    Returns:
      Unnormalized outputs f32 [row_blocks, kv_heads, splits, V head_dim, rows] in the V side's
      register order (undefined where a part is empty), and running maxima (base 2) and sums,
      f32 [row_blocks, kv_heads, splits, rows].
    """
    num_blocks, num_heads, rows, _ = q.shape
    v_dim = problem.v.spec.head_dim
    parts = (num_blocks, num_heads, problem.splits)
    f32 = jnp.float32
    out_type = (
        jax.ShapeDtypeStruct((*parts, v_dim, rows), f32),
        jax.ShapeDtypeStruct((*parts, rows), f32),
        jax.ShapeDtypeStruct((*parts, rows), f32),
    )
    inputs = (q, *k_arrays, *v_arrays, block_tables, tiles, limits, factor)
    is_interpreted = interpret is not None

    def body(*refs: Any, **scratch: Any) -> None:
        kernel = _Kernel(problem, is_interpreted, refs[: len(inputs)], len(k_arrays), scratch)
        kernel.run(refs[len(inputs) :])

    options = {} if interpret is None else {"interpret": interpret}
    call = plgpu.kernel(
        body,
        out_type=out_type,
        grid=parts,
        grid_names=("row_block", "head", "split"),
        scratch_types=_scratch(problem, is_interpreted),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=problem.tuning.path == "wgmma"
        ),
        **options,
    )
    return call(*inputs)


def _products(problem: Problem, interpret: bool) -> Products:
    return (Wgmma if problem.tuning.path == "wgmma" else Mma)(interpret)


def _scratch(problem: Problem, interpret: bool) -> dict[str, Any]:
    k, v, rows, stages = problem.k, problem.v, problem.tuning.rows, problem.tuning.stages
    k_dim, v_dim = k.spec.head_dim, v.spec.head_dim

    def matrix(shape: tuple[int, int], dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[1], dtype))

    scratch = dict(
        q_tile=matrix((rows, k_dim), k.dtype),
        k_ring=k.scratch(stages),
        v_ring=v.scratch(stages),
        weights=_products(problem, interpret).weights_scratch(rows, v.dtype),
    )
    if problem.has_tma:
        arrivals = k.copies_per_tile + v.copies_per_tile
        scratch["q_barrier"] = plgpu.Barrier()
        scratch["barrier"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    if problem.tuning.path == "wgmma":
        scratch["out"] = plgpu.SMEM((v_dim, rows), jnp.float32)
    if _keys_in_shared(problem, interpret):
        scratch["k_tile"] = matrix((TILE, k_dim), k.dtype)
    if v.is_decoded:
        scratch["v_tile"] = matrix((TILE, v_dim), v.dtype)
    return scratch


def _keys_in_shared(problem: Problem, interpret: bool) -> bool:
    """Whether decoded keys pass through shared memory; the interpreter's wgmma needs them there."""
    needs = interpret and problem.tuning.path == "wgmma"
    return problem.k.is_decoded and (needs or not problem.tuning.key_in_registers)


class _Kernel:
    """The body of one program: one row block, one head, one part of the context."""

    def __init__(
        self,
        problem: Problem,
        interpret: bool,
        inputs: Sequence[Any],
        num_k: int,
        scratch: dict[str, Any],
    ) -> None:
        q_ref, *arrays, table_ref, tiles_ref, limits_ref, factor_ref = inputs
        self.problem, self.interpret, self.scratch = problem, interpret, scratch
        self.k_source, self.v_source = arrays[:num_k], arrays[num_k:]
        self.k_ring, self.v_ring = scratch["k_ring"], scratch["v_ring"]
        self.products = _products(problem, interpret)
        self.block, self.head = lax.axis_index("row_block"), lax.axis_index("head")
        self.split = lax.axis_index("split")
        self.q_ref, self.limits_ref, self.tiles_ref = q_ref, limits_ref, tiles_ref
        self.table = table_ref.at[tiles_ref[self.block, 0]]
        self.low, self.high = tiles_ref[self.block, 1], tiles_ref[self.block, 2]
        self.factor_ref = factor_ref
        self.last_tile = table_ref.shape[1] * problem.k.block_size // TILE - 1

    def run(self, outputs: Sequence[Any]) -> None:
        """Streams the part's tiles and writes its results."""
        problem, stages = self.problem, self.problem.tuning.stages
        first = lax.div(self.low, jnp.int32(TILE)) + self.split * problem.split_tiles
        tiles = lax.div(self.high + (TILE - 1), jnp.int32(TILE)) - first
        count = jnp.clip(tiles, 0, problem.split_tiles)
        last = first + count
        self._copy_query(self.q_ref.at[self.block, self.head])
        for slot in range(stages - 1):
            self._issue(first + slot, last, jnp.int32(slot))
        limits = None
        if not problem.one_token:
            limits_ref = self.limits_ref.at[self.block]
            limits = plgpu.load(limits_ref, layout=_COLUMNS, optimized=False)
        self.factor, self.opaque_zero = self.factor_ref[0], self.tiles_ref[self.block, 3]
        self._wait_query()
        self.query = self.products.query(self.scratch["q_tile"])

        def step(tile: Any, carry: Any) -> Any:
            slot, previous_slot, *state = carry
            state = self._step(tile, last, slot, previous_slot, state, limits)
            return jnp.where(slot == stages - 1, 0, slot + 1), slot, *state

        rows, v_dim = problem.tuning.rows, problem.v.spec.head_dim
        running_max = plgpu.layout_cast(jnp.full((rows,), _LOWEST, jnp.float32), _COLUMNS)
        sums = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), _LAYOUT)
        out = plgpu.layout_cast(jnp.zeros((v_dim, rows), jnp.float32), _LAYOUT)
        state = (running_max, self._exponent(running_max), sums, out)
        carry = (jnp.int32(0), jnp.int32(stages - 1), *state)
        _, _, _, *results = lax.fori_loop(first, last, step, carry)
        self._write(count, results, outputs)

    def _step(
        self,
        tile: Any,
        last: Any,
        slot: Any,
        previous_slot: Any,
        state: Sequence[jax.Array],
        limits: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        """One tile of the online softmax."""
        running_max, scaled_max, sums, out = state
        start = tile * TILE
        bounds = (self.low - start, self.high - start)
        # Without a window every tile's first row is seen.
        keep = (None if self.problem.window is None else bounds[0], bounds[1])
        self._wait_tile(slot)
        scores = self._mask(self._cap(self._scores(slot)), bounds, start, limits)
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

    def _copy_query(self, source: Any) -> None:
        target = self.scratch["q_tile"]
        if self.problem.has_tma:
            plgpu.copy_gmem_to_smem(source, target, self.scratch["q_barrier"])
            return
        rows, columns = target.shape
        cp_async.copy_rows(source, target, swizzled(columns, target.dtype), 0, rows, columns)
        cp_async.commit_group()

    def _wait_query(self) -> None:
        if self.problem.has_tma:
            plgpu.barrier_wait(self.scratch["q_barrier"])
        else:
            cp_async.wait_groups(self.problem.tuning.stages - 1)

    def _issue(self, tile: Any, last: Any, slot: Any) -> None:
        """Starts the copies of a tile of the sequence into a slot of both rings."""
        if self.problem.has_tma:
            pl.when(tile < last)(functools.partial(self._copy_tile, tile, slot))
        else:  # cp.async is waited for by count, so that tiles past the end are copied too.
            self._copy_tile(jnp.clip(tile, 0, self.last_tile), slot)
            cp_async.commit_group()

    def _copy_tile(self, tile: Any, slot: Any) -> None:
        k, v = self.problem.k, self.problem.v
        token = tile * TILE
        column = lax.div(token, jnp.int32(k.block_size))
        blocks = [self.table[column + p] for p in range(k.pages_per_tile)]
        offset = token - column * k.block_size
        barrier = self.scratch["barrier"].at[slot] if self.problem.has_tma else None
        k.issue(self.k_source, self.k_ring, barrier, slot, self.head, blocks, offset)
        v.issue(self.v_source, self.v_ring, barrier, slot, self.head, blocks, offset)

    def _wait_tile(self, slot: Any) -> None:
        if self.problem.has_tma:
            plgpu.barrier_wait(self.scratch["barrier"].at[slot])
        else:
            cp_async.wait_groups(self.problem.tuning.stages - 2)

    def _commit(self) -> None:
        """Makes stores to shared memory visible to other warps, and to TMA and wgmma."""
        if self.problem.has_tma:
            plgpu.commit_smem()
        else:
            cp_async.barrier()

    def _scores(self, slot: Any) -> jax.Array:
        """Raw scores^T [64, rows] of a tile."""
        side = self.problem.k
        if not side.is_decoded:
            return self.products.scores(self.k_ring[0].at[slot], self.query)
        in_shared = _keys_in_shared(self.problem, self.interpret)
        layout = _LAYOUT if in_shared else self.products.key_layout(side.dtype)
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

    def _cap(self, scores: jax.Array) -> jax.Array:
        """Cap * tanh(scores * factor / cap) where there is a cap, else the raw scores.

        tanh by exponentials: its approximation in hardware is off by 2^-11 of the cap.
        """
        if self.problem.soft_cap is None:
            return scores
        cap = np.float32(self.problem.soft_cap)
        # Beyond 15 tanh is 1 to f32, and its exponential must not overflow.
        ratio = jnp.minimum(scores * (self.factor * np.float32(1 / cap)), 15.0)
        doubled = jnp.exp2(ratio * np.float32(2 * LOG2_E))
        return (1.0 - 2.0 / (doubled + 1.0)) * np.float32(cap * LOG2_E)

    def _exponent(self, scores: jax.Array) -> jax.Array:
        """Base 2 exponents of scores; raw ones keep their (positive) factor until here."""
        return scores * self.factor if self.problem.soft_cap is None else scores

    def _mask(
        self, scores: jax.Array, bounds: tuple[Any, Any], start: Any, limits: jax.Array | None
    ) -> jax.Array:
        """-inf where a query does not see a key: beyond its own position, or before its window."""
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_LAYOUT)
        if limits is None:  # All rows are one token's: they see the same keys.
            oldest, limit = bounds
        else:
            limit = lax.broadcast_in_dim(limits, scores.shape, (1,)) - start
            oldest = limit - (self.problem.window or 0)
        scores = jnp.where(row < limit, scores, -jnp.inf)
        if self.problem.window is not None:
            scores = jnp.where(row >= oldest, scores, -jnp.inf)
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
                self.v_ring, slot, keep, self.opaque_zero, _LAYOUT, self.interpret
            )
            return self.scratch["v_tile"]
        tile = self.v_ring[0].at[slot]
        low, high = keep
        has_unseen = high < TILE if low is None else (low > 0) | (high < TILE)

        @pl.when(has_unseen)
        def _() -> None:
            values = plgpu.layout_cast(tile[...], _LAYOUT)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_LAYOUT)
            inside = row < high if low is None else (row >= low) & (row < high)
            tile[...] = jnp.where(inside, values, jnp.zeros_like(values))

        return tile

    def _write(self, count: Any, results: Sequence[jax.Array], outputs: Sequence[Any]) -> None:
        """Writes a part's results; an empty part's output is left as it is."""
        scaled_max, sums, out = results
        out_ref, max_ref, sum_ref = outputs
        part = (self.block, self.head, self.split)
        store(max_ref.at[part], scaled_max)
        store(sum_ref.at[part], sums.sum(axis=0))

        @pl.when(count > 0)
        def _() -> None:
            if self.problem.tuning.path == "mma":
                store(out_ref.at[part], out)
                return
            self.scratch["out"][...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.scratch["out"], out_ref.at[part])
            plgpu.wait_smem_to_gmem(0)
