"""`implementation="pallas_gpu"` through the public verbs, interpreted, against XLA."""

import dataclasses
import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from marks import full_except

import jaxkv
import pallas_kernels
from jaxkv import dispatch
from jaxkv.qkv import rope_tables

CONFIG = jaxkv.CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=64,
    block_size=64,
    num_blocks=6,
    max_sequences=2,
    max_blocks_per_sequence=2,
    format="fp8k_turbo4v",
)


@pytest.fixture
def interpreted(monkeypatch):
    """Lets this machine count as one whose GPU can, and interprets the kernels."""
    monkeypatch.setattr(dispatch, "unsupported", lambda *_: ())
    for name in ("paged_attention", "paged_write", "paged_qkv_write"):
        kernel = functools.partial(
            getattr(pallas_kernels, name), interpret=plgpu.InterpretGPUParams()
        )
        monkeypatch.setattr(pallas_kernels, name, kernel)


def run(implementation, packed, k_mean=None, config=CONFIG):
    rng = np.random.default_rng(0)
    cache = jaxkv.init(config, k_scales=0.05, v_scales=0.3)
    if k_mean is not None:
        cache = dataclasses.replace(cache, k_means=(k_mean,))
    outputs = []
    for counts in ([9, 3], [2, 1]):
        how = {"total_tokens": 16} if packed else {"max_new_tokens": max(counts)}
        cache, plan = jaxkv.reserve(cache, jnp.asarray(counts), **how)
        k, v = jnp.asarray(rng.standard_normal((2, *plan.token_shape, 1, 64)), jnp.float32)
        q = jnp.asarray(rng.standard_normal((*plan.token_shape, 3, 64)), jnp.float32)
        cache = jaxkv.write(cache, 0, k, v, plan, implementation=implementation)
        outputs.append(
            jaxkv.attend(
                cache,
                0,
                q,
                plan,
                window=8,
                sinks=jnp.asarray([0.5, -1.0, 2.0]),
                return_lse=True,
                implementation=implementation,
            )
        )
    return cache, outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "centered"),
    full_except([(False, False), (True, False), (False, True)], [(True, False), (False, True)]),
)
def test_the_gpu_kernels_serve_the_public_verbs(interpreted, packed, centered):
    k_mean = jnp.linspace(-2.0, 1.0, 64)[None] if centered else None
    cache, got = run("pallas_gpu", packed, k_mean)
    want_cache, want = run("xla", packed, k_mean)
    for (out, lse), (want_out, want_lse) in zip(got, want):
        error = np.linalg.norm(out - want_out) / np.linalg.norm(want_out)
        # bf16 and f16 products against split ones.
        assert error < 5e-3
        chex.assert_trees_all_close(lse, want_lse, atol=1e-2)
    chex.assert_trees_all_equal(cache.layers[0].k, want_cache.layers[0].k)
    codes, want_codes = cache.layers[0].v.data[0], want_cache.layers[0].v.data[0]
    # A rotated value may round across a bound differently, rarely.
    written = 15 / (CONFIG.num_blocks * CONFIG.block_size)
    assert float((codes != want_codes).mean()) < 1e-2 * written
    scales, want_scales = cache.layers[0].v.scales, want_cache.layers[0].v.scales
    assert float((scales != want_scales).mean()) < 1e-2 * written


@pytest.mark.slow
@pytest.mark.parametrize("packed", full_except([False, True], [False]))
def test_exact_tokens_beside_the_gpu_kernel(interpreted, packed):
    exact = dataclasses.replace(
        CONFIG, format="turbo2", exact_first=1, exact_recent=3, max_step_tokens=16
    )
    _, got = run("pallas_gpu", packed, config=exact)
    _, want = run("xla", packed, config=exact)
    _, without = run("xla", packed, config=dataclasses.replace(CONFIG, format="turbo2"))
    for (out, lse), (want_out, want_lse), (far, _) in zip(got, want, without):
        size = np.linalg.norm(want_out)
        assert np.linalg.norm(out - want_out) < 5e-3 * size < np.linalg.norm(far - want_out)
        chex.assert_trees_all_close(lse, want_lse, atol=1e-2)


def run_qkv(implementation, config, rotary_dim):
    rng = np.random.default_rng(1)
    cache = jaxkv.init(config)
    rope = rope_tables(64, rotary_dim, 1e4)
    norms = jnp.asarray(rng.uniform(0.5, 2, (2, 64)), jnp.float32)
    cache, plan = jaxkv.reserve(cache, jnp.asarray([5, 3]), max_new_tokens=5)
    qkv = jnp.asarray(rng.standard_normal((2, 5, 64 * 4)), jnp.float32)
    return jaxkv.write_qkv(
        cache,
        0,
        qkv,
        plan,
        num_q_heads=2,
        rope=rope,
        q_norm=norms[0],
        k_norm=norms[1],
        implementation=implementation,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rotary_dim, fused", [(64, 1), (48, 0)])
def test_write_qkv_is_one_kernel_where_it_can_be(interpreted, monkeypatch, rotary_dim, fused):
    calls = []
    kernel = pallas_kernels.paged_qkv_write

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(pallas_kernels, "paged_qkv_write", counted)
    config = dataclasses.replace(CONFIG, format="bf16k_int8v")
    cache, q = run_qkv("pallas_gpu", config, rotary_dim)
    want_cache, want_q = run_qkv("xla", config, rotary_dim)
    assert len(calls) == fused
    stored = np.asarray([[1] * 5, [1] * 3 + [0] * 2], bool)
    chex.assert_trees_all_close(q[stored], want_q[stored], atol=1e-5, rtol=1e-5)
    for slot, count in ((0, 5), (1, 3)):
        block = int(cache.block_tables[slot, 0])
        exported = (jaxkv.export_block(c, 0, block) for c in (cache, want_cache))
        for got, want in zip(*exported):
            # A sum in another order may round across a bound, rarely.
            differ = np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8)
            assert differ.mean() < 1e-3 * count / CONFIG.block_size
    chex.assert_trees_all_equal(cache.faults, want_cache.faults)
