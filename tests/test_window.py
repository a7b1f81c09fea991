"""`CacheConfig(window=, keep_first=)`: blocks that no query sees again are dropped for good."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stores import assert_no_leak

import jaxkv

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

S, T, BLOCK, COLUMNS, WINDOW = 2, 16, 8, 12, 21


def config_of(**options):
    return jaxkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=32,
        block_size=BLOCK,
        max_sequences=S,
        max_blocks_per_sequence=COLUMNS,
        **{"num_blocks": 14, "window": WINDOW, "format": "fp8", **options},
    )


@functools.partial(jax.jit, static_argnames="window", donate_argnames="cache")
def step(cache, x, new_tokens, window=WINDOW):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=T)
    q, k, v = x
    cache = jaxkv.write(cache, 0, k[:, :, :1], v[:, :, :1], plan)
    out = jaxkv.attend(cache, 0, q, plan, window=window, return_lse=True)
    return cache, out, plan


def rows(seed):
    return np.random.default_rng(seed).standard_normal((3, S, T, 2, 32)).astype(np.float32)


reserve = functools.partial(jaxkv.reserve, max_new_tokens=BLOCK * COLUMNS)
# Shared by tests that look at bookkeeping alone: one compiled program.
SMALL = {"num_blocks": 8, "window": 17, "keep_first": 3}

STEPS = [(16, 5), (16, 0), (7, 16), (1, 1), (16, 16), (16, 1), (1, 1), (5, 1), (1, 1)]


def columns(cache, slot):
    return "".join("x" if e >= 0 else "." for e in cache.block_tables[slot])


@pytest.mark.slow
def test_the_answer_is_that_of_a_cache_that_drops_nothing():
    whole = jaxkv.init(config_of(window=None, num_blocks=2 * COLUMNS))
    cache = jaxkv.init(config_of())
    for seed, counts in enumerate(STEPS):
        whole, want, _ = step(whole, rows(seed), jnp.asarray(counts))
        cache, got, plan = step(cache, rows(seed), jnp.asarray(counts))
        assert plan.granted.all()
        chex.assert_trees_all_equal(got, want)
        assert_no_leak(cache)
    assert columns(cache, 0) == ".......xxx.." and columns(cache, 1) == "..xxxx......"
    jaxkv.check(cache, strict=True)


@pytest.mark.slow
def test_the_first_tokens_stay_and_every_query_sees_them():
    keep = 3
    cache = jaxkv.init(config_of(keep_first=keep))
    seen = [np.zeros((2, 0, 32), np.float32)] * S
    for seed, counts in enumerate(STEPS):
        x = rows(seed)
        starts = np.asarray(cache.lengths)
        cache, (out, lse), _ = step(cache, x, jnp.asarray(counts))
        for slot, count in enumerate(counts):
            seen[slot] = np.concatenate([seen[slot], x[1:, slot, :count, 0]], axis=1)
            k, v = np.asarray(jnp.asarray(seen[slot], jnp.float8_e4m3fn), np.float64)
            for t in range(count):
                p = starts[slot] + t
                key = np.arange(p + 1)
                visible = (key > p - WINDOW) | (key < keep)
                scores = x[0, slot, t].astype(np.float64) @ k[key[visible]].T / np.sqrt(32)
                weights = np.exp(scores)
                want = weights @ v[key[visible]] / weights.sum(1, keepdims=True)
                np.testing.assert_allclose(out[slot, t], want, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(lse[slot, t], np.log(weights.sum(1)), rtol=1e-4)
    assert columns(cache, 0) == "x......xxx.."
    assert_no_leak(cache)


def test_blocks_are_dropped_when_no_query_sees_them_and_serve_the_same_step():
    cache = jaxkv.init(config_of(**SMALL))
    cache, plan = reserve(cache, jnp.asarray([41, 0]))
    assert plan.granted.all() and columns(cache, 0) == "xxxxxx......"
    cache, plan = reserve(cache, jnp.asarray([0, 17]))  # slot 0 is left alone
    assert plan.refusal.tolist() == [0, 1] and columns(cache, 0) == "xxxxxx......"
    # The next query stands at 41 and sees keys from 25 on, and 0 to 2.
    cache, plan = reserve(cache, jnp.asarray([24, 0]))
    assert plan.granted.all() and columns(cache, 0) == "x..xxxxxx..."
    assert int(cache.num_free_blocks) == 1
    cache, plan = reserve(cache, jnp.asarray([0, 17]))
    assert plan.refusal.tolist() == [0, 1]
    assert_no_leak(cache)
    cache, plan = reserve(cache, jnp.asarray([1, 17]))
    assert plan.granted.all() and columns(cache, 0) == "x.....xxx..."
    assert_no_leak(cache)


def test_a_trim_back_to_dropped_blocks_is_ignored_and_counted():
    cache = jaxkv.init(config_of(**SMALL))
    cache, _ = reserve(cache, jnp.asarray([41, 0]))
    cache, _ = reserve(cache, jnp.asarray([7, 0]))
    assert columns(cache, 0) == "x..xxx......"
    before = cache
    cache = jaxkv.trim(cache, jnp.asarray([39, 0]))  # sees keys from 23 on
    assert int(cache.lengths[0]) == 48 and int(cache.faults.past_capacity) == 1
    chex.assert_trees_all_equal(cache.sequences, before.sequences)
    with pytest.raises(jaxkv.CacheError, match="a window dropped"):
        jaxkv.check(cache)
    cache = jaxkv.trim(jaxkv.clear_faults(cache), jnp.asarray([40, -1]))
    assert int(cache.lengths[0]) == 40 and columns(cache, 0) == "x..xx......."
    cache = jaxkv.trim(cache, jnp.asarray([8, -1]))  # the kept block alone
    assert int(cache.lengths[0]) == 8 and columns(cache, 0) == "x..........."
    cache = jaxkv.trim(cache, jnp.asarray([0, -1]))
    jaxkv.check(cache, strict=True)
    assert int(cache.num_free_blocks) == 8


@pytest.mark.slow
def test_a_partly_filled_block_is_needed_even_where_it_is_not_seen():
    cache = jaxkv.init(config_of(window=1))
    cache, _ = reserve(cache, jnp.asarray([16, 0]))
    cache, _ = reserve(cache, jnp.asarray([1, 0]))
    assert columns(cache, 0) == "..x........."
    cache = jaxkv.trim(cache, jnp.asarray([12, -1]))
    assert int(cache.lengths[0]) == 17 and int(cache.faults.past_capacity) == 1
    cache, plan = reserve(jaxkv.trim(cache, jnp.asarray([16, -1])), jnp.asarray([1, 0]))
    assert plan.granted.all() and columns(cache, 0) == "..x........."


def test_dropped_columns_survive_sharing_and_swapping():
    store = jaxkv.BlockStore()
    cache = jaxkv.init(config_of(**SMALL))
    cache, _ = reserve(cache, jnp.asarray([41, 0]))
    cache, _ = reserve(cache, jnp.asarray([1, 0]))
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([1]))
    assert columns(cache, 1) == "x..xxx......" and int(cache.num_free_blocks) == 4
    cache = jaxkv.swap_out(cache, 0, store)
    cache = jaxkv.reorder(cache, jnp.asarray([-1, 1]))
    for other in ({}, {"window": None}):
        with pytest.raises(jaxkv.CacheError, match="dropped under window=17, keep_first=3"):
            jaxkv.swap_in(jaxkv.init(config_of(**other)), 0, store)
    cache = jaxkv.swap_in(cache, 0, store)
    assert columns(cache, 0) == columns(cache, 1) == "x..xxx......"
    prefix = jaxkv.PrefixCache(config_of(**SMALL))
    cache = prefix.insert(cache, 0, np.arange(42))
    assert len(prefix) == 1
    assert_no_leak(cache, extra=np.asarray(cache.block_tables)[0, :1])


def test_options_that_contradict_each_other_are_refused():
    for options, message in (
        ({"window": 0}, "window: got 0"),
        ({"keep_first": -1}, "keep_first: got -1"),
        ({"window": None, "keep_first": 1}, "expected 0 without a window"),
        ({"resident_blocks_per_sequence": 2}, "would store"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(**options)
    config = config_of(**SMALL)
    assert jaxkv.CacheConfig.from_json(config.to_json()) == config
    cache = jaxkv.init(config)
    _, plan = reserve(cache, jnp.asarray([1, 1]))
    q = jnp.zeros((S, BLOCK * COLUMNS, 2, 32))
    for window in (None, 18):
        with pytest.raises(ValueError, match="at most CacheConfig's window = 17"):
            jaxkv.attend(cache, 0, q, plan, window=window)
