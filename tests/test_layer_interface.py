"""One suite over paged and contiguous caches: what an attention layer asks of either."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from marks import fast_only

import jaxkv
from jaxkv import attention_xla
from jaxkv.qkv import rope_tables

S, T, QH, KH, D, DV = 3, 12, 6, 2, 32, 16
WIDTH = QH * D + KH * (D + DV)
CAPACITY = 48
FORMATS = ["bf16", "f16", "int8", "fp8", "nvfp4", "turbo8", "turbo4", "turbo3", "turbo2"]
SOME = ["f16", "fp8k_turbo4v"]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks so small that a contiguous sequence takes several."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_xla, "_CHUNK_ELEMENTS", 16 * KH * D)
    patch.setattr(attention_xla, "_TILE_TOKENS", 8)
    yield
    patch.undo()


def config_of(name):
    return jaxkv.CacheConfig(
        num_layers=2,
        num_kv_heads=KH,
        head_dim=D,
        v_head_dim=DV,
        block_size=8,
        num_blocks=20,
        max_sequences=S,
        max_blocks_per_sequence=CAPACITY // 8,
        format=name,
    )


def make(kind, name):
    scales = {"k_scales": 0.05, "v_scales": [0.3, 0.2]} if "fp8" in name else {}
    if kind == "paged":
        return jaxkv.init(config_of(name), **scales)
    return jaxkv.init_contiguous(config_of(name), batch=S, capacity=CAPACITY, **scales)


ROPE = rope_tables(CAPACITY, D, 1e4)


@functools.partial(jax.jit, static_argnames=("tokens", "packed", "window"))
def step(cache, qkv, new_tokens, sinks, tokens=T, packed=False, window=None):
    how = {"total_tokens": tokens} if packed else {"max_new_tokens": tokens}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    outputs, queries = [], []
    for layer in range(2):
        cache, q = jaxkv.write_qkv(cache, layer, qkv[layer], plan, num_q_heads=QH, rope=ROPE)
        outputs.append(
            jaxkv.attend(cache, layer, q, plan, window=window, sinks=sinks, return_lse=True)
        )
        queries.append(q)
    return cache, outputs, queries, plan


def qkv_of(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, *shape, WIDTH)), jnp.float32)


def check_against_oracle(cache, outputs, queries, plan, **options):
    live = np.asarray(plan.slots) >= 0
    for layer, ((out, lse), q) in enumerate(zip(outputs, queries)):
        spec, pages = cache.config.layer(layer), cache.layers[layer]
        rows = [
            oracle.stored_rows(p, s, scales[layer])
            for p, s, scales in (
                (pages.k, spec.k, cache.k_scales),
                (pages.v, spec.v, cache.v_scales),
            )
        ]
        want, want_lse = oracle.attend(q, *rows, plan, **options)
        error = np.linalg.norm(np.asarray(out) - want) / np.linalg.norm(want)
        assert error < 3e-3
        np.testing.assert_allclose(np.asarray(lse)[live], want_lse[live], atol=3e-3)
        assert not np.asarray(out)[~live].any()


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("name", fast_only([*FORMATS, "fp8k_turbo4v"], ["f16"], ["turbo3"]))
def test_prefill_then_chunks_then_decode_equal_the_oracle(kind, name):
    cache = make(kind, name)
    for seed, n in enumerate([[12, 3, 0], [12, 1, 7], [1, 12, 1], [4, 0, 12]]):
        cache, *rest = step(cache, qkv_of((S, T), seed), jnp.asarray(n), None)
        check_against_oracle(cache, *rest)
    assert cache.lengths.tolist() == [29, 16, 20]
    jaxkv.check(cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_window_and_sinks(kind):
    cache, sinks = make(kind, "int8"), jnp.linspace(-2, 2, QH)
    for seed, n in enumerate([[12, 3, 0], [12, 1, 7], [12, 12, 1]]):
        cache, *rest = step(cache, qkv_of((S, T), seed), jnp.asarray(n), sinks, window=10)
    check_against_oracle(cache, *rest, window=10, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_paged_and_contiguous_agree(name):
    caches = {kind: make(kind, name) for kind in ("paged", "contiguous")}
    for seed, n in enumerate([[12, 3, 0], [1, 12, 1]]):
        outputs = {}
        for kind, cache in caches.items():
            caches[kind], outputs[kind], _, _ = step(
                cache, qkv_of((S, T), seed), jnp.asarray(n), None
            )
        chex.assert_trees_all_close(outputs["paged"], outputs["contiguous"], atol=2e-5, rtol=2e-4)
    views = [cache.layer(1) for cache in caches.values()]
    assert [v.block_size for v in views] == [8, 0]
    assert {(v.capacity, v.head_dim, v.v_head_dim, str(v.format)) for v in views} == {
        (CAPACITY, D, DV, name)
    }
    chex.assert_trees_all_equal(views[0].lengths, views[1].lengths)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_trim_equals_never_having_appended(kind):
    start, *_ = step(make(kind, "turbo4"), qkv_of((S, T), 0), jnp.asarray([11, 9, 5]), None)
    longer, *_ = step(start, qkv_of((S, T), 1), jnp.asarray([12, 3, 4]), None)
    trimmed = jaxkv.trim(longer, jnp.asarray([11, -1, 5]))
    assert trimmed.lengths.tolist() == [11, 12, 5]
    new = qkv_of((S, T), 2)
    _, want, *_ = step(start, new, jnp.asarray([3, 0, 3]), None)
    _, got, *_ = step(trimmed, new, jnp.asarray([3, 0, 3]), None)
    chex.assert_trees_all_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_release_and_overflow(kind):
    cache = make(kind, "f16")
    for _ in range(4):
        cache, *_, plan = step(cache, qkv_of((S, T), 0), jnp.asarray([12, 1, 0]), None)
    assert cache.lengths.tolist() == [48, 4, 0]
    before = cache.layers
    cache, outputs, _, plan = step(cache, qkv_of((S, T), 1), jnp.asarray([1, 1, 0]), None)
    assert plan.refusal.tolist() == [2, 0, 0] and cache.lengths.tolist() == [48, 5, 0]
    assert int(cache.faults.full) == 1 and not np.asarray(outputs[0][0])[0].any()
    full = np.asarray(cache.block_tables[0])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache.layers)):
        chex.assert_trees_all_equal(new[full], old[full])
    cache = jaxkv.release(cache, jnp.asarray([True, False, False]))
    cache, *_, plan = step(cache, qkv_of((S, T), 1), jnp.asarray([12, 0, 2]), None)
    assert plan.granted.all() and cache.lengths.tolist() == [12, 5, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_packed_equals_padded(kind):
    qkv = qkv_of((S, T), 3)
    padded, want, _, _ = step(make(kind, "int8"), qkv, jnp.asarray([5, 0, 4]), None)
    flat = jnp.concatenate([qkv[:, 0, :5], qkv[:, 2, :4], qkv[:, 1, :3]], axis=1)
    cache, got, _, _ = step(
        make(kind, "int8"), flat, jnp.asarray([5, 0, 4]), None, tokens=12, packed=True
    )
    chex.assert_trees_all_equal(cache.layers, padded.layers)
    for (out, _), (padded_out, _) in zip(got, want):
        rows = jnp.concatenate([padded_out[0, :5], padded_out[2, :4]])
        chex.assert_trees_all_close(out[:9], rows, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_fork_shares_until_one_appends(kind):
    cache, *_ = step(make(kind, "int8"), qkv_of((S, T), 0), jnp.asarray([9, 0, 0]), None)
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([2]))
    cache, *rest = step(cache, qkv_of((S, T), 1), jnp.asarray([2, 0, 3]), None)
    assert int(rest[-1].num_copies) == 1
    check_against_oracle(cache, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_no_retrace_over_lengths(kind):
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(n=1)(step.__wrapped__)
    run = jax.jit(traced)
    cache = make(kind, "int8")
    for n in ([1, 2, 3], [12, 0, 0], [0, 12, -1], [40, 1, 1]):
        cache, *_ = run(cache, qkv_of((S, T), 0), jnp.asarray(n), None)
