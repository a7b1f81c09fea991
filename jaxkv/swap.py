"""Pages that leave the device and come back: `swap_out`, `swap_in` and `offload`.

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

from jaxkv import blocks, online
from jaxkv._buckets import padded
from jaxkv.blocks import BlockPool
from jaxkv.cache import PagedCache, release, require_open
from jaxkv.config import CacheConfig
from jaxkv.faults import CacheError
from jaxkv.sequences import Sequences
from jaxkv.store import BlockStore, Key, Part

# Blocks that move in one program; fewer are padded to a power of two from 8 on.
_MOST_BLOCKS = 64
_padded = functools.partial(padded, least=8)


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
      TypeError: a key that is neither an int nor a str.
      ValueError: no such slot, one without tokens, a negative, empty or overlong key, or a closed
        cache.
      CacheError: the store is full or closed, cannot write, holds this key already, or lacks
        blocks that `offload` put into another one, or online calibration has not frozen the scales
        yet; nothing has changed.
    """
    _check_slot(cache, slot)
    online.require_frozen(cache, "swap_out")
    length = int(cache.lengths[slot])
    if length == 0:
        raise ValueError(f"slot: {slot} holds no tokens, expected a sequence to swap out")
    table = np.asarray(cache.block_tables[slot])
    table = table[: -(-length // cache.config.block_size)]
    _check_handles(store, table, f"slot {slot}")
    is_resident = table >= 0
    # In the record a resident column holds its place among the blocks of the payload.
    columns = np.where(is_resident, np.cumsum(is_resident) - 1, table)
    manifest = {
        "geometry": geometry(cache.config),
        "constants": constants(cache),
        "window": [cache.config.window, cache.config.keep_first],
        "length": length,
        "columns": columns.tolist(),
    }
    parts = [_joined(leaves) for leaves in read_pages(cache, table[is_resident])]
    parts.append(_joined([leaf[slot] for leaf in jax.tree.leaves(cache.recent)]))
    store.put_sequence(slot if key is None else key, manifest, parts)
    mask = np.arange(cache.config.max_sequences) == slot
    return release(cache, jnp.asarray(mask))


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
      TypeError: a key that is neither an int nor a str.
      ValueError: no such slot, one in use, a negative, empty or overlong key, or a closed cache.
      CacheError: too few free blocks or table columns, no such key, a closed store, a damaged
        entry, a cache whose bytes mean something else, blocks that are missing in the store or
        that this cache's attention would miss, or online calibration that has not frozen the
        scales yet; nothing has changed and the cache given is still good.
    """
    _check_slot(cache, slot)
    online.require_frozen(cache, "swap_in")
    if int(cache.lengths[slot]) > 0:
        raise ValueError(f"slot: {slot} holds {int(cache.lengths[slot])} tokens, expected none")
    key = slot if key is None else key
    manifest = store.sequence(key)
    check_manifest(cache, manifest, f"swapped sequence {key!r}")
    columns = np.asarray(manifest["columns"], np.int32)
    _check_room(cache, columns, f"swapped sequence {key!r}")
    _check_absent_blocks(cache, manifest, columns, f"swapped sequence {key!r}")
    _check_handles(store, columns, f"swapped sequence {key!r}")
    *pages, state = store.read_sequence(key)
    resident = int((columns >= 0).sum())
    arrays = [_split(p, _shapes(layer, resident)) for p, layer in zip(pages, cache.layers)]
    recent = _split(state, _shapes(cache.recent))

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
    cache = write_pages(cache, ids, arrays)
    cache = _set_recent(cache, slot, recent)
    store.delete(key)
    return dataclasses.replace(cache, pool=pool, sequences=sequences)


def offload(cache: PagedCache, store: BlockStore) -> PagedCache:
    """Moves all but each sequence's newest blocks to a store, on the host, between steps.

    The newest N = `config.resident_blocks_per_sequence` blocks of a sequence stay on the device. A
    stored block's table entry is -2 - handle, which fork, reorder and swapping carry along. After a
    trim, blocks that are among the newest N again come back, the last ones first, as far as there
    are free blocks; until then `reserve` refuses a sequence whose partly filled block is stored.
    Handles that no table entry and no swapped sequence names any more are deleted: a store serves
    one line of caches, so pass the newest, and let steps that read older ones finish first.

    Donates the cache: use only what this returns.

    Args:
      cache: the cache.
      store: the store that every earlier call for this line of caches got.

    Returns:
      The cache, with blocks freed that nobody holds any more once all layers' copies are safe.

    Raises:
      ValueError: the config sets no limit, or a closed cache.
      CacheError: the store is full, cannot write or misses a block, or online calibration has not
        frozen the scales yet; nothing has changed and the cache given is still good.
    """
    online.require_frozen(cache, "offload")
    limit = cache.config.resident_blocks_per_sequence
    if limit is None:
        raise ValueError(
            "config: offload needs CacheConfig(resident_blocks_per_sequence=N), the blocks of a "
            "sequence that stay on the device"
        )
    require_open(cache)
    tables, lengths = np.array(cache.block_tables), np.asarray(cache.lengths)
    used = -(-lengths // cache.config.block_size)
    age = used[:, None] - 1 - np.arange(tables.shape[1])  # 0 is a sequence's last block
    _check_handles(store, tables, "cache")
    named = _handles(tables) | store.handles_of_sequences()
    store.delete_blocks(sorted(store.handles() - named))
    cache, put = _move_out(cache, store, tables, np.argwhere((age >= limit) & (tables >= 0)))
    try:
        back = np.argwhere((age >= 0) & (age < limit) & (tables <= -2))
        cache = _bring_back(
            cache, store, tables, back[np.argsort(age[tuple(back.T)], kind="stable")]
        )
    except CacheError:
        store.delete_blocks(put)
        raise
    named = _handles(tables) | store.handles_of_sequences()
    store.delete_blocks(sorted(store.handles() - named))
    return cache


def _handles(entries: np.ndarray) -> set[int]:
    """Handles that table entries name."""
    return set((-2 - entries[entries <= -2]).tolist())


def _check_handles(store: BlockStore, entries: np.ndarray, what: str) -> None:
    if lost := _handles(entries) - store.handles():
        raise CacheError(
            f"{what}: block handle {min(lost)} is not in the store: pass the store that holds this "
            "cache's blocks, and the newest cache"
        )


def _move_out(
    cache: PagedCache, store: BlockStore, tables: np.ndarray, places: np.ndarray
) -> tuple[PagedCache, list[int]]:
    """Stores the blocks at `places`, [n, 2] slots and columns, and releases them there.

    Sets the new entries in `tables` too; returns the cache and the new handles.
    """
    if len(places) == 0:
        return cache, []
    # Tail first, as every verb releases.
    places = places[np.lexsort((-places[:, 1], places[:, 0]))]
    held = tables[tuple(places.T)]
    ids, which = np.unique(held, return_inverse=True)
    pages = read_pages(cache, ids)
    parts = [[_joined([leaf[i] for leaf in leaves]) for leaves in pages] for i in range(len(ids))]
    manifest = {"geometry": geometry(cache.config), "constants": constants(cache)}
    handles = store.put_blocks(manifest, parts)
    entries = -2 - np.asarray(handles, np.int32)[which.ravel()]
    tables[tuple(places.T)] = entries
    pool, sequences = _exchange(
        cache.pool, cache.sequences, _padded(held, -1), *_padded_places(cache, places, entries)
    )
    return dataclasses.replace(cache, pool=pool, sequences=sequences), handles


def _bring_back(
    cache: PagedCache, store: BlockStore, tables: np.ndarray, places: np.ndarray
) -> PagedCache:
    """Gives stored blocks at `places` blocks of the device again, as far as there are free ones."""
    places = places[: int(cache.num_free_blocks)] if len(places) else places
    if len(places) == 0:
        return cache
    handles = (-2 - tables[tuple(places.T)]).tolist()
    for handle in handles:
        check_manifest(cache, store.block(handle), f"block handle {handle}")
    layers = [
        [_split(store.read_block(handle, layer), _shapes(pages)) for handle in handles]
        for layer, pages in enumerate(cache.layers)
    ]
    wanted = _padded(np.ones(len(handles), np.int32), 0) > 0
    pool, taken = blocks.allocate(cache.pool, jnp.asarray(wanted))
    ids = np.asarray(taken)[: len(handles)]
    tables[tuple(places.T)] = ids
    pool, sequences = _exchange(
        pool, cache.sequences, _padded(ids[:0], -1), *_padded_places(cache, places, ids)
    )
    arrays = [[np.stack(rows) for rows in zip(*blocks_of_layer)] for blocks_of_layer in layers]
    cache = write_pages(cache, ids, arrays)
    return dataclasses.replace(cache, pool=pool, sequences=sequences)


@functools.lru_cache(maxsize=64)
def geometry(config: CacheConfig) -> str:
    """What the bytes of a block depend on, as JSON; the size of the pool is not part of it."""
    layers = []
    for index in range(config.num_layers):
        spec = config.layer(index)
        layers.append([str(spec.format), spec.num_kv_heads, spec.head_dim, spec.v_head_dim])
    meaning: dict[str, Any] = {
        "block_size": config.block_size,
        "encoding": config.encoding,
        "rotation": config.rotation,
        "layers": layers,
    }
    if config.has_exact_tokens:
        meaning["exact"] = [config.exact_first, config.ring_tokens]
    return json.dumps(meaning)


def constants(cache: PagedCache) -> str:
    """A digest of the arrays that give the pages their meaning: fp8 scales and the like."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves((cache.k_scales, cache.v_scales, cache.k_means)):
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


def read_pages(cache: PagedCache, ids: np.ndarray) -> list[list[np.ndarray]]:
    """The pages of blocks on the host: for each layer, each leaf [n, ...] as it lies in memory."""
    groups = [ids[i : i + _MOST_BLOCKS] for i in range(0, len(ids), _MOST_BLOCKS)]
    # All layers are asked for before any is waited for.
    fetched = [
        [[_gather(leaf, _padded(group, 0)) for group in groups] for leaf in jax.tree.leaves(pages)]
        for pages in cache.layers
    ]
    return [
        [
            np.concatenate([np.asarray(x)[: len(ids)] for x, ids in zip(leaf, groups)])
            if groups
            else np.zeros((0, *whole.shape[1:]), whole.dtype)
            for leaf, whole in zip(leaves, jax.tree.leaves(pages))
        ]
        for leaves, pages in zip(fetched, cache.layers)
    ]


def write_pages(
    cache: PagedCache, ids: np.ndarray, arrays: Sequence[Sequence[np.ndarray]]
) -> PagedCache:
    """Stores what `read_pages` returned into blocks `ids`. Donates the pages of the cache."""
    if len(ids) == 0:
        return cache
    layers = []
    for pages, new in zip(cache.layers, arrays, strict=True):
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


def _padded_places(
    cache: PagedCache, places: np.ndarray, entries: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, columns and entries to set in the tables; padding lies past the last slot."""
    slots = _padded(places[:, 0], cache.config.max_sequences)
    return slots, _padded(places[:, 1], 0), _padded(entries, -1)


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _joined(leaves: Sequence[Any]) -> Part:
    return b"".join(_bytes(np.asarray(leaf)) for leaf in leaves)


def _shapes(tree: Any, count: int | None = None) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of one row of each leaf, or of `count` rows."""
    lead = () if count is None else (count,)
    return [((*lead, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(tree)]


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


@jax.jit
def _exchange(
    pool: BlockPool,
    sequences: Sequences,
    released: jax.Array,
    slots: jax.Array,
    columns: jax.Array,
    entries: jax.Array,
) -> tuple[BlockPool, Sequences]:
    """Sets table entries, and releases blocks."""
    tables = sequences.block_tables.at[slots, columns].set(entries, mode="drop")
    return blocks.release(pool, released), dataclasses.replace(sequences, block_tables=tables)


def _set_recent(cache: PagedCache, slot: int, rows: Sequence[np.ndarray]) -> PagedCache:
    """Gives a slot its exact tokens back."""
    leaves, tree = jax.tree.flatten(cache.recent)
    leaves = [_scatter(leaf, np.int32(slot), new) for leaf, new in zip(leaves, rows)]
    return dataclasses.replace(cache, recent=jax.tree.unflatten(tree, leaves))


def _check_slot(cache: PagedCache, slot: int) -> None:
    require_open(cache)
    if not 0 <= slot < cache.config.max_sequences:
        raise ValueError(f"slot: got {slot}, expected 0 to {cache.config.max_sequences - 1}")


def _check_absent_blocks(
    cache: PagedCache, manifest: Mapping[str, Any], columns: np.ndarray, what: str
) -> None:
    """Raises CacheError if this cache's attention would miss blocks that are not on the device."""
    config = cache.config
    if (columns <= -2).any() and config.resident_blocks_per_sequence is None:
        raise CacheError(
            f"{what}: blocks of it stay in the store, where attention finds them only with "
            "CacheConfig(resident_blocks_per_sequence=N)"
        )
    window, keep_first = manifest["window"]
    if (columns == -1).any() and [config.window, config.keep_first] != [window, keep_first]:
        raise CacheError(
            f"{what}: blocks of it were dropped under window={window}, keep_first={keep_first}; "
            "this cache's config must say the same"
        )


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
