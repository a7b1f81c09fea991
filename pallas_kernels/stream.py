"""What both attention kernels share: a ring of tiles of pages, and the static problem.

One warpgroup works on one block of query rows, one head and one part of the context. On Hopper and
later tiles come by TMA; before Hopper by cp.async.
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
from pallas_kernels.dequantize import TILE
from pallas_kernels.sides import Side, swizzled
from pallas_kernels.tuning import Tuning

LAYOUT = plgpu.Layout.WGMMA
LOG2_E = 1.4426950408889634
# Below every raw score, and finite, so that differences of running maxima are never NaN. A power of
# two, so that its product with any factor is exact, fused into a difference or not.
LOWEST = np.float32(-(2.0**64))

# Per row: one past the last position it sees; the first, where that needs an array of its own.
Limits = tuple[jax.Array, jax.Array | None]


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
      skips_first: whether sequences may leave out their first keys.
      has_lows: whether the first key that a row sees is not its limit less the window.
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
    skips_first: bool = False
    has_lows: bool = False
    has_tma: bool = True

    @property
    def has_low(self) -> bool:
        """Whether rows see no key before some position."""
        return self.window is not None or self.skips_first


def matrix(shape: tuple[int, int], dtype: Any) -> Any:
    """Shared memory for an operand of a matrix product."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[1], dtype))


def ring_scratch(problem: Problem) -> dict[str, Any]:
    """Shared memory for the queries and both rings, and their barriers."""
    k, v, stages = problem.k, problem.v, problem.tuning.stages
    scratch = dict(
        q_tile=matrix((problem.tuning.rows, k.spec.head_dim), k.dtype),
        k_ring=k.scratch(stages),
        v_ring=v.scratch(stages),
    )
    if problem.has_tma:
        arrivals = k.copies_per_tile + v.copies_per_tile
        scratch["q_barrier"] = plgpu.Barrier()
        scratch["barrier"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    return scratch


class Stream:
    """The body of one program, less what depends on the orientation of the products.

    Attributes:
      row_layout: register layout of one value a query row.
    """

    row_layout: Any

    def __init__(
        self,
        problem: Problem,
        interpret: bool,
        inputs: Sequence[Any],
        num_k: int,
        scratch: dict[str, Any],
    ) -> None:
        lows_ref = None
        if problem.has_lows:
            *inputs, lows_ref = inputs
        q_ref, *arrays, table_ref, tiles_ref, limits_ref, factor_ref = inputs
        self.problem, self.interpret, self.scratch = problem, interpret, scratch
        self.k_source, self.v_source = arrays[:num_k], arrays[num_k:]
        self.k_ring, self.v_ring = scratch["k_ring"], scratch["v_ring"]
        self.block, self.head = lax.axis_index("row_block"), lax.axis_index("head")
        self.split = lax.axis_index("split")
        self.q_ref, self.tiles_ref = q_ref, tiles_ref
        self.limits_ref, self.lows_ref = limits_ref, lows_ref
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
        limits = None if problem.one_token else self._limits()
        self.factor, self.opaque_zero = self.factor_ref[0], self.tiles_ref[self.block, 3]
        self._wait_query()
        self._prepare()

        def step(tile: Any, carry: Any) -> Any:
            slot, previous_slot, *state = carry
            state = self._step(tile, last, slot, previous_slot, state, limits)
            return jnp.where(slot == stages - 1, 0, slot + 1), slot, *state

        running_max = jnp.full((problem.tuning.rows,), LOWEST, jnp.float32)
        running_max = plgpu.layout_cast(running_max, self.row_layout)
        state = (running_max, self._exponent(running_max), *self._initial_sums())
        carry = (jnp.int32(0), jnp.int32(stages - 1), *state)
        _, _, _, *results = lax.fori_loop(first, last, step, carry)
        self._write(count, results, outputs)

    def _limits(self) -> Limits:
        def load(ref: Any) -> jax.Array:
            return plgpu.load(ref.at[self.block], layout=self.row_layout, optimized=False)

        return load(self.limits_ref), None if self.lows_ref is None else load(self.lows_ref)

    def _prepare(self) -> None:
        """Runs once, when the queries have arrived."""

    def _initial_sums(self) -> tuple[jax.Array, jax.Array]:
        """Zero sums of weights, and zero outputs."""
        raise NotImplementedError

    def _step(
        self,
        tile: Any,
        last: Any,
        slot: Any,
        previous_slot: Any,
        state: Sequence[jax.Array],
        limits: Limits | None,
    ) -> tuple[jax.Array, ...]:
        """One tile of the online softmax: (running max, its exponent, sums, output)."""
        raise NotImplementedError

    def _write(self, count: Any, results: Sequence[jax.Array], outputs: Sequence[Any]) -> None:
        """Writes a part's results; an empty part's output is left as it is."""
        raise NotImplementedError

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

    def _bounds(self, tile: Any) -> tuple[Any, tuple[Any, Any], tuple[Any | None, Any]]:
        """First position of a tile; the rows (low, high) seen by any query; those V must keep."""
        start = tile * TILE
        low, high = self.low - start, self.high - start
        # Otherwise every tile's first row is seen.
        return start, (low, high), (low if self.problem.has_low else None, high)

    def _mask(
        self,
        scores: jax.Array,
        token_axis: int,
        bounds: tuple[Any, Any],
        start: Any,
        limits: Limits | None,
    ) -> jax.Array:
        """-inf where a query does not see a key: beyond its limit, or before its first."""

        def in_tile(of_rows: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(of_rows, scores.shape, (1 - token_axis,)) - start

        token = plgpu.broadcasted_iota(jnp.int32, scores.shape, token_axis, layout=LAYOUT)
        # Rows of one token see the same keys, and so do all rows of a sequence's first keys.
        oldest, limit = bounds
        if limits is not None:
            limit = in_tile(limits[0])
            if limits[1] is not None:
                oldest = in_tile(limits[1])
            elif self.problem.window is not None:
                oldest = limit - self.problem.window
        scores = jnp.where(token < limit, scores, -jnp.inf)
        if self.problem.has_low:
            scores = jnp.where(token >= oldest, scores, -jnp.inf)
        return scores

    def _zero_unseen(self, tile: Any, keep: tuple[Any | None, Any]) -> None:
        """Zeroes the rows of a 16-bit tile [64, D] in shared memory that nobody sees.

        Whatever those rows hold, NaN included, must not meet its zero weight.
        """
        low, high = keep
        has_unseen = high < TILE if low is None else (low > 0) | (high < TILE)

        @pl.when(has_unseen)
        def _() -> None:
            values = plgpu.layout_cast(tile[...], LAYOUT)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=LAYOUT)
            inside = row < high if low is None else (row >= low) & (row < high)
            tile[...] = jnp.where(inside, values, jnp.zeros_like(values))

    def _write_sums(self, outputs: Sequence[Any], scaled_max: jax.Array, sums: jax.Array) -> None:
        _, max_ref, sum_ref = outputs
        part = (self.block, self.head, self.split)
        store(max_ref.at[part], scaled_max)
        store(sum_ref.at[part], sums)
