"""Launching the attention kernels: row blocks of queries against parts of their contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import plgpu
from pallas_kernels.decode import Decode, decode_scratch
from pallas_kernels.prefill import Prefill, prefill_scratch
from pallas_kernels.stream import Problem, Stream
from pallas_kernels.tuning import PREFILL_ROWS


def is_prefill(problem: Problem) -> bool:
    """Whether rows are many enough to lie on the long side of the products."""
    return problem.tuning.path == "wgmma" and problem.tuning.rows == PREFILL_ROWS


def attend_tiles(
    problem: Problem,
    q: jax.Array,
    k_arrays: Sequence[jax.Array],
    v_arrays: Sequence[jax.Array],
    block_tables: jax.Array,
    tiles: jax.Array,
    limits: jax.Array,
    factor: jax.Array,
    lows: jax.Array | None = None,
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
      lows: int32 [row_blocks, rows], where `problem.has_lows`: the first position a row sees.
      interpret: interpreter parameters, or None to compile.

    Returns:
      Unnormalized outputs f32 [row_blocks, kv_heads, splits, V head_dim, rows] in the V side's
      register order (undefined where a part is empty), and running maxima (base 2) and sums,
      f32 [row_blocks, kv_heads, splits, rows].
    """
    num_blocks, num_heads, rows, _ = q.shape
    parts = (num_blocks, num_heads, problem.splits)
    prefill, is_interpreted = is_prefill(problem), interpret is not None
    v_dim = problem.v.spec.head_dim
    out_type = (
        jax.ShapeDtypeStruct((*parts, *((rows, v_dim) if prefill else (v_dim, rows))), jnp.float32),
        jax.ShapeDtypeStruct((*parts, rows), jnp.float32),
        jax.ShapeDtypeStruct((*parts, rows), jnp.float32),
    )
    inputs = (q, *k_arrays, *v_arrays, block_tables, tiles, limits, factor)
    if problem.has_lows:
        assert lows is not None
        inputs = (*inputs, lows)
    program: type[Stream] = Prefill if prefill else Decode
    scratch = prefill_scratch(problem) if prefill else decode_scratch(problem, is_interpreted)

    def body(*refs: Any, **scratch: Any) -> None:
        kernel = program(problem, is_interpreted, refs[: len(inputs)], len(k_arrays), scratch)
        kernel.run(refs[len(inputs) :])

    places_barriers = problem.tuning.path == "wgmma" and not prefill
    call = plgpu.kernel(
        body,
        out_type=out_type,
        grid=parts,
        grid_names=("row_block", "head", "split"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=places_barriers
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    out, maxima, sums = call(*inputs)
    return (out.swapaxes(-1, -2) if prefill else out), maxima, sums
