import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only

import jaxkv

S, T, BLOCK = 3, 40, 8
CONFIG = jaxkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    block_size=BLOCK,
    num_blocks=20,
    max_sequences=S,
    max_blocks_per_sequence=6,
    format="int8k_turbo4v",
)
# One key, value and query row per token id: what a token stores depends on the token alone.
ROWS = np.random.default_rng(0).standard_normal((3, 100, 1, 16)).astype(np.float32)


@functools.partial(jax.jit, donate_argnames="cache")
def step(cache, ids, new_tokens):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=T)
    k, v, q = jnp.asarray(ROWS)[:, ids]
    cache = jaxkv.write(cache, 0, k, v, plan)
    return cache, jaxkv.attend(cache, 0, q, plan), plan


def run(cache, slot, tokens):
    """Appends tokens to a slot; returns the cache and the outputs of those tokens."""
    ids = np.zeros((S, T), np.int32)
    ids[slot, : len(tokens)] = tokens
    counts = np.zeros(S, np.int32)
    counts[slot] = len(tokens)
    cache, out, plan = step(cache, ids, counts)
    assert plan.granted.all()
    return cache, np.asarray(out[slot, : len(tokens)])


def leak_free(cache, prefix, slots_in_use):
    tables = np.asarray(cache.block_tables)
    holders = np.bincount(tables[tables >= 0], minlength=CONFIG.num_blocks)
    for node in prefix._nodes.values():
        holders[node.block] += 1
    np.testing.assert_array_equal(np.asarray(cache.pool.counts), holders)
    assert int(cache.num_free_blocks) == int((holders == 0).sum())
    assert int((np.asarray(cache.lengths) > 0).sum()) == slots_in_use


PROMPT = np.arange(1, 30)  # three full blocks and a part


@pytest.mark.parametrize("length", fast_only([23, 24, 25, 29], [24]))
def test_a_reused_prefix_gives_the_same_outputs(length):
    prompt = PROMPT[:length]
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, matched = prefix.attach(jaxkv.init(CONFIG), 0, prompt)
    assert matched == 0
    cache, want = run(cache, 0, prompt)
    cache = prefix.insert(cache, 0, prompt)
    assert len(prefix) == length // BLOCK
    cache, matched = prefix.attach(cache, 2, prompt)
    # A fully known prompt keeps one token to compute, inside a block that is shared.
    assert matched == min(length // BLOCK * BLOCK, length - 1)
    assert int(cache.lengths[2]) == matched
    cache, got = run(cache, 2, prompt[matched:])
    chex.assert_trees_all_close(got, want[matched:], atol=1e-6)
    leak_free(cache, prefix, 2)
    s = prefix.statistics
    assert (s.hits, s.misses, s.tokens_reused) == (1, 1, matched)
    jaxkv.check(cache, strict=True)


def test_match_says_what_attach_would_find_and_counts_nothing():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT)
    cache = prefix.insert(cache, 0, PROMPT)
    for tokens, expected in ((PROMPT, 24), (PROMPT[:24], 23), (PROMPT[:9], 8), (PROMPT[1:], 0)):
        assert prefix.match(tokens) == expected
    assert (prefix.statistics.hits, prefix.statistics.misses) == (0, 0)
    with pytest.raises(ValueError, match="tokens: got"):
        prefix.match([])


def test_the_shared_block_is_copied_before_the_last_token_is_written():
    prefix = jaxkv.PrefixCache(CONFIG)
    prompt = PROMPT[:16]
    cache, _ = run(jaxkv.init(CONFIG), 0, prompt)
    cache = prefix.insert(cache, 0, prompt)
    shared = int(cache.block_tables[0, 1])
    before = jaxkv.export_block(cache, 0, shared)
    cache, _ = prefix.attach(cache, 1, prompt)
    cache, _ = run(cache, 1, prompt[15:])
    assert int(cache.block_tables[1, 1]) != shared
    assert jaxkv.export_block(cache, 0, shared) == before
    leak_free(cache, prefix, 2)


def test_the_prefix_outlives_its_sequence_and_clear_frees_it():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT)
    cache = prefix.insert(cache, 0, PROMPT)
    cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    assert int(cache.num_free_blocks) == 17
    leak_free(cache, prefix, 0)
    cache, matched = prefix.attach(cache, 1, PROMPT)
    assert matched == 24
    cache = prefix.clear(cache)
    leak_free(cache, prefix, 1)
    cache = jaxkv.release(cache, jnp.asarray([False, True, False]))
    assert int(cache.num_free_blocks) == CONFIG.num_blocks and len(prefix) == 0


def test_a_block_already_in_the_tree_stays():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT)
    cache, _ = run(cache, 1, PROMPT)
    cache = prefix.insert(cache, 0, PROMPT)
    first = {node.block for node in prefix._nodes.values()}
    cache = prefix.insert(cache, 1, PROMPT)
    assert {node.block for node in prefix._nodes.values()} == first
    leak_free(cache, prefix, 2)


def test_only_blocks_below_the_length_are_inserted():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT[:10])
    cache = prefix.insert(cache, 0, PROMPT)
    assert len(prefix) == 1


def test_diverging_prompts_share_what_they_have_in_common():
    prefix = jaxkv.PrefixCache(CONFIG)
    other = np.concatenate([PROMPT[:16], PROMPT[:13] + 50])
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT)
    cache = prefix.insert(cache, 0, PROMPT)
    cache, matched = prefix.attach(cache, 1, other)
    assert matched == 16
    cache, _ = run(cache, 1, other[16:])
    cache = prefix.insert(cache, 1, other)
    assert len(prefix) == 4
    # The same tokens below another parent are another block.
    cache, matched = prefix.attach(cache, 2, PROMPT[16:])
    assert matched == 0
    leak_free(cache, prefix, 2)


def test_least_recently_used_leaves_go_first_and_only_those_nobody_holds():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache = jaxkv.init(CONFIG)
    prompts = [np.full(17, 10 * i + 1) + np.arange(17) % 7 for i in range(3)]
    for prompt in prompts:
        cache, _ = run(cache, 0, prompt)
        cache = prefix.insert(cache, 0, prompt)
        cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    assert int(cache.num_free_blocks) == 14 and len(prefix) == 6
    # Prompt 0 is used again and held, so prompt 1 is the oldest to go.
    cache, matched = prefix.attach(cache, 1, prompts[0])
    assert matched == 16
    cache = prefix.make_room(cache, 15)
    assert int(cache.num_free_blocks) == 15
    leak_free(cache, prefix, 1)
    assert prefix.attach(cache, 0, prompts[1])[1] == 8
    cache = prefix.make_room(cache, 1000)
    assert int(cache.num_free_blocks) == 18 and len(prefix) == 2
    assert prefix.statistics.evictions == 4
    assert prefix.make_room(cache, 3) is cache


def test_blocks_above_those_in_use_can_be_evicted():
    prefix = jaxkv.PrefixCache(CONFIG)
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT[:16])
    cache = prefix.insert(cache, 0, PROMPT[:16])
    # This one computed its own first two blocks, so the tree takes its third alone.
    cache, _ = run(cache, 1, PROMPT)
    cache = prefix.insert(cache, 1, PROMPT)
    cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    assert len(prefix) == 3 and prefix.shared_blocks(cache, 1) == 1
    free = int(cache.num_free_blocks)
    cache = prefix.make_room(cache, free + 1)
    assert int(cache.num_free_blocks) == free + 1
    assert (prefix.statistics.evictions, prefix.statistics.forgotten) == (1, 1)
    assert len(prefix) == 1 and prefix.shared_blocks(cache, 1) == 0
    cache = prefix.make_room(cache, free + 3)
    assert int(cache.num_free_blocks) == free + 2 and len(prefix) == 0
    assert prefix.statistics.forgotten == 1
    leak_free(cache, prefix, 1)


def test_an_older_cache_is_refused_before_anything_changes():
    prefix = jaxkv.PrefixCache(CONFIG)
    old = jaxkv.init(CONFIG)
    kept = jax.tree.map(jnp.copy, old)
    cache, _ = run(old, 0, PROMPT)
    cache = prefix.insert(cache, 0, PROMPT)
    for verb in (
        lambda: prefix.attach(kept, 0, PROMPT),
        lambda: prefix.clear(kept),
        lambda: prefix.make_room(kept, 1000),
    ):
        with pytest.raises(jaxkv.CacheError, match="newest cache"):
            verb()
    assert len(prefix) == 3
    other = dataclasses.replace(kept, config=dataclasses.replace(CONFIG, debug=True))
    with pytest.raises(jaxkv.CacheError, match="config"):
        prefix.attach(other, 0, PROMPT)
    leak_free(cache, prefix, 1)


def test_model_adapter_and_format_separate_trees():
    roots = {
        jaxkv.PrefixCache(config, model=model, adapter=adapter)._root.key
        for config in (CONFIG, dataclasses.replace(CONFIG, format="bf16"))
        for model, adapter in (("a", "b"), ("ab", ""), ("", "ab"), ("a", ""))
    }
    assert len(roots) == 8


def test_a_colliding_digest_is_no_hit(monkeypatch):
    prefix = jaxkv.PrefixCache(CONFIG)
    monkeypatch.setattr(jaxkv.prefix, "_chain", lambda parent, tokens: parent + b"x")
    cache, _ = run(jaxkv.init(CONFIG), 0, PROMPT[:9])
    cache = prefix.insert(cache, 0, PROMPT[:9])
    cache, matched = prefix.attach(cache, 1, PROMPT[:9] + 1)
    assert matched == 0
    cache, _ = run(cache, 1, PROMPT[:9] + 1)
    cache = prefix.insert(cache, 1, PROMPT[:9] + 1)
    assert len(prefix) == 1
    leak_free(cache, prefix, 2)


def test_matching_does_not_look_at_the_rest_of_the_tree():
    prefix = jaxkv.PrefixCache(CONFIG)
    for i in range(30_000):
        tokens = np.full(BLOCK, i, np.int64).tobytes()
        prefix._add(prefix._root, tokens, i % CONFIG.num_blocks, 0)
    seen = list(prefix._walk(np.full(BLOCK * 3, 29_999)))
    assert [node.block for node in seen] == [29_999 % CONFIG.num_blocks]


@pytest.mark.parametrize(
    ("slot", "tokens", "message"),
    [
        (3, PROMPT, "slot: got 3, expected 0 to 2"),
        (0, [], "tokens: got"),
        (0, [1.5], "tokens: got float64"),
        (0, [[1]], "tokens: got"),
        (1, PROMPT, "slot: 1 holds 2 tokens"),
    ],
)
def test_bad_arguments(slot, tokens, message):
    cache, _ = run(jaxkv.init(CONFIG), 1, [1, 2])
    with pytest.raises(ValueError, match=message):
        jaxkv.PrefixCache(CONFIG).attach(cache, slot, tokens)
