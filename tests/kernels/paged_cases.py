"""Random pages, a float64 oracle, and one call for the attention kernels' tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv.codecs import Pages, decode_pages, encode_rows
from jaxkv.formats import FORMATS, SideSpec
from pallas_kernels import paged_attention
from pallas_kernels.row_blocks import LeftOut

# Scores and weights pass through the sides' 16-bit types; values are about 1.
TOLERANCE = {jnp.bfloat16: 8e-3, jnp.float16: 1.5e-3}


def side(name: str, head_dim: int, encoding: str = "searched") -> SideSpec:
    return SideSpec(FORMATS[name], head_dim, encoding)


def random_pages(rng, spec: SideSpec, blocks: int, heads: int, block_size: int, scale) -> Pages:
    x = rng.standard_normal((blocks, heads, block_size, spec.head_dim)).astype(np.float32)
    encoded, _ = encode_rows(jnp.asarray(x), spec, scale)
    scales = encoded.scales
    if scales is not None and scales.ndim == 4:
        scales = jnp.swapaxes(scales, -1, -2)
    return Pages(encoded.data, scales)


def poison(pages: Pages, used: np.ndarray) -> Pages:
    """All bits of the slots that no sequence uses set: NaN in every float format.

    Args:
      pages: one side.
      used: bool [blocks, block_size].
    """

    def fill(leaf: jax.Array, token_axis: int) -> jax.Array:
        array = np.array(leaf)
        shape = [1] * array.ndim
        shape[0], shape[token_axis] = used.shape
        ones = np.frombuffer(b"\xff" * array.dtype.itemsize, array.dtype)[0]
        return jnp.asarray(np.where(used.reshape(shape), array, ones), leaf.dtype)

    scales = pages.scales
    if scales is not None:
        scales = fill(scales, scales.ndim - 1)
    return Pages(tuple(fill(plane, 2) for plane in pages.data), scales)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A paged attention problem; `starts` and `new_tokens` give the sequences."""

    k: SideSpec
    v: SideSpec
    starts: tuple[int, ...] = (100, 40)
    new_tokens: tuple[int, ...] = (1, 1)
    tokens: int = 1
    heads: int = 1
    group: int = 3
    block_size: int = 16
    columns: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    packed: bool = False
    scale: float | None = None
    # Per sequence (first, since), and the distance: keys that are read from elsewhere.
    left_out: tuple[tuple[int, int], ...] | None = None
    distance: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Arrays:
    q: jax.Array
    k_pages: Pages
    v_pages: Pages
    tables: jax.Array
    starts: jax.Array
    new_tokens: jax.Array
    offsets: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    sinks: jax.Array | None


def make(problem: Problem) -> Arrays:
    rng = np.random.default_rng(problem.seed)
    num, size = len(problem.starts), problem.block_size
    ends = np.asarray(problem.starts) + np.asarray(problem.new_tokens)
    columns = problem.columns or -(-int(ends.max()) // size)
    blocks = num * columns + 2
    k_scale = jnp.float32(0.01) if problem.k.format.name == "fp8" else None
    v_scale = jnp.float32(0.02) if problem.v.format.name == "fp8" else None
    k_pages = random_pages(rng, problem.k, blocks, problem.heads, size, k_scale)
    v_pages = random_pages(rng, problem.v, blocks, problem.heads, size, v_scale)
    tables = rng.permutation(blocks)[: num * columns].reshape(num, columns)
    used = np.zeros((blocks, size), bool)
    for s, end in enumerate(ends):
        oldest = 0
        if problem.window is not None:
            oldest = max(0, problem.starts[s] + 1 - problem.window)
        for position in range(oldest, end):
            used[tables[s, position // size], position % size] = True
        tables[s, -(-int(end) // size) :] = -1
        tables[s, : oldest // size] = -1
    q_heads = problem.heads * problem.group
    lead = (int(sum(problem.new_tokens)) + 2,) if problem.packed else (num, problem.tokens)
    q = jnp.asarray(rng.standard_normal((*lead, q_heads, problem.k.head_dim)), jnp.bfloat16)
    offsets = np.concatenate([[0], np.cumsum(problem.new_tokens)[:-1]])
    return Arrays(
        q,
        poison(k_pages, used),
        poison(v_pages, used),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(problem.starts, jnp.int32),
        jnp.asarray(problem.new_tokens, jnp.int32),
        jnp.asarray(offsets, jnp.int32) if problem.packed else None,
        k_scale,
        v_scale,
        jnp.asarray(rng.standard_normal(q_heads), jnp.float32) if problem.has_sinks else None,
    )


def run(problem: Problem, arrays: Arrays, tuning: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The interpreted kernel, races detected: (out, lse)."""
    out, lse = paged_attention(
        arrays.q,
        arrays.k_pages,
        arrays.v_pages,
        arrays.tables,
        arrays.starts,
        arrays.new_tokens,
        k_spec=problem.k,
        v_spec=problem.v,
        scale=_scale(problem),
        k_scale=arrays.k_scale,
        v_scale=arrays.v_scale,
        offsets=arrays.offsets,
        window=problem.window,
        soft_cap=problem.soft_cap,
        sinks=arrays.sinks,
        left_out=_left_out(problem),
        tuning=tuning,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    return np.asarray(out), np.asarray(lse)


def _left_out(problem: Problem) -> LeftOut | None:
    if problem.left_out is None:
        return None
    first, since = (jnp.asarray(x, jnp.int32) for x in zip(*problem.left_out))
    return LeftOut(first, since, problem.distance)


def _scale(problem: Problem) -> float:
    return problem.k.head_dim**-0.5 if problem.scale is None else problem.scale


def oracle(problem: Problem, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Plain attention over the decoded context in float64: (out, lse)."""
    q = np.asarray(arrays.q, np.float64)
    k = np.asarray(decode_pages(arrays.k_pages, problem.k, arrays.k_scale), np.float64)
    v = np.asarray(decode_pages(arrays.v_pages, problem.v, arrays.v_scale), np.float64)
    out = np.zeros((*q.shape[:-1], problem.v.head_dim))
    lse = np.full(q.shape[:-1], -np.inf)
    first = 0
    for s, (start, count) in enumerate(zip(problem.starts, problem.new_tokens)):
        for t in range(count):
            index = (first + t,) if problem.packed else (s, t)
            position = start + t
            oldest = 0 if problem.window is None else max(0, position - problem.window + 1)
            at = np.arange(oldest, position + 1)
            if problem.left_out is not None:
                leave, since = problem.left_out[s]
                at = at[at >= leave]
                at = at[(position - at >= problem.distance) | (at < since)]
            if not at.size:
                continue
            blocks = np.asarray(arrays.tables)[s, at // problem.block_size]
            for h in range(problem.heads * problem.group):
                slots = (blocks, h // problem.group, at % problem.block_size)
                scores = k[slots] @ q[(*index, h)] * _scale(problem)
                if problem.soft_cap is not None:
                    scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
                sink = [] if arrays.sinks is None else [float(arrays.sinks[h])]
                logits = np.concatenate([scores, sink])
                top = logits.max()
                weights = np.exp(scores - top)
                total = np.exp(logits - top).sum()
                out[(*index, h)] = weights @ v[slots] / total
                lse[(*index, h)] = top + np.log(total)
        first += count
    return out, lse
