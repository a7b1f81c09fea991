"""Saving and loading: every byte comes back, and nothing damaged or foreign gets in."""

import dataclasses
import json
import os
import shutil
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_except
from stores import Killed

import jaxkv

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

CONFIG = jaxkv.CacheConfig(
    num_layers=2,
    num_kv_heads=1,
    head_dim=32,
    block_size=8,
    num_blocks=16,
    max_sequences=3,
    max_blocks_per_sequence=4,
    format="fp8k_turbo4v",
)
ALL_FORMATS = [
    "bf16",
    "f16",
    "int8",
    "fp8",
    "turbo8",
    "nvfp4",
    "turbo4",
    "turbo3",
    "turbo2",
    "fp8k_turbo4v",
]


def feed(cache, counts):
    """Appends random tokens to each sequence."""
    cache, plan = jaxkv.reserve(cache, counts, max_new_tokens=16)
    rng = np.random.default_rng(sum(counts))
    for layer in range(cache.config.num_layers):
        x = jnp.asarray(rng.standard_normal((len(counts), 16, 1, 32)), jnp.float32)
        cache = jaxkv.write(cache, layer, x, x[::-1], plan)
    return cache


def fed_cache(config=CONFIG, **scales):
    return feed(feed(jaxkv.init(config, **scales), [10, 3, 0]), [9, 0, 0])


@pytest.fixture(scope="module")
def cache():
    return fed_cache()


@pytest.fixture(scope="module")
def saved(cache, tmp_path_factory):
    """A directory with the cache at "cache" and its slot 0 at "sequence"."""
    folder = tmp_path_factory.mktemp("saved")
    jaxkv.save(folder / "cache", cache)
    jaxkv.save(folder / "sequence", cache, slot=0)
    return folder


def blocks_of(cache, slot):
    """The canonical bytes of every block of a sequence, in order."""
    table = np.asarray(cache.block_tables[slot])
    return [
        jaxkv.export_block(cache, layer, int(block))
        for layer in range(cache.config.num_layers)
        for block in table[table >= 0]
    ]


def test_a_cache_comes_back_byte_by_byte(cache, saved):
    loaded = jaxkv.load(saved / "cache", CONFIG)
    assert type(loaded) is jaxkv.PagedCache
    chex.assert_trees_all_equal(loaded, cache)
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded, cache)


def test_a_sequence_goes_to_other_blocks_and_another_slot(cache, saved):
    other = fed_cache(dataclasses.replace(CONFIG, num_blocks=24))
    free = int(other.num_free_blocks)
    before = blocks_of(other, 1)
    loaded = jaxkv.load(saved / "sequence", other.config, cache=other, slot=2)
    assert loaded.lengths.tolist() == [19, 3, 19]
    assert loaded.block_tables[2].tolist() == [4, 5, 6, -1]
    assert blocks_of(loaded, 2) == blocks_of(cache, 0)
    assert blocks_of(loaded, 1) == before
    assert loaded.num_free_blocks == free - 3
    assert loaded.pool.counts[4:7].tolist() == [1, 1, 1]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(other.layers))


def test_a_sequence_is_saved_with_its_own_blocks_alone(saved):
    manifest = json.loads((saved / "sequence/manifest/metadata").read_text())
    leading = {n: a["shape"][0] for n, a in manifest["arrays"].items() if n.startswith("layers")}
    assert set(leading.values()) == {3}
    assert manifest["formats"] == ["fp8k_turbo4v"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("fmt", full_except(ALL_FORMATS, ["bf16", "turbo3", "nvfp4"]))
def test_every_format_comes_back(fmt, tmp_path):
    config = dataclasses.replace(CONFIG, format=fmt, layer_formats=("int8",), trace_events=2)
    cache = fed_cache(config, k_scales=0.5)
    jaxkv.save(tmp_path / "cache", cache)
    chex.assert_trees_all_equal(jaxkv.load(tmp_path / "cache", config), cache)
    jaxkv.save(tmp_path / "sequence", cache, slot=1)
    stored = blocks_of(cache, 1)
    loaded = jaxkv.load(tmp_path / "sequence", config, cache=cache, slot=2)
    assert blocks_of(loaded, 2) == stored


@pytest.mark.slow
def test_a_contiguous_cache_comes_back(tmp_path):
    cache = feed(jaxkv.init_contiguous(CONFIG, batch=3, capacity=20), [10, 3, 0])
    jaxkv.save(tmp_path / "cache", cache)
    loaded = jaxkv.load(tmp_path / "cache", CONFIG)
    assert (type(loaded), loaded.capacity) == (jaxkv.ContiguousCache, 32)
    chex.assert_trees_all_equal(loaded, cache)
    jaxkv.save(tmp_path / "sequence", cache, slot=0)
    stored = blocks_of(cache, 0)
    loaded = jaxkv.load(tmp_path / "sequence", CONFIG, cache=loaded, slot=2)
    assert loaded.lengths.tolist() == [10, 3, 10]
    assert blocks_of(loaded, 2) == stored
    with pytest.raises(ValueError, match="ContiguousCache held"):
        config = dataclasses.replace(CONFIG, block_size=32)
        jaxkv.load(tmp_path / "sequence", config, cache=jaxkv.init(config), slot=0)


@pytest.mark.slow
def test_a_loaded_cache_goes_on_as_the_saved_one(cache, saved):
    loaded = jaxkv.load(saved / "cache", CONFIG)
    chex.assert_trees_all_equal(feed(loaded, [2, 9, 5]), feed(cache, [2, 9, 5]))


@pytest.mark.slow
def test_columns_that_a_window_dropped_stay_empty(tmp_path):
    cache = feed(fed_cache(dataclasses.replace(CONFIG, window=9)), [1, 0, 0])
    assert cache.block_tables[0].tolist()[0] == -1
    jaxkv.save(tmp_path / "s", cache, slot=0)
    stored = blocks_of(cache, 0)
    cache = jaxkv.load(tmp_path / "s", cache.config, cache=cache, slot=2)
    assert (cache.block_tables[2] >= 0).tolist() == [False, True, True, False]
    assert cache.lengths[2] == 20 and blocks_of(cache, 2) == stored


@dataclasses.dataclass(frozen=True)
class _Extended(jaxkv.PagedCache):
    """A cache with a field per slot and one per layer, as later caches have."""

    recent: tuple[jax.Array, ...] | None = None
    extra: tuple[jax.Array | None, ...] | None = None


jax.tree_util.register_dataclass(
    _Extended,
    data_fields=[f.name for f in dataclasses.fields(_Extended) if f.name != "config"],
    meta_fields=["config"],
)


def extended(cache, recent, extra):
    fields = {f.name: getattr(cache, f.name) for f in dataclasses.fields(jaxkv.PagedCache)}
    return _Extended(**fields | {"recent": recent}, extra=extra)


@pytest.mark.slow
def test_fields_by_slot_travel_and_shared_fields_must_agree(cache, tmp_path):
    recent = (jnp.arange(12.0).reshape(3, 4),)
    jaxkv.save(tmp_path / "s", extended(cache, recent, (None, jnp.ones(2))), slot=0)
    empty = extended(jaxkv.init(CONFIG), (jnp.zeros((3, 4)),), (None, jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"its extra\.1 is not the one"):
        jaxkv.load(tmp_path / "s", CONFIG, cache=empty, slot=2)
    agreeing = dataclasses.replace(empty, extra=(None, jnp.ones(2)))
    loaded = jaxkv.load(tmp_path / "s", CONFIG, cache=agreeing, slot=2)
    assert loaded.recent[0].tolist() == [[0.0] * 4, [0.0] * 4, [0.0, 1.0, 2.0, 3.0]]


def is_whole(cache):
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "bf16"}, ValueError, "has format 'fp8k_turbo4v', given 'bf16'"),
        ({"block_size": 16}, ValueError, "has block_size 8, given 16"),
        ({"head_dim": 48, "num_layers": 1}, ValueError, "num_layers 2, given 1; head_dim 32"),
        ({"max_blocks_per_sequence": 2}, jaxkv.CacheError, "no room for 19 tokens"),
        ({"num_blocks": 2}, jaxkv.CacheError, "3 blocks are needed and 2 are free"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_and_left_alone(saved, change, error, message):
    config = dataclasses.replace(CONFIG, **change)
    empty = jaxkv.init(config)
    with pytest.raises(error, match=message):
        jaxkv.load(saved / "sequence", config, cache=empty, slot=0)
    assert is_whole(empty)
    if error is ValueError:
        with pytest.raises(ValueError, match=message):
            jaxkv.load(saved / "cache", config)


def test_wrong_arguments_are_named(cache, saved, tmp_path):
    load, sequence = jaxkv.load, saved / "sequence"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(tmp_path / "nothing", CONFIG)
    with pytest.raises(ValueError, match="holds one sequence"):
        load(sequence, CONFIG)
    with pytest.raises(ValueError, match="holds a whole cache"):
        load(saved / "cache", CONFIG, cache=cache, slot=2)
    with pytest.raises(ValueError, match="a saved sequence needs both"):
        load(sequence, CONFIG, cache=cache)
    with pytest.raises(ValueError, match="slot: 1 holds 3 tokens, expected none"):
        load(sequence, CONFIG, cache=cache, slot=1)
    with pytest.raises(ValueError, match="slot: got 3, expected 0 to 2"):
        load(sequence, CONFIG, cache=cache, slot=3)
    with pytest.raises(ValueError, match="its k_scales is not the one"):
        load(sequence, CONFIG, cache=jaxkv.init(CONFIG, k_scales=2.0), slot=0)
    with pytest.raises(ValueError, match="save never replaces"):
        jaxkv.save(sequence, cache)
    with pytest.raises(ValueError, match="slot: 2 holds no tokens"):
        jaxkv.save(tmp_path / "empty", cache, slot=2)
    assert is_whole(cache)
    assert not list(tmp_path.iterdir())


def test_stored_blocks_are_not_saved_by_halves(cache, tmp_path):
    tables = cache.block_tables.at[0, 0].set(-2)
    stored = dataclasses.replace(
        cache, sequences=dataclasses.replace(cache.sequences, block_tables=tables)
    )
    for slot in (None, 0):
        with pytest.raises(jaxkv.CacheError, match="BlockStore"):
            jaxkv.save(tmp_path / "x", stored, slot=slot)


def damage(file, how):
    raw = bytearray(file.read_bytes())
    if how == "truncated":
        raw = raw[: len(raw) // 2]
    elif how == "flipped":
        raw[2 * len(raw) // 3] ^= 4
    file.unlink()
    if how != "missing":
        file.write_bytes(bytes(raw))


# Reads that were under way when one failed find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("how", full_except(["truncated", "flipped", "missing"], ["flipped"]))
def test_a_damaged_file_is_refused_or_makes_no_difference(cache, saved, tmp_path, how):
    files = [f.relative_to(saved) for f in (saved / "cache").rglob("*") if f.is_file()]
    refused = []
    for file in files:
        copy = tmp_path / str(len(refused))
        shutil.copytree(saved / "cache", copy / "cache")
        damage(copy / file, how)
        try:
            chex.assert_trees_all_equal(jaxkv.load(copy / "cache", CONFIG), cache)
        except jaxkv.CacheError as error:
            assert "damaged" in str(error)
            refused.append(file.name)
        shutil.rmtree(copy)
    assert "metadata" in refused and "manifest.ocdbt" in refused
    assert len(refused) >= 3


@pytest.mark.parametrize("field", ["length", "version"])
def test_a_tampered_manifest_is_refused(saved, tmp_path, field):
    shutil.copytree(saved / "sequence", tmp_path / "s")
    file = tmp_path / "s/manifest/metadata"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {field: manifest[field] + 1}))
    empty = jaxkv.init(CONFIG)
    message = {"length": "damaged: the manifest", "version": "written in version 2"}[field]
    with pytest.raises(jaxkv.CacheError, match=message):
        jaxkv.load(tmp_path / "s", CONFIG, cache=empty, slot=0)
    assert is_whole(empty)


def test_a_tampered_array_is_refused(cache, saved, tmp_path, monkeypatch):
    read = jaxkv.checkpoint._restore

    def tampered(target, **items):
        got = read(target, **items)
        if "arrays" in items:
            got["k_scales"] = got["k_scales"] + 1
        return got

    monkeypatch.setattr(jaxkv.checkpoint, "_restore", tampered)
    with pytest.raises(jaxkv.CacheError, match="array k_scales is not the one"):
        jaxkv.load(saved / "cache", CONFIG)


@pytest.mark.slow
def test_a_save_that_dies_before_its_rename_leaves_nothing_at_the_path(cache, saved, tmp_path):
    def audit(event, args):
        if armed and event == "os.rename" and str(tmp_path) in str(args[0]):
            struck.append(args[0])
            raise Killed

    armed, struck = True, []
    sys.addaudithook(audit)
    try:
        with pytest.raises(BaseException):  # noqa: B017
            jaxkv.save(tmp_path / "cache", cache)
    finally:
        armed = False
    assert struck
    assert os.listdir(tmp_path) and not (tmp_path / "cache").exists()
    with pytest.raises(FileNotFoundError):
        jaxkv.load(tmp_path / "cache", CONFIG)
    jaxkv.save(tmp_path / "cache", cache)
    chex.assert_trees_all_equal(jaxkv.load(tmp_path / "cache", CONFIG), cache)


def test_a_missing_orbax_is_named(cache, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxkv\[checkpoint\]'"):
        jaxkv.save(tmp_path / "cache", cache)
