"""PagedAttention against plain attention; the cache is passed in and handed back."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.flax import PagedAttention

FEATURES, HEADS, KV_HEADS, DIM = 24, 4, 2, 16
LENGTHS = (11, 5)


def make_attention(**options):
    return PagedAttention(
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        features=FEATURES,
        layer=1,
        rngs=nnx.Rngs(0),
        **options,
    )


@functools.cache
def config(fmt="f16", v_head_dim=None):
    return jaxkv.CacheConfig(
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=v_head_dim,
        block_size=8,
        num_blocks=8,
        max_sequences=2,
        max_blocks_per_sequence=4,
        format=fmt,
    )


def inputs():
    return jax.random.normal(jax.random.key(1), (2, max(LENGTHS), FEATURES))


@jax.jit
def padded_step(attention, x, cache, new_tokens):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=x.shape[1])
    return attention(x, cache, plan)


uncached = jax.jit(lambda attention, x: attention.uncached(x))


FULL = (pytest.mark.slow, pytest.mark.full)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"rope_style": "interleaved", "rope_theta": 1e5}, marks=FULL),
        pytest.param({"rope_style": "none"}, marks=FULL),
        pytest.param({"rotary_dim": 8}, marks=FULL),
        pytest.param({"qk_norm": True}, marks=pytest.mark.slow),
        pytest.param({"window": 3}, marks=pytest.mark.slow),
        pytest.param({"soft_cap": 2.0}, marks=FULL),
        pytest.param({"scale": 0.5}, marks=FULL),
        pytest.param({"v_head_dim": 32}, marks=FULL),
    ],
    ids=str,
)
def test_prefill_and_decode_equal_plain_attention(options):
    attention, x = make_attention(**options), inputs()
    expected = uncached(attention, x)
    cache = jaxkv.init(config(v_head_dim=options.get("v_head_dim")))
    y, cache = padded_step(attention, x[:, :8], cache, jnp.asarray([8, 5]))
    np.testing.assert_allclose(y[0], expected[0, :8], atol=2e-3)
    np.testing.assert_allclose(y[1, :5], expected[1, :5], atol=2e-3)
    np.testing.assert_array_equal(y[1, 5:], 0)
    for t in range(8, 10):
        at = jnp.asarray([t, 5])
        y, cache = padded_step(
            attention, x[jnp.arange(2), at][:, None], cache, jnp.asarray([1, t == 8], jnp.int32)
        )
        np.testing.assert_allclose(y[0, 0], expected[0, t], atol=2e-3)
    assert cache.lengths.tolist() == [10, 6]


@pytest.mark.slow
def test_packed_equals_padded():
    attention, x = make_attention(), inputs()
    counts = jnp.asarray(LENGTHS)
    padded, _ = padded_step(attention, x, jaxkv.init(config()), counts)

    @jax.jit
    def packed_step(attention, x, cache):
        cache, plan = jaxkv.reserve(cache, counts, total_tokens=20)
        return attention(x, cache, plan)

    rows = jnp.concatenate([x[0, : LENGTHS[0]], x[1, : LENGTHS[1]], jnp.zeros((4, FEATURES))])
    packed, cache = packed_step(attention, rows, jaxkv.init(config()))
    np.testing.assert_allclose(packed[:11], padded[0], atol=1e-5)
    np.testing.assert_allclose(packed[11:16], padded[1, :5], atol=1e-5)
    np.testing.assert_array_equal(packed[16:], 0)
    assert cache.lengths.tolist() == list(LENGTHS)


def test_one_trace_serves_a_whole_run():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(padded_step.__wrapped__, n=1))
    attention, x = make_attention(), inputs()
    cache = jaxkv.init(config())
    for t in range(6):
        _, cache = step(attention, x[:, t : t + 1], cache, jnp.asarray([1, t % 2]))
    assert cache.lengths.tolist() == [6, 3]


def test_the_module_holds_weights_alone():
    attention = make_attention(qk_norm=True)
    before = jax.tree.map(np.asarray, nnx.state(attention))
    padded_step(attention, inputs(), jaxkv.init(config()), jnp.asarray(LENGTHS))
    state = nnx.state(attention)
    assert all(isinstance(leaf, nnx.Param) for _, leaf in nnx.to_flat_state(state))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, state), before)
    size = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert size == FEATURES * DIM * (2 * HEADS + 2 * KV_HEADS) + 2 * DIM


def test_its_layer_is_the_one_that_is_written():
    _, cache = padded_step(make_attention(), inputs(), jaxkv.init(config()), jnp.asarray(LENGTHS))
    written = [bool(jnp.any(layer.k.data[0] != 0)) for layer in cache.layers]
    assert written == [False, True]


@pytest.mark.slow
def test_computation_in_bf16():
    attention = make_attention(dtype=jnp.bfloat16)
    x = inputs()
    y, _ = padded_step(attention, x, jaxkv.init(config("bf16")), jnp.asarray(LENGTHS))
    assert y.dtype == jnp.bfloat16
    assert attention.q_proj.kernel[...].dtype == jnp.float32
    expected = uncached(make_attention(), x)
    np.testing.assert_allclose(y[0].astype(jnp.float32), expected[0], atol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_q_heads": 3}, r"num_q_heads \(3\) must be a multiple"),
        ({"rope_style": "both"}, "rope_style must be one of none, half, interleaved"),
        ({"rotary_dim": 18}, "rotary_dim must be even and at most head_dim"),
        ({"rotary_dim": 7}, "rotary_dim must be even"),
    ],
)
def test_wrong_geometry_is_refused(options, message):
    arguments = dict(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, features=FEATURES, layer=0
    )
    with pytest.raises(ValueError, match=message):
        PagedAttention(**(arguments | options), rngs=nnx.Rngs(0))


def test_an_input_of_another_layout_than_the_plan_is_refused():
    cache, plan = jaxkv.reserve(jaxkv.init(config()), jnp.asarray([1, 1]), max_new_tokens=1)
    with pytest.raises(ValueError, match=r"x has tokens \(2, 3\), the plan has \(2, 1\)"):
        make_attention()(jnp.zeros((2, 3, FEATURES)), cache, plan)
