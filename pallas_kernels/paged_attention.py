"""Paged attention over quantized pages: one function for decode, verification and prefill."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.codecs import Pages
from jaxkv.formats import SideSpec
from pallas_kernels._compat import compute_capability
from pallas_kernels.dequantize import unit
from pallas_kernels.launch import attend_tiles
from pallas_kernels.merge import merge_parts
from pallas_kernels.register_order import columns_of_dims, dims_of_columns
from pallas_kernels.row_blocks import LeftOut, RowBlocks
from pallas_kernels.sides import Side
from pallas_kernels.stream import LOG2_E, Problem
from pallas_kernels.tuning import Path, Tuning, check_tuning, default_tuning, splits_of

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# Query tokens of a sequence up to which the context is split over CTAs.
MAX_DECODE_TOKENS = 8


def unsupported_reasons(
    k_spec: SideSpec,
    v_spec: SideSpec,
    block_size: int,
    compute_capability: tuple[int, int] | None = None,
) -> list[str]:
    """Why these kernels cannot serve a layer; empty where they can.

    Args:
      k_spec: the key side.
      v_spec: the value side.
      block_size: tokens of a block.
      compute_capability: of the device, e.g. (9, 0); None leaves the device out.
    """
    reasons = []
    for name, spec in (("K", k_spec), ("V", v_spec)):
        if spec.head_dim not in HEAD_DIMS:
            reasons.append(f"{name} head_dim is {spec.head_dim}; the kernels know {HEAD_DIMS}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"block_size is {block_size}; the kernels know {BLOCK_SIZES}")
    if compute_capability is not None and compute_capability < (8, 0):
        reasons.append(f"the device has compute capability {compute_capability}; 8.0 is needed")
    return reasons


def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    starts: jax.Array,
    new_tokens: jax.Array,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    scale: float,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    offsets: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    left_out: LeftOut | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends queries to the stored tokens of their sequences, this step's included.

    Query t of a sequence is at position starts + t and sees the keys at positions up to its own
    (causal, bottom-right). What lies in slots beyond a sequence's length, in blocks before a
    window, or under table entries of -1 is never seen, whatever bits it holds.

    Args:
      q: [S, T, q_heads, K head_dim], or packed [N, q_heads, K head_dim] with `offsets`; in the
        basis of the stored keys.
      k_pages: keys of one layer.
      v_pages: values of one layer.
      block_tables: int32 [S, columns]; -1 where there is no block.
      starts: int32 [S], tokens in each sequence before this step's.
      new_tokens: int32 [S], query tokens of each sequence.
      k_spec: the key side.
      v_spec: the value side.
      scale: factor of the scores.
      k_scale: f32 scalar, fp8 keys only.
      v_scale: f32 scalar, fp8 values only.
      offsets: int32 [S], packed queries only: each sequence's first token in q.
      window: keys that a query sees, itself included; None for all.
      soft_cap: scores become cap * tanh(score / cap).
      sinks: f32 [q_heads], a logit more in each head's denominator.
      left_out: keys that are not seen because they are read from elsewhere; None for none.
      tuning: how the kernel is built; None takes the default of these shapes.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU; None compiles.

    Returns:
      (out, lse): f32 in q's layout with V's head_dim, in the basis of the stored values, 0 for
      queries that see nothing; and the log-sum-exp of the scores, f32 [.., q_heads] (natural,
      sinks included), -inf there.

    Raises:
      NotImplementedError: shapes or formats that `unsupported_reasons` names.
    """
    block_size = k_pages.data[0].shape[2]
    reasons = unsupported_reasons(k_spec, v_spec, block_size)
    if reasons:
        raise NotImplementedError("paged_attention: " + "; ".join(reasons))
    capability = (9, 0) if interpret is not None else compute_capability()
    call = _Call(
        Side(k_spec, block_size),
        Side(v_spec, block_size),
        float(scale),
        window,
        None if soft_cap is None else float(soft_cap),
        tuning,
        # wgmma is Hopper's alone.
        "wgmma" if capability[0] == 9 else "mma",
        capability >= (9, 0),
        interpret,
    )
    one = jnp.float32(1)
    return _paged_attention(
        call,
        q,
        k_pages,
        v_pages,
        block_tables,
        starts,
        new_tokens,
        offsets,
        one if k_scale is None else k_scale,
        one if v_scale is None else v_scale,
        sinks,
        left_out,
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call; equal calls compile once."""

    k: Side
    v: Side
    scale: float
    window: int | None
    soft_cap: float | None
    tuning: Tuning | None
    path: Path
    has_tma: bool
    interpret: Any


@functools.partial(jax.jit, static_argnums=0)
def _paged_attention(
    call: _Call,
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    starts: jax.Array,
    new_tokens: jax.Array,
    offsets: jax.Array | None,
    k_scale: jax.Array,
    v_scale: jax.Array,
    sinks: jax.Array | None,
    left_out: LeftOut | None,
) -> tuple[jax.Array, jax.Array]:
    num_kv_heads = k_pages.data[0].shape[1]
    blocks, problem = _plan(call, q, num_kv_heads, block_tables.shape[1], new_tokens, offsets)
    if left_out is not None:
        # With neither a window nor several tokens the block's own bounds say it all.
        has_lows = call.window is not None and not problem.one_token
        problem = dataclasses.replace(problem, skips_first=True, has_lows=has_lows)
    tiles, limits, lows = blocks.bounds(starts, call.window, left_out)
    # The kernel's factor is positive, so that raw scores order as scores do.
    sign, magnitude = np.sign(call.scale), abs(call.scale) or 1.0
    factor = magnitude * unit(call.k.spec) * k_scale.astype(jnp.float32)
    if call.soft_cap is None:
        factor *= LOG2_E
    q_tiles = blocks.split_queries(q)[..., dims_of_columns(call.k.spec)]
    if sign != 1:
        q_tiles *= sign
    parts = attend_tiles(
        problem,
        q_tiles.astype(call.k.dtype),
        call.k.global_arrays(k_pages),
        call.v.global_arrays(v_pages),
        _valid_tables(block_tables, call.k, k_pages.data[0].shape[0]),
        tiles,
        limits,
        factor.reshape(1),
        lows,
        interpret=call.interpret,
    )
    out, maxima, sums = parts
    used = problem.used_rows
    row_sinks = None if sinks is None else _sinks_of_rows(sinks, blocks, used)
    out, lse = merge_parts(out[..., :used], maxima[..., :used], sums[..., :used], row_sinks)
    out *= unit(call.v.spec) * v_scale.astype(jnp.float32)
    total = q.shape[0]
    out = blocks.join(out, total)[..., columns_of_dims(call.v.spec)]
    lse = blocks.join(lse, total)
    return _blank_padding(out, lse, blocks, new_tokens)


def _plan(
    call: _Call,
    q: jax.Array,
    num_kv_heads: int,
    table_columns: int,
    new_tokens: jax.Array,
    offsets: jax.Array | None,
) -> tuple[RowBlocks, Problem]:
    """Row blocks and the static problem of a call."""
    group = q.shape[-2] // num_kv_heads
    num = len(new_tokens)
    tokens = q.shape[1] if offsets is None else -(-q.shape[0] // num)
    tuning = call.tuning or default_tuning(call.k, call.v, tokens * group, call.path)
    check_tuning(call.k, call.v, tuning)
    if offsets is None:
        blocks = RowBlocks.padded(new_tokens, tokens, group, tuning.rows)
    else:
        blocks = RowBlocks.packed(new_tokens, offsets, q.shape[0], group, tuning.rows)
    reach = table_columns * call.k.block_size
    splits, split_tiles = splits_of(
        tuning, reach, num_kv_heads, call.window, tokens <= MAX_DECODE_TOKENS
    )
    is_whole = offsets is None and tokens * group <= tuning.rows
    used = tokens * group if is_whole else tuning.rows
    problem = Problem(
        call.k,
        call.v,
        tuning,
        splits,
        split_tiles,
        used,
        offsets is None and tokens == 1,
        call.window,
        call.soft_cap,
        has_tma=call.has_tma,
    )
    return blocks, problem


def _valid_tables(block_tables: jax.Array, side: Side, num_blocks: int) -> jax.Array:
    """Tables that a kernel may follow anywhere: valid ids, whole tiles of columns."""
    columns = block_tables.shape[1]
    missing = -columns % side.pages_per_tile
    tables = jnp.pad(block_tables.astype(jnp.int32), ((0, 0), (0, missing)))
    return jnp.clip(tables, 0, num_blocks - 1)


def _sinks_of_rows(sinks: jax.Array, blocks: RowBlocks, used: int) -> jax.Array:
    """Sinks [q_heads] as [blocks, kv_heads, used rows]."""
    row = blocks.first_row[:, None] + jnp.arange(used, dtype=jnp.int32)
    by_head = sinks.reshape(-1, blocks.group)
    return by_head.T[row % blocks.group].swapaxes(1, 2)


def _blank_padding(
    out: jax.Array, lse: jax.Array, blocks: RowBlocks, new_tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Zeroes packed tokens that belong to no sequence; padded ones saw nothing already."""
    if blocks.max_tokens is not None:
        return out, lse
    token = jnp.arange(out.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(blocks.offset, token, side="right").astype(jnp.int32) - 1
    owner = jnp.clip(owner, 0, len(new_tokens) - 1)
    local = token - blocks.offset[owner]
    real = (local >= 0) & (local < new_tokens[owner])
    return jnp.where(real[:, None, None], out, 0), jnp.where(real[:, None], lse, -jnp.inf)
