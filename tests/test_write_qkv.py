"""`write_qkv` against its separate steps, written out in float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only

import jaxkv
from jaxkv import codecs
from jaxkv.qkv import rope_tables

S, T, QH, KH, D, DV = 3, 3, 4, 2, 32, 16
WIDTH = QH * D + KH * D + KH * DV


def make(name="bf16"):
    return jaxkv.CacheConfig(
        num_layers=1,
        num_kv_heads=KH,
        head_dim=D,
        v_head_dim=DV,
        block_size=8,
        num_blocks=12,
        max_sequences=S,
        max_blocks_per_sequence=4,
        format=name,
    )


def rows(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def norm64(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rope64(x, positions, rotary_dim, theta, style):
    """Complex multiplication by exp(i position theta_j) on each pair."""
    x = np.array(x, np.float64)
    half = rotary_dim // 2
    angle = np.asarray(positions)[..., None, None] * theta ** (-np.arange(half) / half)
    first = slice(0, half) if style == "half" else slice(0, rotary_dim, 2)
    second = slice(half, rotary_dim) if style == "half" else slice(1, rotary_dim, 2)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    x[..., first], x[..., second] = z.real, z.imag
    return x


@functools.partial(jax.jit, static_argnames=("style", "tokens", "packed"), donate_argnames="cache")
def step(cache, qkv, new_tokens, rope, norms, style, tokens, packed=False):
    how = {"total_tokens": tokens} if packed else {"max_new_tokens": tokens}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    cache, q = jaxkv.write_qkv(
        cache, 0, qkv, plan, num_q_heads=QH, rope=rope, rope_style=style, **norms
    )
    return cache, q, plan


def stored(cache, plan):
    """Decoded K and V at the plan's slots, [tokens, heads, dim], -1 slots dropped."""
    spec, pages = cache.config.layer(0), cache.layers[0]
    slots = np.asarray(plan.slots).reshape(-1)
    slots = slots[slots >= 0]
    return [
        np.asarray(codecs.unrotate(codecs.decode_pages(p, s)[slots // 8, :, slots % 8], s))
        for p, s in ((pages.k, spec.k), (pages.v, spec.v))
    ]


def reference(x, norm, style, positions, rotary_dim):
    x = np.asarray(x, np.float64) if norm is None else norm64(x, norm, 1e-6)
    return x if style == "none" else rope64(x, positions, rotary_dim, 1e4, style)


@pytest.mark.parametrize(
    ("style", "rotary_dim"),
    fast_only(
        [("half", D), ("half", 16), ("interleaved", D), ("interleaved", 16), ("none", 0)],
        [("half", D), ("interleaved", 16)],
    ),
)
@pytest.mark.parametrize("with_norm", fast_only([False, True], [True]))
def test_equals_the_separate_steps(style, rotary_dim, with_norm):
    norms = {"q_norm": rows(D, 5), "k_norm": rows(D, 6)} if with_norm else {}
    rope = None if style == "none" else rope_tables(64, rotary_dim, 1e4)
    cache = jaxkv.init(make("f16"))
    # Two steps, so that blocks are crossed; the middle slot stays behind.
    for seed, n in ((1, [3, 1, 2]), (2, [3, 3, 0]), (3, [3, 2, 3])):
        qkv = rows((S, T, WIDTH), seed)
        cache, q, plan = step(cache, qkv, jnp.asarray(n), rope, norms, style, T)
        positions = np.asarray(plan.positions)
        valid = np.asarray(plan.slots).reshape(-1) >= 0

        q_in, k_in, v_in = jnp.split(qkv, [QH * D, QH * D + KH * D], axis=-1)
        how = (style, positions, rotary_dim)
        want_q = reference(q_in.reshape(S, T, QH, D), norms.get("q_norm"), *how)
        want_k = reference(k_in.reshape(S, T, KH, D), norms.get("k_norm"), *how)
        got_k, got_v = stored(cache, plan)
        got_q, want_q, want_k, want_v = (
            np.asarray(x).reshape(S * T, -1)[valid] for x in (q, want_q, want_k, v_in)
        )
        chex.assert_trees_all_close(got_q, want_q, atol=2e-6, rtol=2e-6)
        # One rounding to f16.
        got_k = got_k.reshape(len(got_k), -1)
        chex.assert_trees_all_close(got_k, want_k, atol=1e-5, rtol=2.0**-10.5)
        np.testing.assert_array_equal(got_v.reshape(len(got_v), -1), want_v.astype(np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "turbo4", "fp8k_turbo3v"])
def test_bytes_equal_write_of_the_parts(name):
    rope = rope_tables(64, D, 1e4)
    qkv = rows((S, T, WIDTH))
    n = jnp.asarray([3, 0, 2])
    fused, _, plan = step(jaxkv.init(make(name)), qkv, n, rope, {}, "half", T)
    k = jaxkv.qkv.apply_rope(
        qkv[..., QH * D : QH * D + KH * D].reshape(S, T, KH, D), plan.positions, *rope, "half"
    )
    v = qkv[..., QH * D + KH * D :].reshape(S, T, KH, DV)
    cache, plan = jaxkv.reserve(jaxkv.init(make(name)), n, max_new_tokens=T)
    cache = jaxkv.write(cache, 0, k, v, plan)
    different = jax.tree.map(lambda a, b: float((a != b).mean()), fused.layers, cache.layers)
    # Fusing may round a rotated key differently by one ulp, rarely across a code's bound.
    assert max(jax.tree.leaves(different)) < 2e-3


@pytest.mark.slow
def test_packed_equals_padded():
    rope = rope_tables(64, D, 1e4)
    qkv = rows((S, T, WIDTH))
    padded, q, _ = step(jaxkv.init(make("int8")), qkv, jnp.asarray([3, 0, 2]), rope, {}, "half", T)
    flat = jnp.concatenate([qkv[0, :3], qkv[2, :2], qkv[1, :2]])
    packed, packed_q, _ = step(
        jaxkv.init(make("int8")), flat, jnp.asarray([3, 0, 2]), rope, {}, "half", 7, packed=True
    )
    chex.assert_trees_all_equal(packed.layers, padded.layers)
    chex.assert_trees_all_equal(packed_q[:5], jnp.concatenate([q[0, :3], q[2, :2]]))


def test_given_positions_replace_the_sequences_own():
    rope = rope_tables(64, D, 1e4)
    qkv = rows((S, 1, WIDTH))
    cache, plan = jaxkv.reserve(jaxkv.init(make("f16")), jnp.asarray([1, 1, 1]))
    positions = jnp.asarray([[7], [0], [63]])
    _, q = jaxkv.write_qkv(cache, 0, qkv, plan, num_q_heads=QH, rope=rope, positions=positions)
    want = rope64(qkv[..., : QH * D].reshape(S, 1, QH, D), positions, D, 1e4, "half")
    chex.assert_trees_all_close(np.asarray(q), want, atol=1e-5)


def test_a_position_beyond_the_tables_is_nan_counted_and_harms_nobody_else():
    rope = rope_tables(2, D, 1e4)
    cache, _, _ = step(
        jaxkv.init(make()), rows((S, T, WIDTH)), jnp.asarray([3, 2, 0]), rope, {}, "half", T
    )
    assert int(cache.faults.non_finite) == KH
    with pytest.raises(jaxkv.CacheError, match="slot 0"):
        jaxkv.check(cache)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv": jnp.zeros((S, 1, WIDTH - 16))}, ValueError, r"qkv: got shape \[3, 1, 208\]"),
        ({"qkv": jnp.zeros((S, 2, WIDTH))}, ValueError, "qkv: got shape"),
        ({"qkv": jnp.zeros((S, 1, WIDTH), jnp.int32)}, TypeError, "qkv: got dtype int32"),
        ({"num_q_heads": 3}, ValueError, "num_q_heads: got 3"),
        ({"q_norm": jnp.ones(QH * D)}, ValueError, r"q_norm: got shape \[128\], expected \[32\]"),
        ({"k_norm": jnp.ones(16)}, ValueError, r"k_norm: got shape \[16\]"),
        ({"rope": None}, ValueError, "rope: got no tables"),
        ({"rope_style": "none"}, ValueError, "rope: got tables with rope_style 'none'"),
        ({"rope_style": "neox"}, ValueError, "rope_style: got 'neox'"),
        ({"rope": (jnp.ones((4, 32)),) * 2}, ValueError, "tables of width 32"),
        ({"rope": (jnp.ones((4, 8)), jnp.ones((4, 4)))}, ValueError, "rope: got cos"),
        ({"positions": jnp.zeros((S,), jnp.int32)}, ValueError, r"positions: got shape \[3\]"),
        ({"positions": jnp.zeros((S, 1))}, TypeError, "positions: got dtype float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, message):
    cache, plan = jaxkv.reserve(jaxkv.init(make()), jnp.asarray([1, 1, 1]))
    arguments = {
        "qkv": jnp.zeros((S, 1, WIDTH)),
        "num_q_heads": QH,
        "rope": rope_tables(8, D, 1e4),
        **change,
    }
    with pytest.raises(error, match=message):
        jaxkv.write_qkv(cache, 0, arguments.pop("qkv"), plan, **arguments)
