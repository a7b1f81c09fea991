"""Paged attention on Hopper: 64-token tiles of pages against a few query rows (wgmma).

Tokens lie on the long side of both products: scores^T = K [64, D] x Q^T [D, rows] and
output^T = V^T [D, 64] x weights^T [64, rows]. One warpgroup works on a part of one sequence's
context; parts are merged outside (`merge`). Online softmax as in FlashAttention
(https://arxiv.org/abs/2205.14135), parts as in Flash-Decoding.
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

from pallas_kernels._compat import plgpu, store
from pallas_kernels.dequantize import TILE, has_row_scale
from pallas_kernels.sides import Side, swizzled
from pallas_kernels.tuning import Tuning

_LAYOUT = plgpu.Layout.WGMMA
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


@dataclasses.dataclass(frozen=True)
class _Refs:
    """One side: its ring of tiles, and the arrays they come from."""

    ring: Sequence[Any]
    source: Sequence[Any]


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
    num_k, num_v = len(k_arrays), len(v_arrays)

    def body(*refs: Any, **scratch: Any) -> None:
        inputs, outputs = refs[: 5 + num_k + num_v], refs[5 + num_k + num_v :]
        _attend_part(problem, interpret is not None, inputs, num_k, outputs, scratch)

    options = {} if interpret is None else {"interpret": interpret}
    call = plgpu.kernel(
        body,
        out_type=out_type,
        grid=parts,
        grid_names=("row_block", "head", "split"),
        scratch_types=_scratch(problem, interpret is not None),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **options,
    )
    return call(q, *k_arrays, *v_arrays, block_tables, tiles, limits, factor)


def _scratch(problem: Problem, interpret: bool) -> dict[str, Any]:
    k, v, rows, stages = problem.k, problem.v, problem.tuning.rows, problem.tuning.stages
    k_dim, v_dim = k.spec.head_dim, v.spec.head_dim

    def matrix(shape: tuple[int, int], dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[1], dtype))

    scratch = dict(
        q_tile=matrix((rows, k_dim), k.dtype),
        k_ring=k.scratch(stages),
        v_ring=v.scratch(stages),
        weights=matrix((rows, TILE), v.dtype),
        out=plgpu.SMEM((v_dim, rows), jnp.float32),
        q_barrier=plgpu.Barrier(),
        barrier=plgpu.Barrier(
            num_arrivals=k.copies_per_tile + v.copies_per_tile, num_barriers=stages
        ),
    )
    if _keys_in_shared(problem, interpret):
        scratch["k_tile"] = matrix((TILE, k_dim), k.dtype)
    if v.is_decoded:
        scratch["v_tile"] = matrix((TILE, v_dim), v.dtype)
    return scratch


def _keys_in_shared(problem: Problem, interpret: bool) -> bool:
    """The interpreter knows no matrix multiply from registers."""
    return problem.k.is_decoded and (interpret or not problem.tuning.key_in_registers)


def _attend_part(
    problem: Problem,
    interpret: bool,
    inputs: Sequence[Any],
    num_k: int,
    outputs: Sequence[Any],
    scratch: dict[str, Any],
) -> None:
    """The body: one row block, one head, one part of the context."""
    q_ref, *arrays, table_ref, tiles_ref, limits_ref, factor_ref = inputs
    block, head = lax.axis_index("row_block"), lax.axis_index("head")
    split = lax.axis_index("split")
    low, high = tiles_ref[block, 1], tiles_ref[block, 2]
    table = table_ref.at[tiles_ref[block, 0]]
    first = lax.div(low, jnp.int32(TILE)) + split * problem.split_tiles
    count = jnp.clip(lax.div(high + (TILE - 1), jnp.int32(TILE)) - first, 0, problem.split_tiles)
    last = first + count
    k = _Refs(scratch["k_ring"], arrays[:num_k])
    v = _Refs(scratch["v_ring"], arrays[num_k:])
    stages = problem.tuning.stages

    def issue(tile: Any, slot: Any) -> None:
        _issue(problem, (k, v), table, scratch["barrier"].at[slot], slot, tile, head)

    plgpu.copy_gmem_to_smem(q_ref.at[block, head], scratch["q_tile"], scratch["q_barrier"])
    for slot in range(stages - 1):
        pl.when(slot < count)(functools.partial(issue, first + slot, jnp.int32(slot)))
    limits = None
    if not problem.one_token:
        limits = plgpu.load(limits_ref.at[block], layout=_COLUMNS, optimized=False)
    factor, opaque_zero = factor_ref[0], tiles_ref[block, 3]
    plgpu.barrier_wait(scratch["q_barrier"])

    def step(tile: Any, carry: Any) -> Any:
        slot, previous_slot, running_max, scaled_max, sums, out = carry
        start = tile * TILE
        plgpu.barrier_wait(scratch["barrier"].at[slot])
        scores = _cap(problem, _scores(problem, k, slot, scratch, interpret, opaque_zero), factor)
        scores = _mask(problem, scores, (low - start, high - start), start, limits)
        running_max = jnp.maximum(running_max, scores.max(axis=0))
        new_max = _exponent(problem, running_max, factor)
        shrink = jnp.exp2(scaled_max - new_max)
        exponent = _exponent(problem, scores, factor)
        weights = jnp.exp2(exponent - lax.broadcast_in_dim(new_max, scores.shape, (1,)))
        sums = sums * lax.broadcast_in_dim(shrink, sums.shape, (1,)) + weights
        # Without a window every tile's first row is seen.
        keep = (None if problem.window is None else low - start, high - start)
        _store_weights(problem, v, slot, keep, weights, scratch, interpret)
        v_tile = _value_tile(problem, v, slot, keep, scratch, interpret, opaque_zero)
        plgpu.commit_smem()
        # Every warp has now left the previous tile, whose slot the next copy takes.
        ahead = tile + (stages - 1)
        pl.when(ahead < last)(functools.partial(issue, ahead, previous_slot))
        out = out * lax.broadcast_in_dim(shrink, out.shape, (1,))
        out = _accumulate(out, v_tile.T, scratch["weights"].T, interpret)
        return jnp.where(slot == stages - 1, 0, slot + 1), slot, running_max, new_max, sums, out

    rows, v_dim = problem.tuning.rows, problem.v.spec.head_dim
    running_max = plgpu.layout_cast(jnp.full((rows,), _LOWEST, jnp.float32), _COLUMNS)
    sums = plgpu.layout_cast(jnp.zeros((TILE, rows), jnp.float32), _LAYOUT)
    out = plgpu.layout_cast(jnp.zeros((v_dim, rows), jnp.float32), _LAYOUT)
    scaled_max = _exponent(problem, running_max, factor)
    carry = (jnp.int32(0), jnp.int32(stages - 1), running_max, scaled_max, sums, out)
    _, _, _, *results = lax.fori_loop(first, last, step, carry)
    _write(problem, (block, head, split), count, results, outputs, scratch)


def _issue(
    problem: Problem,
    refs: tuple[_Refs, _Refs],
    table: Any,
    barrier: Any,
    slot: Any,
    tile: Any,
    head: Any,
) -> None:
    """Starts the copies of a tile of the sequence into a slot of both rings."""
    token = tile * TILE
    column = lax.div(token, jnp.int32(problem.k.block_size))
    blocks = [table[column + p] for p in range(problem.k.pages_per_tile)]
    offset = token - column * problem.k.block_size
    for side, ref in zip((problem.k, problem.v), refs, strict=True):
        side.issue(ref.source, ref.ring, barrier, slot, head, blocks, offset)


def _multiply(a: Any, b: Any) -> jax.Array:
    """A [m, k] times b [k, n] (shared memory, or a in registers), f32 [m, n] in registers."""

    def run(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return plgpu.layout_cast(accumulator[...], _LAYOUT)

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(out: jax.Array, a: Any, b: Any, interpret: bool) -> jax.Array:
    """Out + a b; the interpreter has no accumulator that starts from a value."""
    if interpret:
        return out + _multiply(a, b)

    def run(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    return plgpu.layout_cast(pl.run_state(run)(plgpu.ACC.init(out)), _LAYOUT)


def _scores(
    problem: Problem,
    k: _Refs,
    slot: Any,
    scratch: dict[str, Any],
    interpret: bool,
    opaque_zero: Any,
) -> jax.Array:
    """Raw scores^T [64, rows] of a tile."""
    side = problem.k
    q_transposed = scratch["q_tile"].T
    if not side.is_decoded:
        return _multiply(k.ring[0].at[slot], q_transposed)
    keys: Any = side.decode(k.ring, slot, None, opaque_zero, interpret)
    if _keys_in_shared(problem, interpret):
        scratch["k_tile"][...] = keys
        plgpu.commit_smem()
        keys = scratch["k_tile"]
    scores = _multiply(keys, q_transposed)
    if has_row_scale(side.spec):
        scale = side.row_scales(k.ring, slot, None, interpret)
        scores *= lax.broadcast_in_dim(scale, scores.shape, (0,))
    return scores


def _cap(problem: Problem, scores: jax.Array, factor: Any) -> jax.Array:
    """Cap * tanh(scores * factor / cap) where there is a cap, else the raw scores.

    tanh by exponentials: its approximation in hardware is off by 2^-11 of the cap.
    """
    if problem.soft_cap is None:
        return scores
    cap = np.float32(problem.soft_cap)
    # Beyond 15 tanh is 1 to f32, and its exponential must not overflow.
    ratio = jnp.minimum(scores * (factor * np.float32(1 / cap)), 15.0)
    doubled = jnp.exp2(ratio * np.float32(2 * LOG2_E))
    return (1.0 - 2.0 / (doubled + 1.0)) * np.float32(cap * LOG2_E)


def _exponent(problem: Problem, scores: jax.Array, factor: Any) -> jax.Array:
    """Base 2 exponents of scores; raw ones keep their (positive) factor until here."""
    return scores * factor if problem.soft_cap is None else scores


def _mask(
    problem: Problem,
    scores: jax.Array,
    bounds: tuple[Any, Any],
    start: Any,
    limits: jax.Array | None,
) -> jax.Array:
    """-inf where a query does not see a key: beyond its own position, or before its window."""
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_LAYOUT)
    if limits is None:  # All rows are one token's: they see the same keys.
        low, limit = bounds
        oldest = low
    else:
        limit = lax.broadcast_in_dim(limits, scores.shape, (1,)) - start
        oldest = limit - (problem.window or 0)
    scores = jnp.where(row < limit, scores, -jnp.inf)
    if problem.window is not None:
        scores = jnp.where(row >= oldest, scores, -jnp.inf)
    return scores


def _store_weights(
    problem: Problem,
    v: _Refs,
    slot: Any,
    keep: tuple[Any | None, Any],
    weights: jax.Array,
    scratch: dict[str, Any],
    interpret: bool,
) -> None:
    """Puts weights^T into shared memory for the second product, row scales of V included."""
    side = problem.v
    if has_row_scale(side.spec):
        scale = side.row_scales(v.ring, slot, keep, interpret)
        weights *= lax.broadcast_in_dim(scale, weights.shape, (0,))
    scratch["weights"].T[...] = weights.astype(side.dtype)


def _value_tile(
    problem: Problem,
    v: _Refs,
    slot: Any,
    keep: tuple[Any | None, Any],
    scratch: dict[str, Any],
    interpret: bool,
    opaque_zero: Any,
) -> Any:
    """The tile's values [64, D] in shared memory, rows that nobody sees zeroed.

    Whatever those rows hold, NaN included, must not meet its zero weight.
    """
    side = problem.v
    if side.is_decoded:
        scratch["v_tile"][...] = side.decode(v.ring, slot, keep, opaque_zero, interpret)
        return scratch["v_tile"]
    tile = v.ring[0].at[slot]

    low, high = keep
    has_unseen = high < TILE if low is None else (low > 0) | (high < TILE)

    @pl.when(has_unseen)
    def _() -> None:
        values = plgpu.layout_cast(tile[...], _LAYOUT)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_LAYOUT)
        inside = row < high if low is None else (row >= low) & (row < high)
        tile[...] = jnp.where(inside, values, jnp.zeros_like(values))

    return tile


def _write(
    problem: Problem,
    part: tuple[Any, Any, Any],
    count: Any,
    results: Sequence[jax.Array],
    outputs: Sequence[Any],
    scratch: dict[str, Any],
) -> None:
    """Writes a part's results; an empty part's output is left as it is."""
    running_max, sums, out = results
    out_ref, max_ref, sum_ref = outputs
    store(max_ref.at[part], running_max)
    store(sum_ref.at[part], sums.sum(axis=0))

    @pl.when(count > 0)
    def _() -> None:
        scratch["out"][...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["out"], out_ref.at[part])
        plgpu.wait_smem_to_gmem(0)
