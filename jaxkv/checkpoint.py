"""`save` and `load`: a whole cache or one sequence on disk, as Orbax checkpoints.

A checkpoint is a directory of two Orbax items: the arrays by name, stored bytes as they are, and a
manifest of versions, config, formats and a digest of each array. Orbax writes beside the path and
renames last, so a path holds all of a checkpoint or nothing. Loading checks everything before it
touches a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import blocks, online
from jaxkv._buckets import bucket
from jaxkv.cache import PagedCache, init, require_open
from jaxkv.config import CacheConfig
from jaxkv.contiguous import ContiguousCache, init_contiguous
from jaxkv.faults import CacheError
from jaxkv.sequences import Sequences

VERSION = 1
"""Version of the layout on disk."""

# Fields of a cache by what a sequence has of them. A field that is not listed is one that all
# sequences share and that their bytes depend on: it must be the same where they are loaded.
_BY_BLOCK = "layers"
_BY_SLOT = "recent"
_BOOKKEEPING = ("pool", "sequences", "staging")
# Config fields that say nothing about what is stored, and those that do not bind a sequence.
_FREE = ("debug",)
_ROOM = ("num_blocks", "max_sequences", "max_blocks_per_sequence", "trace_events")
_BLOCK_GEOMETRY = ("block_size", *_ROOM[:3])
_COLUMNS = "columns"


def save(path: str | os.PathLike[str], cache: PagedCache, slot: int | None = None) -> None:
    """Writes a cache, or one of its sequences, to a new directory.

    A prefix cache is not part of it: `clear` it before saving everything, or the blocks that it
    holds stay held in what is loaded.

    Args:
      path: the directory, which must not exist. It appears complete or not at all.
      cache: a paged or contiguous cache; it stays as it is.
      slot: the sequence to save, with its own blocks alone; None saves everything.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: the path exists, a closed cache, no such slot, or a slot without tokens.
      CacheError: blocks of it are in a `BlockStore`, which this does not save, or online
        calibration has not frozen its scales yet.
    """
    target = Path(path).absolute()
    if target.exists():
        raise ValueError(f"path: {target} exists; save never replaces anything")
    require_open(cache)
    online.require_frozen(cache, "save")
    tables = np.asarray(cache.block_tables)
    if (tables if slot is None else tables[_checked_slot(cache.config, slot)]).min() < -1:
        raise CacheError(
            "cache: some of these blocks are in a BlockStore; bring them back before saving"
        )
    if slot is None:
        contents, length = _named(cache), 0
    else:
        contents, length = _sequence_contents(cache, slot)
    arrays = {name: np.asarray(leaf) for name, leaf in contents.items()}
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            target,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays),
                manifest=ocp.args.JsonSave(_manifest(cache, slot, length, arrays)),
            ),
        )


def load(
    path: str | os.PathLike[str],
    config: CacheConfig,
    *,
    cache: PagedCache | None = None,
    slot: int | None = None,
) -> PagedCache:
    """Reads what `save` wrote.

    Args:
      path: the directory.
      config: what the cache was made with. A sequence may go to a cache with more or fewer blocks
        and slots; a contiguous cache is compared without its block geometry.
      cache: where one saved sequence goes, donated: use only what comes back. It may take other
        block ids than it had. None loads a whole cache.
      slot: an empty slot of `cache`.

    Returns:
      The cache.

    Raises:
      ImportError: Orbax is not installed.
      FileNotFoundError: nothing is saved there.
      ValueError: another config, or arguments that do not fit what was saved.
      CacheError: what was saved is damaged, or there is no room for it. `cache` is unchanged after
        any error.
    """
    if (cache is None) != (slot is None):
        raise ValueError("cache, slot: a saved sequence needs both, a whole cache neither")
    target = Path(path).absolute()
    if not target.is_dir():
        raise FileNotFoundError(f"path: no checkpoint at {target}")
    manifest = _read_manifest(target)
    saved = CacheConfig.from_json(json.dumps(manifest["config"]))
    if manifest["kind"] == "sequence":
        if cache is None:
            raise ValueError(f"path: {target} holds one sequence; pass cache= and slot= for it")
        assert slot is not None
        return _load_sequence(target, manifest, saved, config, cache, slot)
    if cache is not None:
        raise ValueError(f"path: {target} holds a whole cache; load it without cache= and slot=")
    if manifest["class"] == ContiguousCache.__name__:
        _require_same_config(saved, config, (*_FREE, *_BLOCK_GEOMETRY))
        template = jax.eval_shape(
            lambda: init_contiguous(config, batch=saved.num_blocks, capacity=saved.block_size)
        )
    else:
        _require_same_config(saved, config, _FREE)
        template = jax.eval_shape(lambda: init(config))
    return _rebuild(template, _read_arrays(target, manifest))


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "saving and loading need Orbax: pip install 'jaxkv[checkpoint]'"
        ) from error
    return ocp


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, as in "layers.0.k.data.0"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _checked_slot(config: CacheConfig, slot: int) -> int:
    if not 0 <= slot < config.max_sequences:
        raise ValueError(f"slot: got {slot}, expected 0 to {config.max_sequences - 1}")
    return slot


def _sequence_contents(cache: PagedCache, slot: int) -> tuple[dict[str, Any], int]:
    """What one sequence has, by name, and its length."""
    length = int(cache.lengths[slot])
    if length == 0:
        raise ValueError(f"slot: {slot} holds no tokens, there is nothing to save")
    table = np.asarray(cache.block_tables[slot])
    columns = np.flatnonzero(table >= 0).astype(np.int32)
    ids = jnp.asarray(table[columns])
    contents: dict[str, Any] = {_COLUMNS: columns}
    for name, leaf in _named(cache).items():
        match _field(name):
            case field if field == _BY_BLOCK:
                contents[name] = leaf[ids]
            case field if field == _BY_SLOT:
                contents[name] = leaf[slot]
            case field if field not in _BOOKKEEPING:
                contents[name] = leaf
    return contents, length


def _field(name: str) -> str:
    return name.split(".", 1)[0]


def _manifest(
    cache: PagedCache, slot: int | None, length: int, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    config = cache.config
    manifest = {
        "version": VERSION,
        "kind": "cache" if slot is None else "sequence",
        "class": type(cache).__name__,
        "config": json.loads(config.to_json()),
        "formats": [str(config.layer_format(i)) for i in range(config.num_layers)],
        "length": length,
        "arrays": {name: _describe(array) for name, array in arrays.items()},
    }
    return {**manifest, "digest": _digest_of_manifest(manifest)}


def _describe(array: np.ndarray) -> dict[str, Any]:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "blake2b": hashlib.blake2b(raw.data, digest_size=16).hexdigest(),
    }


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in manifest.items() if k != "digest"}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_manifest(target: Path) -> dict[str, Any]:
    ocp = _orbax()
    manifest = _restore(target, manifest=ocp.args.JsonRestore())
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise CacheError(f"{target}: damaged: its manifest is not one of jaxkv")
    if manifest["version"] != VERSION:
        raise CacheError(
            f"{target}: written in version {manifest['version']} of the layout, this jaxkv reads "
            f"version {VERSION}"
        )
    if manifest.get("digest") != _digest_of_manifest(manifest):
        raise CacheError(f"{target}: damaged: the manifest does not match its own digest")
    return manifest


def _read_arrays(target: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All arrays, each checked against its digest."""
    ocp = _orbax()
    described = manifest["arrays"]
    arrays = _restore(
        target,
        arrays=ocp.args.PyTreeRestore(
            item=dict.fromkeys(described, 0),
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in described},
        ),
    )
    for name, expected in described.items():
        if _describe(arrays[name]) != expected:
            raise CacheError(f"{target}: damaged: array {name} is not the one that was saved")
    return arrays


def _restore(target: Path, **items: Any) -> Any:
    """Restores one item. Whatever Orbax and the storage below it raise means damage."""
    ocp = _orbax()
    (name,) = items
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            return checkpointer.restore(target, args=ocp.args.Composite(**items))[name]
        except Exception as error:
            raise CacheError(f"{target}: damaged: its {name} cannot be read ({error})") from error


def _require_same_config(
    saved: CacheConfig,
    given: CacheConfig,
    free: tuple[str, ...],
    whose: str = "config: that of what was saved",
) -> None:
    before, now = (json.loads(config.to_json()) for config in (saved, given))
    if different := [n for n in before if n not in free and before[n] != now[n]]:
        lines = [f"{name} {before[name]!r}, given {now[name]!r}" for name in different]
        raise ValueError(f"{whose} has {'; '.join(lines)}")


def _rebuild(template: PagedCache, arrays: Mapping[str, np.ndarray]) -> PagedCache:
    """A cache like the template, of these arrays."""
    expected = _named(template)
    optional = {name for name in arrays if getattr(template, _field(name), ...) is None}
    _require_arrays(expected, {n: a for n, a in arrays.items() if n not in optional})
    leaves = [jnp.array(arrays[name]) for name in expected]
    cache = jax.tree.unflatten(jax.tree.structure(template), leaves)
    for field in {_field(name) for name in optional}:
        cache = dataclasses.replace(cache, **{field: _optional_field(field, arrays, template)})
    return cache


def _optional_field(field: str, arrays: Mapping[str, np.ndarray], template: PagedCache) -> Any:
    """A field that the config alone does not bring about: an array, or one for some layers."""
    if field in arrays:
        return jnp.array(arrays[field])
    layers = range(template.config.num_layers)
    values = [arrays.get(f"{field}.{i}") for i in layers]
    return tuple(None if value is None else jnp.array(value) for value in values)


def _require_arrays(expected: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    shapes = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in expected.items()}
    got = {name: (a.shape, a.dtype) for name, a in arrays.items()}
    for name in [*shapes, *got]:
        if shapes.get(name) != got.get(name):
            raise ValueError(
                f"config: not the one of what was saved: array {name} is {got.get(name)}, expected "
                f"{shapes.get(name)}"
            )


def _load_sequence(
    target: Path,
    manifest: Mapping[str, Any],
    saved: CacheConfig,
    config: CacheConfig,
    cache: PagedCache,
    slot: int,
) -> PagedCache:
    is_contiguous = isinstance(cache, ContiguousCache)
    _require_same_config(
        cache.config,
        config,
        (*_FREE, *_BLOCK_GEOMETRY) if is_contiguous else (),
        "cache: its config",
    )
    config = cache.config
    require_open(cache)
    online.require_frozen(cache, "load")
    if type(cache).__name__ != manifest["class"]:
        raise ValueError(
            f"cache: got a {type(cache).__name__}, but a {manifest['class']} held what was saved"
        )
    _require_same_config(saved, config, (*_FREE, *_ROOM))
    if int(cache.lengths[_checked_slot(config, slot)]) > 0:
        raise ValueError(f"slot: {slot} holds {int(cache.lengths[slot])} tokens, expected none")
    arrays = _read_arrays(target, manifest)
    columns = arrays.pop(_COLUMNS)
    _require_room(cache, manifest["length"], len(columns))
    _require_sequence_arrays(cache, arrays, len(columns))
    size = bucket(len(columns))
    padded = {
        name: _pad(array, size) if _field(name) == _BY_BLOCK else array
        for name, array in arrays.items()
        if _field(name) in (_BY_BLOCK, _BY_SLOT)
    }
    return _place(
        cache,
        padded,
        _pad(columns, size, config.max_blocks_per_sequence),
        jnp.int32(slot),
        jnp.int32(manifest["length"]),
    )


def _require_room(cache: PagedCache, length: int, num_blocks: int) -> None:
    config = cache.config
    if length > config.max_tokens_per_sequence:
        raise CacheError(
            f"cache: no room for {length} tokens in a sequence of at most "
            f"{config.max_tokens_per_sequence}"
        )
    if num_blocks > int(cache.num_free_blocks):
        raise CacheError(
            f"cache: {num_blocks} blocks are needed and {int(cache.num_free_blocks)} are free"
        )


def _require_sequence_arrays(
    cache: PagedCache, arrays: Mapping[str, np.ndarray], num_blocks: int
) -> None:
    expected = {}
    for name, leaf in _named(cache).items():
        field = _field(name)
        if field in _BOOKKEEPING:
            continue
        shape = {_BY_BLOCK: (num_blocks, *leaf.shape[1:]), _BY_SLOT: leaf.shape[1:]}
        expected[name] = jax.ShapeDtypeStruct(shape.get(field, leaf.shape), leaf.dtype)
        shared = field not in (_BY_BLOCK, _BY_SLOT)
        if shared and name in arrays and not np.array_equal(arrays[name], np.asarray(leaf)):
            raise ValueError(
                f"cache: its {name} is not the one that the saved sequence was stored with"
            )
    _require_arrays(expected, arrays)


def _pad(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    padded = np.full((size, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


@functools.partial(jax.jit, donate_argnames="cache")
def _place(
    cache: PagedCache,
    arrays: Mapping[str, jax.Array],
    columns: jax.Array,
    slot: jax.Array,
    length: jax.Array,
) -> PagedCache:
    """Gives an empty slot new blocks in these columns, and stores the arrays there."""
    width = cache.config.max_blocks_per_sequence
    pool, ids = blocks.allocate(cache.pool, columns < width)
    where = jnp.where(ids < 0, cache.config.num_blocks, ids)

    def store(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in arrays:
            return leaf
        if _field(name) == _BY_BLOCK:
            return leaf.at[where].set(arrays[name], mode="drop")
        return leaf.at[slot].set(arrays[name])

    cache = jax.tree_util.tree_map_with_path(store, cache)
    tables = cache.block_tables.at[slot, columns].set(ids, mode="drop")
    sequences = Sequences(block_tables=tables, lengths=cache.lengths.at[slot].set(length))
    return dataclasses.replace(cache, pool=pool, sequences=sequences)
