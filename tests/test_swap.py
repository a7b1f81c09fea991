import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_except
from stores import assert_no_leak, contents, either_store, raw, with_noise

import jaxkv
from jaxkv.formats import FORMATS

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

store = either_store

S, BLOCK, BLOCKS, COLUMNS = 3, 8, 12, 6


def config_of(name="turbo3", **options):
    return jaxkv.CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        block_size=BLOCK,
        max_sequences=S,
        format=name,
        **{
            "num_blocks": BLOCKS,
            "max_blocks_per_sequence": COLUMNS,
            "layer_formats": ("bf16",),
            **options,
        },
    )


def noisy(config, **scales):
    return with_noise(jaxkv.init(config, **scales))


# Not jitted as a whole, so that caches of all formats share one compiled program.
append = functools.partial(jaxkv.reserve, max_new_tokens=BLOCK * COLUMNS)


def with_lengths(cache, lengths):
    cache, plan = append(cache, jnp.asarray(lengths, jnp.int32))
    assert plan.granted.all()
    return cache


@pytest.mark.parametrize(
    "name", full_except([*FORMATS, "fp8k_turbo4v"], ["fp8k_turbo4v", "turbo3"])
)
def test_a_sequence_comes_back_byte_for_byte_in_other_blocks_and_another_slot(name, store):
    cache = with_lengths(noisy(config_of(name)), [5, 29, 8])
    want, old = contents(cache, 1), np.asarray(cache.block_tables[1, :4])
    cache = jaxkv.swap_out(cache, 1, store)
    assert cache.lengths.tolist() == [5, 0, 8] and int(cache.num_free_blocks) == BLOCKS - 2
    assert store.keys == (1,)
    cache = with_lengths(cache, [0, 33, 0])  # takes the blocks that were left
    cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    cache = jaxkv.swap_in(cache, 0, store, key=1)
    assert contents(cache, 0) == want
    assert not set(np.asarray(cache.block_tables[0, :4]).tolist()) & set(old.tolist())
    assert cache.lengths.tolist() == [29, 33, 8] and store.nbytes == 0
    assert_no_leak(cache)


def test_shared_blocks_are_copied_out_and_merely_released():
    store = jaxkv.BlockStore()
    cache = with_lengths(noisy(config_of()), [20, 0, 0])
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([2]))
    want = contents(cache, 0)
    cache = jaxkv.swap_out(cache, 2, store, key="child")
    assert int(cache.num_free_blocks) == BLOCKS - 3 and contents(cache, 0) == want
    cache = jaxkv.swap_in(cache, 2, store, key="child")
    assert contents(cache, 2) == want and int(cache.num_free_blocks) == BLOCKS - 6
    assert_no_leak(cache)


def test_many_blocks_move_in_several_programs():
    config = config_of("int8", num_blocks=200, max_blocks_per_sequence=150)
    cache = noisy(config)
    cache, _ = jaxkv.reserve(cache, jnp.asarray([140 * BLOCK, 0, 0]), max_new_tokens=140 * BLOCK)
    want = contents(cache, 0)
    store = jaxkv.BlockStore()
    cache = jaxkv.swap_in(jaxkv.swap_out(cache, 0, store), 0, store)
    assert contents(cache, 0) == want
    assert_no_leak(cache)


def test_without_room_nothing_changes(store):
    cache = jaxkv.swap_out(with_lengths(noisy(config_of()), [40, 8, 0]), 0, store)
    cache = with_lengths(cache, [0, 40, 40])
    before = raw(cache)
    with pytest.raises(jaxkv.CacheError, match="needs 5 free blocks, there are 1"):
        jaxkv.swap_in(cache, 0, store)
    assert raw(cache) == before
    assert store.keys == (0,)
    cache = jaxkv.release(cache, jnp.asarray([False, False, True]))
    cache = jaxkv.swap_in(cache, 0, store)
    assert cache.lengths.tolist() == [40, 48, 0]


def test_a_full_store_leaves_the_sequence_where_it_is(tmp_path):
    cache = with_lengths(noisy(config_of()), [40, 8, 0])
    before = raw(cache)
    for store in (jaxkv.BlockStore(max_bytes=1000), jaxkv.BlockStore(tmp_path, max_bytes=1000)):
        with pytest.raises(jaxkv.CacheError, match="full"):
            jaxkv.swap_out(cache, 0, store)
        assert store.nbytes == 0
    assert raw(cache) == before


def test_another_process_and_another_pool_take_the_sequence(tmp_path):
    cache = with_lengths(noisy(config_of()), [29, 0, 0])
    want = contents(cache, 0)
    store = jaxkv.BlockStore(tmp_path)
    jaxkv.swap_out(cache, 0, store, key="talk")
    store.close()
    store = jaxkv.BlockStore(tmp_path)
    other = jaxkv.init(config_of(num_blocks=40, debug=True))
    other = jaxkv.swap_in(other, 2, store, key="talk")
    assert contents(other, 2) == want


def test_bytes_that_mean_something_else_are_refused():
    store = jaxkv.BlockStore()
    cache = with_lengths(noisy(config_of("fp8"), k_scales=0.5), [20, 0, 0])
    jaxkv.swap_out(cache, 0, store)
    with pytest.raises(jaxkv.CacheError, match="other fp8 scales"):
        jaxkv.swap_in(jaxkv.init(config_of("fp8")), 0, store)
    for config in (
        config_of("int8"),
        config_of("fp8", layer_formats=()),
        dataclasses.replace(config_of("fp8"), encoding="reference"),
    ):
        with pytest.raises(jaxkv.CacheError, match="stored by a cache of"):
            jaxkv.swap_in(jaxkv.init(config, k_scales=0.5), 0, store)
    small = config_of("fp8", max_blocks_per_sequence=2)
    with pytest.raises(jaxkv.CacheError, match="takes 3 columns"):
        jaxkv.swap_in(jaxkv.init(small, k_scales=0.5), 0, store)
    jaxkv.swap_in(jaxkv.init(config_of("fp8"), k_scales=0.5), 0, store)


def test_what_cannot_be_is_refused_by_name():
    store = jaxkv.BlockStore()
    cache = with_lengths(jaxkv.init(config_of()), [20, 3, 0])
    with pytest.raises(ValueError, match="slot: got 3"):
        jaxkv.swap_out(cache, 3, store)
    with pytest.raises(ValueError, match="holds no tokens"):
        jaxkv.swap_out(cache, 2, store)
    with pytest.raises(jaxkv.CacheError, match="no such entry"):
        jaxkv.swap_in(cache, 2, store)
    cache = jaxkv.swap_out(cache, 0, store)
    with pytest.raises(ValueError, match="slot: 1 holds 3 tokens"):
        jaxkv.swap_in(cache, 1, store, key=0)
    with pytest.raises(jaxkv.CacheError, match="another key"):
        jaxkv.swap_out(cache, 1, store, key=0)
    with pytest.raises(ValueError, match="closed"):
        jaxkv.swap_out(jaxkv.close(cache), 1, store)
