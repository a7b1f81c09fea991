import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_except
from stores import assert_no_leak, contents, either_store, raw, with_noise
from test_hlo import NUM_BLOCKS, copies_of_pools

import jaxkv
from jaxkv.formats import FORMATS

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

store = either_store

S, T, BLOCK, COLUMNS, N, LAYERS = 2, 16, 8, 12, 2, 2


def config_of(name="fp8k_turbo4v", **options):
    return jaxkv.CacheConfig(
        num_kv_heads=1,
        head_dim=32,
        block_size=BLOCK,
        max_sequences=S,
        max_blocks_per_sequence=COLUMNS,
        format=name,
        **{
            "num_layers": LAYERS,
            "num_blocks": 14,
            "resident_blocks_per_sequence": N,
            **options,
        },
    )


def rows(seed, layers=LAYERS):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((3, layers, S, T, 2, 32)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("store", "options"), donate_argnames="cache")
def step(cache, x, new_tokens, store, options=()):
    """Writes and attends in every layer: x [3, layers, S, T, 2, 32]."""
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=x.shape[3])
    outputs = []
    for layer in range(x.shape[1]):
        q, k, v = x[:, layer]
        cache = jaxkv.write(cache, layer, k[:, :, :1], v[:, :, :1], plan)
        out = jaxkv.attend(cache, layer, q, plan, return_lse=True, store=store, **dict(options))
        outputs.append(out)
    return cache, outputs, plan


def advance(cache, store, new_tokens, x, options=()):
    cache, outputs, plan = step(
        jaxkv.offload(cache, store), x, jnp.asarray(new_tokens), store, options
    )
    assert plan.granted.all()
    return cache, outputs


STEPS = [(16, 5), (16, 0), (7, 16), (1, 1), (1, 16), (16, 1), (1, 1), (5, 1), (1, 1)]


def both_runs(name, options=(), store=None, layers=LAYERS):
    """Outputs of every step over resident blocks alone, and over stored ones too."""
    store = jaxkv.BlockStore() if store is None else store
    free = {"num_blocks": 2 * COLUMNS, "resident_blocks_per_sequence": None}
    scales = {"k_scales": 0.02, "v_scales": 0.03}
    whole = jaxkv.init(config_of(name, num_layers=layers, **free), **scales)
    cache = jaxkv.init(config_of(name, num_layers=layers), **scales)
    for seed, counts in enumerate(STEPS):
        x = rows(seed, layers)
        whole, want, _ = step(whole, x, jnp.asarray(counts), None, options)
        cache, got = advance(cache, store, counts, x, options)
        chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)
        yield cache, store


def check_answers(name, layers):
    most = 0
    for cache, store in both_runs(name, layers=layers):
        most = max(most, store.num_blocks)
        assert int((np.asarray(cache.block_tables) >= 0).sum()) <= S * (N + 1 + T // BLOCK)
    assert most == 10
    jaxkv.check(cache, strict=True)


def test_the_answer_is_that_of_resident_blocks_alone():
    check_answers("bf16", layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_except([*FORMATS, "fp8k_turbo4v"], ["fp8k_turbo4v"]))
def test_the_answer_is_that_of_resident_blocks_alone_in_every_format(name):
    check_answers(name, layers=LAYERS)


OPTIONS = {
    "window": (("window", 21),),
    "cap": (("soft_cap", 3.0), ("scale", 0.7)),
    "window and cap": (("window", 9), ("soft_cap", 3.0)),
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("options", full_except(OPTIONS, ["window and cap"]))
def test_windows_caps_and_scales_reach_stored_blocks(options):
    assert max(store.num_blocks for _, store in both_runs("turbo3", OPTIONS[options])) == 10


@pytest.mark.slow
def test_a_disk_store_and_sinks_give_the_same_answer(tmp_path):
    store = jaxkv.BlockStore(tmp_path, memory_bytes=0)
    *_, (cache, _) = both_runs("int8", store=store)
    assert len(list(tmp_path.glob("block-*.jaxkv"))) == store.num_blocks > 0
    x, sinks = rows(99), jnp.asarray([0.5, -jnp.inf])
    cache, plan = jaxkv.reserve(jaxkv.offload(cache, store), jnp.asarray([1, 2]), max_new_tokens=T)
    for layer in range(LAYERS):
        cache = jaxkv.write(cache, layer, x[1, layer, :, :, :1], x[2, layer, :, :, :1], plan)
        q = jnp.asarray(x[0, layer])
        out, lse = jaxkv.attend(cache, layer, q, plan, store=store, return_lse=True)
        with_sinks, sunk = jaxkv.attend(
            cache, layer, q, plan, store=store, sinks=sinks, return_lse=True
        )
        want = jnp.where(lse == -jnp.inf, lse, jnp.logaddexp(lse, sinks))
        chex.assert_trees_all_close(sunk, want, atol=1e-5)
        share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - sunk))
        chex.assert_trees_all_close(with_sinks, out * share[..., None], atol=1e-5)


reserve = functools.partial(jaxkv.reserve, max_new_tokens=BLOCK * COLUMNS)


def grown(lengths, **options):
    """A cache of random pages whose sequences have these lengths; no attention is compiled."""
    cache = with_noise(jaxkv.init(config_of("int8", **{"num_blocks": 24, **options})))
    cache, plan = reserve(cache, jnp.asarray(lengths))
    assert plan.granted.all()
    return cache


def kinds(cache, slot):
    """One letter a column: resident, stored or none."""
    return "".join("r" if e >= 0 else "." if e == -1 else "s" for e in cache.block_tables[slot])


def test_the_newest_blocks_stay_and_the_others_are_freed(store):
    cache = grown([44, 16])
    want = contents(cache, 0)
    cache = jaxkv.offload(cache, store)
    assert kinds(cache, 0) == "ssssrr......" and kinds(cache, 1) == "rr.........."
    assert store.num_blocks == 4 and int(cache.num_free_blocks) == 20
    assert_no_leak(cache)
    again = jaxkv.offload(cache, store)
    assert kinds(again, 0) == "ssssrr......" and store.num_blocks == 4
    # Every stored byte comes back.
    cache = jaxkv.trim(cache, jnp.asarray([30, -1]))
    cache = jaxkv.offload(cache, store)
    assert kinds(cache, 0) == "ssrr........" and store.num_blocks == 2
    for got, whole in zip(contents(cache, 0, first=2), want):
        block = len(whole) // 6
        assert got == whole[2 * block : 4 * block]
    cache = jaxkv.trim(cache, jnp.asarray([16, -1]))
    cache = jaxkv.offload(cache, store)
    assert contents(cache, 0) == [whole[: len(whole) // 3] for whole in want]
    assert store.num_blocks == 0 and store.nbytes == 0
    assert_no_leak(cache)
    jaxkv.check(cache, strict=True)


def test_reserve_refuses_what_holds_too_many_blocks_or_a_stored_tail():
    store = jaxkv.BlockStore()
    cache = grown([25, 16])
    cache, plan = reserve(cache, jnp.asarray([1, 1]))
    assert plan.refusal.tolist() == [1, 0] and cache.lengths.tolist() == [25, 17]
    cache, plan = reserve(cache, jnp.asarray([0, 0]))
    assert plan.granted.all()
    cache = jaxkv.offload(cache, store)
    cache, plan = reserve(cache, jnp.asarray([1, 1]))
    assert plan.granted.all()
    cache = jaxkv.trim(cache, jnp.asarray([4, -1]))
    assert kinds(cache, 0) == "s..........."
    cache, plan = reserve(cache, jnp.asarray([1, 0]))
    assert plan.refusal.tolist() == [1, 0] and int(cache.lengths[0]) == 4
    assert int(cache.faults.exhausted) == 2 and int(cache.faults.bad_id) == 0
    cache, plan = reserve(jaxkv.offload(cache, store), jnp.asarray([1, 0]))
    assert plan.granted.all()
    jaxkv.check(cache)


@pytest.mark.slow
def test_blocks_come_back_as_far_as_there_is_room_the_last_first():
    store = jaxkv.BlockStore()
    cache = jaxkv.offload(grown([44, 0], num_blocks=6), store)
    cache = jaxkv.trim(cache, jnp.asarray([28, -1]))
    cache, plan = reserve(cache, jnp.asarray([0, 5 * BLOCK]))
    assert plan.granted.all() and int(cache.num_free_blocks) == 1
    cache, plan = reserve(cache, jnp.asarray([1, 0]))
    assert plan.refusal.tolist() == [1, 0]
    one = dataclasses.replace(cache, sequences=cache.sequences)
    tables = np.asarray(cache.block_tables)[1]
    # Slot 1 moves three blocks out and makes room for both of slot 0.
    cache = jaxkv.offload(one, store)
    assert kinds(cache, 0) == "ssrr........" and kinds(cache, 1) == "sssrr......."
    assert set(tables[3:5].tolist()) == set(np.asarray(cache.block_tables)[1, 3:5].tolist())
    cache = jaxkv.trim(cache, jnp.asarray([12, -1]))
    cache = jaxkv.fork(cache, jnp.asarray([1]), jnp.asarray([1]))
    pool, _ = jaxkv.blocks.allocate(cache.pool, jnp.ones(3, bool))
    cache = jaxkv.offload(dataclasses.replace(cache, pool=pool), store)
    assert kinds(cache, 0) == "sr.........."


def test_shared_blocks_are_stored_once_and_handles_travel_and_die():
    store = jaxkv.BlockStore()
    cache = grown([44, 0])
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([1]))
    cache = jaxkv.offload(cache, store)
    assert store.num_blocks == 4 and int(cache.num_free_blocks) == 22
    np.testing.assert_array_equal(*np.asarray(cache.block_tables))
    cache = jaxkv.reorder(cache, jnp.asarray([-1, 0]))
    cache = jaxkv.offload(cache, store)
    assert store.num_blocks == 4 and kinds(cache, 1) == "ssssrr......"
    with pytest.raises(jaxkv.CacheError, match="slot 1: block handle"):
        jaxkv.swap_out(cache, 1, jaxkv.BlockStore())
    cache = jaxkv.swap_out(cache, 1, store, key="away")
    cache = jaxkv.offload(cache, store)
    assert store.num_blocks == 4 and int(cache.num_free_blocks) == 24
    cache = jaxkv.swap_in(cache, 0, store, key="away")
    assert kinds(cache, 0) == "ssssrr......"
    assert_no_leak(cache)
    cache = jaxkv.offload(jaxkv.release(cache, jnp.asarray([True, False])), store)
    assert store.nbytes == 0 and int(cache.num_free_blocks) == 24


def test_a_store_that_cannot_take_them_changes_nothing(tmp_path, monkeypatch):
    cache = grown([44, 30])
    before = raw(cache)
    small, disk = jaxkv.BlockStore(max_bytes=5000), jaxkv.BlockStore(tmp_path)
    with pytest.raises(jaxkv.CacheError, match="full"):
        jaxkv.offload(cache, small)
    assert small.nbytes == 0

    def fail(_):
        raise OSError("broken")

    with monkeypatch.context() as patch, pytest.raises(jaxkv.CacheError, match="broken"):
        patch.setattr("os.fsync", fail)
        jaxkv.offload(cache, disk)
    assert disk.nbytes == 0 and not list(tmp_path.glob("block-*"))
    assert raw(cache) == before
    jaxkv.offload(cache, disk)
    with pytest.raises(jaxkv.CacheError, match="not in the store"):
        jaxkv.offload(jaxkv.offload(cache, small := jaxkv.BlockStore()), disk)
    assert small.num_blocks == 6


def test_a_prefix_cache_stops_at_the_first_stored_block():
    store, prefix = jaxkv.BlockStore(), jaxkv.PrefixCache(config_of("int8", num_blocks=24))
    cache = jaxkv.offload(grown([44, 16]), store)
    cache = prefix.insert(cache, 0, np.arange(44))
    assert len(prefix) == 0
    cache = prefix.insert(cache, 1, np.arange(100, 116))
    assert len(prefix) == 2
    cache = jaxkv.release(cache, jnp.asarray([True, True]))
    cache, matched = prefix.attach(cache, 0, np.arange(100, 120))
    cache, plan = reserve(cache, jnp.asarray([9, 0]))
    assert matched == 16 and plan.granted.all()
    cache = jaxkv.offload(cache, store)  # the tree keeps its own reference
    assert kinds(cache, 0) == "ssrr........" and int(cache.num_free_blocks) == 20
    cache = prefix.clear(cache)
    assert_no_leak(cache)


def test_a_store_must_be_given_exactly_where_blocks_may_lie_in_one():
    cache, store = jaxkv.init(config_of("int8", num_blocks=24)), jaxkv.BlockStore()
    plan = reserve(cache, jnp.asarray([1, 1]))[1]
    q = jnp.zeros((S, BLOCK * COLUMNS, 2, 32))
    with pytest.raises(ValueError, match="store: got None"):
        jaxkv.attend(cache, 0, q, plan)
    free = jaxkv.init(config_of("int8", resident_blocks_per_sequence=None))
    with pytest.raises(ValueError, match="store: got one"):
        jaxkv.attend(free, 0, q, plan, store=store)
    with pytest.raises(ValueError, match="resident_blocks_per_sequence=N"):
        jaxkv.offload(free, store)
    with pytest.raises(ValueError, match="resident_blocks_per_sequence: got 0"):
        config_of(resident_blocks_per_sequence=0)
    held = jaxkv.offload(grown([44, 0]), store)
    jaxkv.swap_out(held, 0, store)
    with pytest.raises(jaxkv.CacheError, match="stay in the store"):
        jaxkv.swap_in(free, 0, store)


@pytest.mark.slow
def test_nothing_is_fetched_where_nothing_is_stored_or_seen():
    class Counting(jaxkv.BlockStore):
        reads = 0

        def read_block(self, handle, part):
            self.reads += 1
            return super().read_block(handle, part)

    store = Counting()
    options = (("window", 3),)
    cache = jaxkv.init(config_of("bf16"))
    cache, _ = advance(cache, store, (16, 9), rows(0), options)
    cache, _ = advance(cache, store, (16, 1), rows(1), options)
    cache, _ = advance(cache, store, (0, 1), rows(2), options)
    assert store.num_blocks == 2 and store.reads == 0
    cache, plan = jaxkv.reserve(cache, jnp.asarray([1, 1]), max_new_tokens=1)
    for layer in range(LAYERS):
        x = jnp.zeros((S, 1, 1, 32))
        cache = jaxkv.write(cache, layer, x, x, plan)
        jaxkv.attend(cache, layer, jnp.zeros((S, 1, 2, 32)), plan, store=store).block_until_ready()
    assert store.reads == 2 * LAYERS


@pytest.mark.slow
@pytest.mark.full
def test_generation_with_a_store_writes_the_same_tokens():
    from flax import nnx

    from jaxkv.generate import generate
    from jaxkv.models import Llama, LlamaConfig

    model = Llama(
        LlamaConfig(
            vocab_size=61,
            num_layers=1,
            features=32,
            mlp_features=64,
            num_q_heads=2,
            num_kv_heads=1,
            head_dim=32,
        ),
        rngs=nnx.Rngs(0),
    )
    prompts = [list(range(1, 40)), [7, 8, 9]]
    options = dict(max_new_tokens=40, prefill_chunk=16)
    free = config_of("int8", num_layers=1, num_blocks=24, resident_blocks_per_sequence=None)
    want = generate(model, jaxkv.init(free), prompts, **options)
    store = jaxkv.BlockStore()
    cache = jaxkv.init(config_of("int8", num_layers=1))
    got = generate(model, cache, prompts, store=store, **options)
    assert not got.refused.any()
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert int(got.cache.num_free_blocks) == 14
    jaxkv.offload(got.cache, store)
    assert store.nbytes == 0


@pytest.mark.as_shipped
@pytest.mark.slow
@pytest.mark.parametrize("name", full_except(["bf16", "turbo3"], ["turbo3"]))
def test_no_step_that_reads_stored_blocks_copies_a_pool(name):
    cache = jaxkv.init(config_of(name, num_blocks=NUM_BLOCKS))
    store = jaxkv.BlockStore()
    program = step.lower(cache, rows(0), jnp.asarray([1, 1]), store).compile()
    text = program.as_text()
    assert f"[{NUM_BLOCKS},1,{BLOCK}," in text
    assert copies_of_pools(text) == []
    assert program.memory_analysis().alias_size_in_bytes >= cache.nbytes


@pytest.mark.slow
@pytest.mark.full
def test_a_packed_step_reads_stored_blocks_too():
    cache = grown([44, 30])
    finite = jax.tree.map(
        lambda x: x if x.dtype == jnp.uint8 else jnp.full_like(x, 0.01), cache.layers
    )
    free = config_of("int8", num_blocks=24, resident_blocks_per_sequence=None)
    whole = dataclasses.replace(cache, layers=jax.tree.map(jnp.copy, finite), config=free)
    store = jaxkv.BlockStore()
    cache = jaxkv.offload(dataclasses.replace(cache, layers=finite), store)
    assert store.num_blocks == 6
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 12, 2, 32)), jnp.float32)
    answers = []
    for state, where in ((whole, None), (cache, store)):
        state, plan = jaxkv.reserve(state, jnp.asarray([9, 2]), total_tokens=12)
        state = jaxkv.write(state, 1, x[1, :, :1], x[2, :, :1], plan)
        answers.append(jaxkv.attend(state, 1, x[0], plan, store=where, return_lse=True))
    chex.assert_trees_all_close(*answers, rtol=2e-5, atol=2e-5)
