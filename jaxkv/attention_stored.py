"""Attention over blocks that left the device, a tile of them at a time.

A tile is some columns of one sequence's table. A callback fetches its stored blocks, they are
attended as if they were a small pool, and the partial result is merged by log-sum-exp. The loop
over tiles runs zero times where nothing is stored.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import attention_xla
from jaxkv._xla.merge import merge_partials
from jaxkv.attention_xla import KeyRange, Queries
from jaxkv.codecs import Pages, pages_shapes
from jaxkv.formats import SideSpec

# Tokens of a tile: enough to outweigh a callback, few enough to stay small beside the pool.
_TILE_TOKENS = 1024


class PageSource(Protocol):
    """Where stored blocks are read from, on the host. Hashable: it is static in a program."""

    def read_block(self, handle: int, part: int) -> bytes:
        """The bytes of one layer of a block, K before V, each leaf as it lies in memory."""
        ...


def handles_of(entries: jax.Array) -> jax.Array:
    """Handles of table entries int32 [...]; -1 where an entry names no stored block."""
    return jnp.where(entries <= -2, -2 - entries, -1)


def first_resident_keys(tables: jax.Array, block_size: int) -> jax.Array:
    """int32 [S], the key where each sequence's first block on the device begins."""
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(tables >= 0, columns, tables.shape[1]), axis=1) * block_size


def partial_attention(
    q: jax.Array,
    source: PageSource,
    layer: jax.Array,
    queries: Queries,
    *,
    kv_heads: int,
    block_size: int,
    k_spec: SideSpec,
    v_spec: SideSpec,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    scale: jax.Array,
    soft_cap: jax.Array | None,
    shift: jax.Array | None,
    keys: KeyRange,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the stored blocks of every sequence.

    Args:
      q: [N, q_heads, head_dim] in flat order.
      source: where the blocks are.
      layer: int32 scalar, the part of a block to read.
      queries: where the queries lie; entries of its tables below -1 name stored blocks, all keys of
        which come before every query.
      kv_heads: heads of a block.
      block_size: tokens of a block.
      k_spec: the K side.
      v_spec: the V side.
      k_scale: f32 scalar of an fp8 K side; None means 1.
      v_scale: likewise for V.
      scale: f32 scalar, factor of the scores.
      soft_cap: f32 scalar, or None.
      shift: f32 [N, q_heads], added to the scores before the soft cap, or None.
      keys: the keys that count.

    Returns:
      (out, lse) as `attention_xla.partial_attention`.
    """
    size = max(1, min(_TILE_TOKENS // block_size, queries.tables.shape[1]))
    shapes = tuple(pages_shapes(size, kv_heads, block_size, spec) for spec in (k_spec, v_spec))
    low, high = _stored_columns(queries, block_size, keys)
    ends = jnp.cumsum(-(-(high - low) // size))

    def body(i: jax.Array, merged: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = jnp.sum(ends <= i, dtype=jnp.int32)
        tile = i - jnp.where(row > 0, ends[row - 1], 0)
        column = low[row] + tile * size
        columns = column + jnp.arange(size, dtype=jnp.int32)
        entries = queries.tables[row].at[columns].get(mode="fill", fill_value=-1)
        handles = handles_of(entries)
        k_pages, v_pages = _fetch(source, layer, handles, shapes)
        # Past the last column the walk reads the entry there again.
        table = jnp.where(handles >= 0, jnp.arange(size, dtype=jnp.int32), -1)
        first = column * block_size
        part = attention_xla.partial_attention(
            q,
            k_pages,
            v_pages,
            Queries(
                tables=jnp.append(table, -1)[None],
                starts=queries.starts[row][None] - first,
                counts=queries.counts[row][None],
                offsets=queries.offsets[row][None],
                max_tokens=queries.max_tokens,
                # Keys past the tile would be walked too.
                reach=(jnp.zeros(1, jnp.int32), jnp.full(1, size * block_size, jnp.int32)),
                **_left_out(queries, row, first, keys),
            ),
            k_spec=k_spec,
            v_spec=v_spec,
            k_scale=k_scale,
            v_scale=v_scale,
            scale=scale,
            soft_cap=soft_cap,
            shift=shift,
            keys=keys,
        )
        return merge_partials([merged, part])

    out = jnp.zeros((*q.shape[:2], v_spec.head_dim), jnp.float32)
    lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, ends[-1], body, (out, lse))


def _left_out(queries: Queries, row: jax.Array, first: jax.Array, keys: KeyRange) -> dict[str, Any]:
    """From where on exact tokens are left out, in a tile that begins at key `first`."""
    left_out = {}
    if queries.first_from is not None:
        # A tile further on holds none of the first tokens.
        from_here = jnp.where(first == 0, queries.first_from[row], keys.exact_first)
        left_out["first_from"] = from_here[None]
    if queries.recent_from is not None:
        left_out["recent_from"] = (queries.recent_from[row] - first)[None]
    return left_out


def _stored_columns(
    queries: Queries, block_size: int, keys: KeyRange
) -> tuple[jax.Array, jax.Array]:
    """int32 [S] each: from the first to past the last stored column that some query may see."""
    columns = jnp.arange(queries.tables.shape[1], dtype=jnp.int32)
    is_read = (queries.tables <= -2) & (queries.counts > 0)[:, None]
    if keys.window is not None:
        lowest = jnp.maximum(queries.starts - keys.window + 1, 0) // block_size
        is_read &= columns >= lowest[:, None]
    high = jnp.max(jnp.where(is_read, columns + 1, 0), axis=1)
    low = jnp.min(jnp.where(is_read, columns, queries.tables.shape[1]), axis=1)
    return jnp.minimum(low, high), high


def _fetch(
    source: PageSource, layer: jax.Array, handles: jax.Array, shapes: tuple[Any, Any]
) -> tuple[Pages, Pages]:
    """Stored blocks as the pages of a small pool; unused ones are zero."""
    leaves, tree = jax.tree.flatten(shapes)

    read = functools.partial(_read, source, tuple((s.shape, np.dtype(s.dtype)) for s in leaves))
    found = jax.pure_callback(read, tuple(leaves), layer, handles, vmap_method="sequential")
    return jax.tree.unflatten(tree, found)


def _read(
    source: PageSource,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
    layer: Any,
    handles: Any,
) -> tuple[np.ndarray, ...]:
    """Runs on the host, in a thread of the runtime: no JAX in here."""
    arrays = tuple(np.zeros(shape, dtype) for shape, dtype in shapes)
    part = int(np.asarray(layer))
    for i, handle in enumerate(np.asarray(handles).tolist()):
        if handle < 0:
            continue
        data, begin = source.read_block(handle, part), 0
        for array in arrays:
            raw = np.frombuffer(data, np.uint8, array[i].nbytes, begin)
            array[i] = raw.view(array.dtype).reshape(array.shape[1:])
            begin += raw.nbytes
        if begin != len(data):
            raise ValueError(f"block handle {handle}: got {len(data)} bytes, expected {begin}")
    return arrays
