"""The paged cache's own duties: storing, copy on write, faults, bytes in and out."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only

import jaxkv
from jaxkv import codecs, dispatch
from jaxkv.formats import FORMATS

FORMAT_NAMES = tuple(FORMATS)
PAIRS = ("fp8k_turbo4v", "turbo3k_turbo8v", "int8k_nvfp4v")
ALL = fast_only([*FORMAT_NAMES, *PAIRS], ["fp8k_turbo4v"], ["bf16", "int8", "nvfp4", "turbo3"])
SYMMETRIC = fast_only(FORMAT_NAMES, ["int8"])
S, T = 3, 4


def make(**fields):
    defaults = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
        "block_size": 8,
        "num_blocks": 12,
        "max_sequences": S,
        "max_blocks_per_sequence": 4,
    }
    return jaxkv.CacheConfig(**{**defaults, **fields})


def tokens(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.partial(jax.jit, static_argnames="max_new_tokens")
def append(cache, k, v, new_tokens, max_new_tokens=T):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=max_new_tokens)
    for layer in range(cache.config.num_layers):
        cache = jaxkv.write(cache, layer, k[layer], v[layer], plan)
    return cache, plan


def append_random(cache, new_tokens, seed=0):
    config = cache.config
    shape = (config.num_layers, S, T, config.num_kv_heads)
    k = tokens((*shape, config.head_dim), seed)
    v = tokens((*shape, config.layer(0).v_head_dim), seed + 1)
    cache, plan = append(cache, k, v, jnp.asarray(new_tokens, jnp.int32))
    return cache, plan, k, v


def stored_rows(cache, layer, slot):
    """(K, V) of a sequence's tokens in the stored basis, f32 [length, heads, dim]."""
    spec, pages = cache.config.layer(layer), cache.layers[layer]
    table = np.asarray(cache.block_tables[slot])
    length = int(cache.lengths[slot])
    out = []
    for side, side_spec, scale in (
        (pages.k, spec.k, cache.k_scales[layer]),
        (pages.v, spec.v, cache.v_scales[layer]),
    ):
        every = codecs.decode_pages(side, side_spec, scale)[table[table >= 0]]
        rows = jnp.swapaxes(every, 1, 2).reshape(-1, spec.num_kv_heads, side_spec.head_dim)
        out.append(rows[:length])
    return out


@pytest.mark.as_shipped
@pytest.mark.parametrize("name", ALL)
def test_write_stores_what_the_codec_says(name):
    config = make(format=name, v_head_dim=32, num_layers=1)
    cache = jaxkv.init(config, k_scales=0.5, v_scales=0.25)
    cache, _, k1, v1 = append_random(cache, [4, 0, 3])
    cache, _, k2, v2 = append_random(cache, [4, 1, 0], seed=5)
    expected = {
        0: (jnp.concatenate([k1[0, 0], k2[0, 0]]), jnp.concatenate([v1[0, 0], v2[0, 0]])),
        1: (k2[0, 1, :1], v2[0, 1, :1]),
        2: (k1[0, 2, :3], v1[0, 2, :3]),
    }
    spec = config.layer(0)
    for slot, sides in expected.items():
        for got, x, side, scale in zip(
            stored_rows(cache, 0, slot), sides, (spec.k, spec.v), (0.5, 0.25)
        ):
            rows, _ = codecs.encode_rows(x, side, jnp.float32(scale))
            want = codecs.decode_rows(rows.data, rows.scales, side, jnp.float32(scale))
            chex.assert_trees_all_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turbo4", "nvfp4", "turbo8", "int8"])
def test_few_rows_are_stored_as_many_are(name):
    """A decode step encodes both sides as one, a step of more than 64 tokens each by itself."""
    config = make(format=name, num_layers=1)
    shape = (1, S, 24, config.num_kv_heads, config.head_dim)
    k = tokens(shape).at[0, 1, 2, 0, 0].set(jnp.nan)
    v = tokens(shape, 1).at[0, 2, 3, 1, 5].set(1e9)
    new_tokens = jnp.full(S, 24)
    whole, _ = append(jaxkv.init(config), k, v, new_tokens, max_new_tokens=24)
    parts = jaxkv.init(config)
    for i in range(0, 24, T):
        part = np.s_[:, :, i : i + T]
        parts, _ = append(parts, k[part], v[part], jnp.full(S, T))
    for slot in range(S):
        for want, got in zip(stored_rows(whole, 0, slot), stored_rows(parts, 0, slot)):
            chex.assert_trees_all_equal(got, want)
    assert int(whole.faults.non_finite) > 0
    chex.assert_trees_all_equal(whole.faults.counts, parts.faults.counts)


@pytest.mark.slow
def test_packed_and_padded_writes_are_byte_equal():
    config = make(format="turbo4k_turbo3v")
    padded, _, k, v = append_random(jaxkv.init(config), [2, 0, 3])

    def pack(x):
        return jnp.concatenate([x[:, 0, :2], x[:, 2, :3], x[:, 0, :2] * jnp.nan], axis=1)

    cache, plan = jaxkv.reserve(jaxkv.init(config), jnp.asarray([2, 0, 3]), total_tokens=7)
    for layer in range(2):
        cache = jaxkv.write(cache, layer, pack(k)[layer], pack(v)[layer], plan)
    chex.assert_trees_all_equal(cache.layers, padded.layers)
    assert jaxkv.report(cache) == "no faults"


@pytest.mark.parametrize("name", fast_only(["bf16", "int8", "turbo8", "turbo3"], ["int8"]))
def test_copy_on_write_carries_codes_and_scales(name):
    config = make(format=name)
    cache, _, _, _ = append_random(jaxkv.init(config), [4, 0, 0])
    before = [stored_rows(cache, layer, 0) for layer in range(2)]
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([2]))
    assert int(cache.num_free_blocks) == 11
    cache, plan, _, _ = append_random(cache, [2, 0, 3], seed=9)
    assert int(plan.num_copies) == 1 and int(cache.num_free_blocks) == 10
    tables = np.asarray(cache.block_tables)
    assert tables[0, 0] != tables[2, 0]
    for layer in range(2):
        for slot in (0, 2):
            got = [rows[:4] for rows in stored_rows(cache, layer, slot)]
            chex.assert_trees_all_equal(got, before[layer])
        own = [stored_rows(cache, layer, slot)[0][4:] for slot in (0, 2)]
        assert not np.array_equal(own[0][:2], own[1][:2])


@pytest.mark.slow
def test_more_copies_than_one_trip_of_the_loop():
    config = make(max_sequences=11, num_blocks=40, format="int8")
    cache = jaxkv.init(config)
    shape = (2, 11, T, 2, 64)
    cache, _ = append(cache, tokens(shape), tokens(shape, 1), jnp.asarray([3] + [0] * 10))
    want = stored_rows(cache, 1, 0)
    cache = jaxkv.fork(cache, jnp.zeros(10, jnp.int32), jnp.arange(1, 11))
    cache, plan = append(cache, tokens(shape, 2), tokens(shape, 3), jnp.ones(11, jnp.int32))
    assert int(plan.num_copies) == 10
    for slot in range(11):
        chex.assert_trees_all_equal([r[:3] for r in stored_rows(cache, 1, slot)], want)


def test_refused_sequences_leave_every_byte_alone():
    cache = jaxkv.init(make(num_blocks=1))
    cache, plan, _, _ = append_random(cache, [4, 4, 0])
    assert plan.granted.tolist() == [True, False, True]
    assert plan.refusal.tolist() == [0, 1, 0]
    assert cache.lengths.tolist() == [4, 0, 0]
    before = cache.layers
    cache, plan, _, _ = append_random(cache, [0, 4, 5], seed=3)
    assert plan.refusal.tolist() == [0, 1, 3]
    chex.assert_trees_all_equal(cache.layers, before)
    assert int(cache.faults.exhausted) == 2 and int(cache.faults.past_capacity) == 1


@pytest.mark.parametrize("name", SYMMETRIC)
def test_only_the_written_slots_change(name):
    cache = jaxkv.init(make(format=name, num_layers=1))
    poison = jax.tree.map(lambda a: jnp.full_like(a, 0x55), cache.layers)
    cache = dataclasses.replace(cache, layers=poison)
    new, plan, _, _ = append_random(cache, [1, 0, 2])
    written = {int(s) for s in plan.slots.reshape(-1) if s >= 0}
    assert len(written) == 3
    for old_leaf, leaf in zip(jax.tree.leaves(poison), jax.tree.leaves(new.layers)):
        token_axis = 2 if leaf.shape[2] == 8 else leaf.ndim - 1
        changed = np.asarray(old_leaf != leaf)
        axes = tuple(i for i in range(leaf.ndim) if i not in (0, token_axis))
        per_token = changed.any(axis=axes)
        assert {b * 8 + o for b, o in zip(*np.nonzero(per_token))} <= written


def test_fp8_scales_are_per_layer_and_side():
    cache = jaxkv.init(make(format="fp8"), k_scales=[1.0, 2.0], v_scales=[0.5, 4.0])
    k = jnp.full((2, S, T, 2, 64), 600.0)
    cache, _ = append(cache, k, k, jnp.asarray([1, 0, 0]))
    got = [[float(side[0, 0, 0]) for side in stored_rows(cache, layer, 0)] for layer in (0, 1)]
    assert got == [[448.0, 224.0], [576.0, 576.0]]
    assert int(cache.faults.saturated) == 2 * 2 * 64
    np.testing.assert_array_equal(cache.faults.first[jaxkv.FaultKind.SATURATED], [1, 0, 0])


@pytest.mark.parametrize(
    ("scales", "message"),
    [([1.0], r"k_scales: got shape \[1\]"), (0.0, "positive finite"), (np.nan, "positive finite")],
)
def test_bad_scales(scales, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.init(make(), k_scales=scales)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_non_finite_tokens_are_counted_with_their_place(name):
    cache = jaxkv.init(make(format=name))
    shape = (2, S, T, 2, 64)
    k = tokens(shape).at[1, 2, 1, 0, 3].set(jnp.nan).at[1, 2, 1, 1, 5].set(jnp.inf)
    # Padding may hold anything.
    k = k.at[:, 0, 1:].set(jnp.nan)
    cache, plan = append(cache, k, tokens(shape, 1), jnp.asarray([1, 0, 2]))
    assert int(cache.faults.non_finite) == 2
    assert cache.faults.first[jaxkv.FaultKind.NON_FINITE].tolist() == [int(plan.step), 1, 2]
    with pytest.raises(jaxkv.CacheError, match=r"non-finite.*layer 1, slot 2"):
        jaxkv.check(cache)
    assert jaxkv.report(jaxkv.clear_faults(cache)) == "no faults"


def test_precision_faults_are_reported_but_raise_only_when_strict():
    cache = jaxkv.init(make(format="turbo4"))
    k = tokens((2, S, T, 2, 64)) * 1e-6
    cache, _ = append(cache, k, tokens((2, S, T, 2, 64), 1), jnp.asarray([1, 0, 0]))
    assert int(cache.faults.flushed) == 2 * 2 * 4
    jaxkv.check(cache)
    assert "flushed" in jaxkv.report(cache)
    with pytest.raises(jaxkv.CacheError, match="flushed"):
        jaxkv.check(cache, strict=True)


def test_debug_raises_at_the_call_outside_jit():
    cache = jaxkv.init(make(debug=True))
    with pytest.raises(jaxkv.CacheError, match="bad id"):
        jaxkv.reserve(cache, jnp.asarray([-1, 0, 0]))
    # Backpressure is no bug.
    jaxkv.reserve(jaxkv.init(make(debug=True, num_blocks=1)), jnp.asarray([1, 1, 1]))


def test_debug_raises_inside_jit_at_the_next_synchronisation():
    cache = jaxkv.init(make(debug=True))
    step = jax.jit(lambda cache, n: jaxkv.reserve(cache, n)[0])
    jax.block_until_ready(step(cache, jnp.asarray([1, 0, 0])))
    jax.effects_barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match="bad id"):
        jax.block_until_ready(step(cache, jnp.asarray([-1, 0, 0])))
        jax.effects_barrier()


def test_every_leaf_has_a_buffer_of_its_own():
    cache = jaxkv.init(make(format="turbo3", trace_events=2))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    assert len(set(pointers)) == len(pointers)


def test_nbytes_is_the_sum_of_the_arrays_and_of_the_config():
    for name in FORMAT_NAMES:
        config = make(format=name)
        cache = jaxkv.init(config)
        assert cache.nbytes == sum(a.nbytes for a in jax.tree.leaves(cache.layers))
        assert cache.nbytes == config.num_blocks * config.block_bytes_total


def test_close_deletes_the_pages_and_grants_nothing():
    cache, plan, k, v = append_random(jaxkv.init(make()), [4, 0, 0])
    leaves = jax.tree.leaves(cache.layers)
    closed = jaxkv.close(cache)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert closed.is_closed and "closed" in repr(closed)
    closed, plan = jaxkv.reserve(closed, jnp.asarray([1, 1, 0]))
    assert plan.granted.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="closed"):
        jaxkv.write(closed, 0, k[0, :, :1], v[0, :, :1], plan)
    with pytest.raises(ValueError, match="closed"):
        jaxkv.attend(closed, 0, k[0, :, :1], plan)


def test_close_goes_on_past_an_error_and_raises_it():
    class Broken:
        def delete(self):
            raise RuntimeError("device lost")

    cache = jaxkv.init(make())
    last = jax.tree.leaves(cache.layers[1])
    broken = dataclasses.replace(
        cache.layers[0], k=dataclasses.replace(cache.layers[0].k, data=(Broken(),))
    )
    with pytest.raises(RuntimeError, match="device lost"):
        jaxkv.close(dataclasses.replace(cache, layers=(broken, cache.layers[1])))
    assert all(leaf.is_deleted() for leaf in last)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_dim", fast_only([64, 80], [80]))
def test_export_and_import_are_inverse(name, head_dim):
    config = make(format=name, head_dim=head_dim, num_layers=1)
    cache, _, _, _ = append_random(jaxkv.init(config), [4, 3, 2])
    block = int(cache.block_tables[1, 0])
    exported = jaxkv.export_block(cache, 0, block)
    assert tuple(map(len, exported)) == config.block_bytes(0)
    other = jaxkv.import_block(jaxkv.init(config), 0, 7, *exported)
    assert jaxkv.export_block(other, 0, 7) == exported
    moved = jax.tree.map(lambda a: a[7], other.layers[0])
    chex.assert_trees_all_equal(moved, jax.tree.map(lambda a: a[block], cache.layers[0]))


def test_exported_bytes_are_token_then_head_then_dim():
    config = make(format="fp8", num_layers=1, num_kv_heads=2, head_dim=16)
    x = jnp.arange(2 * 16, dtype=jnp.float32).reshape(1, 1, 2, 16) * jnp.ones((S, T, 1, 1))
    cache = jaxkv.init(config)
    cache, _ = append(cache, x[None], x[None], jnp.asarray([2, 0, 0]))
    k, _ = jaxkv.export_block(cache, 0, int(cache.block_tables[0, 0]))
    want = codecs.to_bytes(codecs.encode(x[0, :2], "fp8"))[0].tobytes()
    assert k[: len(want)] == want


def test_import_refuses_wrong_sizes_and_ids():
    cache = jaxkv.init(make(num_layers=1))
    k, v = jaxkv.export_block(cache, 0, 0)
    with pytest.raises(ValueError, match=r"k_bytes: got \d+ bytes, expected"):
        jaxkv.import_block(cache, 0, 0, k[:-1], v)
    with pytest.raises(ValueError, match="block: got 12, expected 0 to 11"):
        jaxkv.export_block(cache, 0, 12)
    with pytest.raises(ValueError, match="layer: got 1"):
        jaxkv.export_block(cache, 1, 0)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((S, T, 2, 32), jnp.float32, ValueError, r"k: got shape \[3, 4, 2, 32\], expected"),
        ((S, 1, 2, 64), jnp.float32, ValueError, r"expected \[3, 4, 2, 64\] \(padded"),
        ((S * T, 2, 64), jnp.float32, ValueError, r"expected \[3, 4, 2, 64\]"),
        ((S, T, 2, 64), jnp.int32, TypeError, "k: got dtype int32"),
    ],
)
def test_write_refuses_what_does_not_fit_the_plan(shape, dtype, error, message):
    cache, plan = jaxkv.reserve(jaxkv.init(make()), jnp.asarray([1, 1, 1]), max_new_tokens=T)
    x = jnp.zeros(shape, dtype)
    with pytest.raises(error, match=message):
        jaxkv.write(cache, 0, x, x, plan)


def test_a_traced_layer_index_is_refused():
    cache, plan = jaxkv.reserve(jaxkv.init(make()), jnp.asarray([1, 1, 1]))
    x = jnp.zeros((S, 1, 2, 64))
    with pytest.raises(TypeError, match="traced layer index"):
        jax.jit(lambda i: jaxkv.write(cache, i, x, x, plan))(0)


def test_gradients_through_attend_are_refused_with_the_reason():
    cache, plan = jaxkv.reserve(jaxkv.init(make()), jnp.asarray([1, 1, 1]))
    with pytest.raises(NotImplementedError, match="attend: gradients are not supported"):
        jax.grad(lambda q: jaxkv.attend(cache, 0, q, plan).sum())(jnp.ones((S, 1, 4, 64)))


def test_naming_an_implementation_that_cannot_serve_says_why():
    config = make()
    assert jaxkv.supports(config, "xla") == []
    assert "expected an NVIDIA GPU" in jaxkv.supports(config, "pallas_gpu")[0]
    cache, plan = jaxkv.reserve(jaxkv.init(config), jnp.asarray([1, 1, 1]))
    x = jnp.zeros((S, 1, 2, 64))
    with pytest.raises(NotImplementedError, match="cannot serve layer 0: the default device"):
        jaxkv.write(cache, 0, x, x, plan, implementation="pallas_gpu")
    with pytest.raises(ValueError, match="implementation: got 'triton'"):
        jaxkv.attend(cache, 0, x, plan, implementation="triton")


AMD = types.SimpleNamespace(device_kind="AMD Instinct MI300X", compute_capability="gfx942")
INTEL = types.SimpleNamespace(device_kind="Intel Max 1550")
TURING = types.SimpleNamespace(device_kind="Tesla T4", compute_capability="7.5")
HOPPER = types.SimpleNamespace(device_kind="NVIDIA H100", compute_capability="9.0")


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (AMD, "AMD Instinct MI300X (compute capability gfx942), expected an NVIDIA GPU"),
        (INTEL, "Intel Max 1550 (compute capability None), expected an NVIDIA GPU"),
        (TURING, "8.0 is needed"),
        (HOPPER, None),
    ],
)
def test_a_gpu_is_known_by_its_compute_capability(monkeypatch, device, reason):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    config = make(block_size=16)
    reasons = jaxkv.supports(config, "pallas_gpu")
    assert [reason in r for r in reasons] == ([] if reason is None else [True])
    chosen = dispatch.choose_implementation(config, None, layer=0)
    assert chosen == ("pallas_gpu" if reason is None else "xla")


@pytest.mark.slow
def test_one_trace_serves_all_lengths_ids_and_scales():
    @chex.assert_max_traces(n=1)
    def step(cache, k, v, n):
        cache, plan = jaxkv.reserve(cache, n, max_new_tokens=T)
        cache = jaxkv.write(cache, 0, k, v, plan)
        return jaxkv.write(cache, 1, k, v, plan)

    step = jax.jit(step)
    k = tokens((S, T, 2, 64))
    for scale in (1.0, 0.5):
        cache = jaxkv.init(make(format="fp8"), k_scales=scale)
        for n in ([1, 0, 4], [4, 4, 4], [0, 0, 0], [9, 1, -1]):
            cache = step(cache, k, k, jnp.asarray(n))
            cache = jaxkv.trim(cache, jnp.asarray([0, -1, 1]))


@pytest.mark.slow
def test_trace_lists_a_blocks_events():
    cache = jaxkv.init(make(trace_events=4))
    cache, _, _, _ = append_random(cache, [1, 0, 0])
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([1]))
    cache = jaxkv.release(cache, jnp.asarray([True, True, False]))
    counts = [count for _, count, _ in jaxkv.trace(cache, 0)]
    assert counts == [1, 2, 1, 0]
    with pytest.raises(ValueError, match="trac"):
        jaxkv.trace(jaxkv.init(make()), 0)
