"""Sequences that leave the device and come back: `swap_out` and `swap_in`.

Pages move as the bytes they are, scales included, so nothing is encoded anew. A sequence comes back
into whatever blocks are free, and into any slot.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import blocks
from jaxkv import cache as caches
from jaxkv.blocks import BlockPool
from jaxkv.cache import PagedCache
from jaxkv.config import CacheConfig
from jaxkv.faults import CacheError
from jaxkv.sequences import Sequences
from jaxkv.store import BlockStore, Key, Part

# Blocks that move in one program; fewer are padded to a power of two from the smallest on.
_MOST_BLOCKS = 64
_FEWEST_BLOCKS = 8


def swap_out(
    cache: PagedCache, slot: int, store: BlockStore, *, key: Key | None = None
) -> PagedCache:
    """Moves a sequence into a store and empties its slot.

    Blocks that others hold too are copied out and merely released here. Blocks that `offload`
    stored before stay where they are. Waits for the cache's arrays.

    Args:
      cache: the cache; it stays valid.
      slot: the sequence's slot.
      store: where it goes.
      key: the name to swap it in by, unique in the store; the slot's number by default.

    Returns:
      The cache with the slot released.

    Raises:
      ValueError: no such slot, one without tokens, a bad key, or a closed cache.
      CacheError: the store is full, cannot write, or holds this key already; nothing has changed.
    """
    _check_slot(cache, slot)
    length = int(cache.lengths[slot])
    if length == 0:
        raise ValueError(f"slot: {slot} holds no tokens, expected a sequence to swap out")
    table = np.asarray(cache.block_tables[slot])
    table = table[: -(-length // cache.config.block_size)]
    is_resident = table >= 0
    # In the record a resident column holds its place among the blocks of the payload.
    columns = np.where(is_resident, np.cumsum(is_resident) - 1, table)
    manifest = {
        "geometry": geometry(cache.config),
        "constants": constants(cache),
        "length": length,
        "columns": columns.tolist(),
    }
    parts = read_pages(cache, table[is_resident])
    parts.append(_joined([leaf[slot] for leaf in _slot_leaves(cache)]))
    store.put_sequence(slot if key is None else key, manifest, parts)
    mask = np.arange(cache.config.max_sequences) == slot
    return caches.release(cache, jnp.asarray(mask))


def swap_in(
    cache: PagedCache, slot: int, store: BlockStore, *, key: Key | None = None
) -> PagedCache:
    """Brings a sequence back into an empty slot and removes it from the store.

    Donates the cache: use only what this returns.

    Args:
      cache: the cache, or another one of the same layers, formats and constants.
      slot: an empty slot, not necessarily the one it left.
      store: where it is.
      key: the name it was swapped out by; the slot's number by default.

    Returns:
      The cache with the sequence in the slot, every byte of its pages as it was.

    Raises:
      ValueError: no such slot, one in use, a bad key, or a closed cache.
      CacheError: too few free blocks, no such key, a damaged entry, or a cache whose bytes mean
        something else; nothing has changed and the cache given is still good.
    """
    _check_slot(cache, slot)
    if int(cache.lengths[slot]) > 0:
        raise ValueError(f"slot: {slot} holds {int(cache.lengths[slot])} tokens, expected none")
    key = slot if key is None else key
    manifest = store.sequence(key)
    check_manifest(cache, manifest, f"swapped sequence {key!r}")
    columns = np.asarray(manifest["columns"], np.int32)
    _check_room(cache, columns, f"swapped sequence {key!r}")
    stored = store.handles()
    if lost := sorted(c for c in columns.tolist() if c <= -2 and -2 - c not in stored):
        raise CacheError(
            f"swapped sequence {key!r}: block handle {-2 - lost[0]} is not in the store"
        )
    *pages, state = store.read_sequence(key)
    slot_state = _split(state, [(leaf.shape[1:], leaf.dtype) for leaf in _slot_leaves(cache)])

    row = np.full(cache.config.max_blocks_per_sequence, -1, np.int32)
    row[: len(columns)] = columns
    pool, sequences, placed = _place(
        cache.pool,
        cache.sequences,
        jnp.int32(slot),
        jnp.asarray(row),
        jnp.int32(manifest["length"]),
    )
    ids = np.asarray(placed)[: len(columns)][columns >= 0]
    cache = write_pages(cache, ids, pages)
    cache = _set_slot_state(cache, slot, slot_state)
    store.delete(key)
    return dataclasses.replace(cache, pool=pool, sequences=sequences)


def geometry(config: CacheConfig) -> str:
    """What the bytes of a block depend on, as JSON; the size of the pool is not part of it."""
    layers = []
    for index in range(config.num_layers):
        spec = config.layer(index)
        layers.append([str(spec.format), spec.num_kv_heads, spec.head_dim, spec.v_head_dim])
    return json.dumps(
        {
            "block_size": config.block_size,
            "encoding": config.encoding,
            "rotation": config.rotation,
            "layers": layers,
        }
    )


def constants(cache: PagedCache) -> str:
    """A digest of the arrays that give the pages their meaning: fp8 scales and the like."""
    digest = hashlib.blake2b(digest_size=16)
    extra = getattr(cache, "k_means", None)
    for leaf in jax.tree.leaves((cache.k_scales, cache.v_scales, extra)):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def check_manifest(cache: PagedCache, manifest: Mapping[str, Any], what: str) -> None:
    """Raises CacheError if stored bytes would mean something else in this cache."""
    if manifest["geometry"] != geometry(cache.config):
        raise CacheError(
            f"{what}: stored by a cache of {manifest['geometry']}, this one has "
            f"{geometry(cache.config)}"
        )
    if manifest["constants"] != constants(cache):
        raise CacheError(
            f"{what}: stored under other fp8 scales or key means than this cache has; initialise "
            "it with the same ones"
        )


def read_pages(cache: PagedCache, ids: np.ndarray) -> list[Part]:
    """The bytes of blocks, one part per layer: the blocks of each leaf in turn, as they lie."""
    groups = [ids[i : i + _MOST_BLOCKS] for i in range(0, len(ids), _MOST_BLOCKS)]
    # All layers are asked for before any is waited for.
    fetched = [
        [[_gather(leaf, _padded(group, 0)) for group in groups] for leaf in jax.tree.leaves(pages)]
        for pages in cache.layers
    ]
    return [
        b"".join(
            _bytes(np.asarray(rows)[: len(group)])
            for rows_of_leaf in leaves
            for rows, group in zip(rows_of_leaf, groups)
        )
        for leaves in fetched
    ]


def write_pages(cache: PagedCache, ids: np.ndarray, parts: Sequence[Part]) -> PagedCache:
    """Stores what `read_pages` returned into blocks `ids`. Donates the pages of the cache."""
    if len(ids) == 0:
        return cache
    # All bytes are taken apart before the first array is donated.
    arrays = [
        _split(part, [((len(ids), *x.shape[1:]), x.dtype) for x in jax.tree.leaves(pages)])
        for pages, part in zip(cache.layers, parts, strict=True)
    ]
    layers = []
    for pages, new in zip(cache.layers, arrays):
        leaves, tree = jax.tree.flatten(pages)
        for i, rows in enumerate(new):
            for first in range(0, len(ids), _MOST_BLOCKS):
                group = _padded(ids[first : first + _MOST_BLOCKS], cache.config.num_blocks)
                block = np.zeros((len(group), *rows.shape[1:]), rows.dtype)
                some = rows[first : first + _MOST_BLOCKS]
                block[: len(some)] = some
                leaves[i] = _scatter(leaves[i], group, block)
        layers.append(jax.tree.unflatten(tree, leaves))
    return dataclasses.replace(cache, layers=tuple(layers))


def _padded(ids: np.ndarray, fill: int) -> np.ndarray:
    """Ids padded to a power of two, so that few shapes are compiled."""
    size = max(_FEWEST_BLOCKS, 1 << (len(ids) - 1).bit_length())
    padded = np.full(size, fill, np.int32)
    padded[: len(ids)] = ids
    return padded


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _joined(leaves: Sequence[Any]) -> Part:
    return b"".join(_bytes(np.asarray(leaf)) for leaf in leaves)


def _split(part: Part, shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """The arrays of these shapes that lie one after the other in a part."""
    arrays, begin = [], 0
    for shape, dtype in shapes:
        count = int(np.prod(shape))
        size = count * np.dtype(dtype).itemsize
        if begin + size > len(part):
            raise CacheError("stored pages: fewer bytes than this cache's layers have")
        arrays.append(np.frombuffer(part, dtype, count, begin).reshape(shape))
        begin += size
    if begin != len(part):
        raise CacheError("stored pages: more bytes than this cache's layers have")
    return arrays


@jax.jit
def _gather(leaf: jax.Array, ids: jax.Array) -> jax.Array:
    return leaf.at[ids].get(mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(leaf: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf.at[ids].set(rows, mode="drop")


@jax.jit
def _place(
    pool: BlockPool, sequences: Sequences, slot: jax.Array, row: jax.Array, length: jax.Array
) -> tuple[BlockPool, Sequences, jax.Array]:
    """Gives a slot a block for every column that is not negative; the row it then has."""
    pool, ids = blocks.allocate(pool, row >= 0)
    row = jnp.where(row >= 0, ids, row)
    sequences = Sequences(
        block_tables=sequences.block_tables.at[slot].set(row),
        lengths=sequences.lengths.at[slot].set(length),
    )
    return pool, sequences, row


def _slot_leaves(cache: PagedCache) -> list[jax.Array]:
    """Arrays beside the pages whose first axis is the slot."""
    return jax.tree.leaves(getattr(cache, "recent", None))


def _set_slot_state(cache: PagedCache, slot: int, state: Sequence[np.ndarray]) -> PagedCache:
    if not state:
        return cache
    leaves, tree = jax.tree.flatten(cache.recent)  # type: ignore[attr-defined]
    leaves = [_scatter(leaf, np.int32(slot), new) for leaf, new in zip(leaves, state)]
    return dataclasses.replace(cache, recent=jax.tree.unflatten(tree, leaves))  # type: ignore[call-arg]


def _check_slot(cache: PagedCache, slot: int) -> None:
    if cache.is_closed:
        raise ValueError("cache: closed; its pages were given back by jaxkv.close")
    if not 0 <= slot < cache.config.max_sequences:
        raise ValueError(f"slot: got {slot}, expected 0 to {cache.config.max_sequences - 1}")


def _check_room(cache: PagedCache, columns: np.ndarray, what: str) -> None:
    if len(columns) > cache.config.max_blocks_per_sequence:
        raise CacheError(
            f"{what}: takes {len(columns)} columns of the block table, this cache has "
            f"{cache.config.max_blocks_per_sequence}"
        )
    wanted, free = int((columns >= 0).sum()), int(cache.num_free_blocks)
    if wanted > free:
        raise CacheError(
            f"{what}: needs {wanted} free blocks, there are {free}; release or swap out others, or "
            "make room in the prefix cache"
        )
