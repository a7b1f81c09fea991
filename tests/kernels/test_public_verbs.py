"""`implementation="pallas_gpu"` through the public verbs, interpreted, against XLA."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxkv
import pallas_kernels
from jaxkv import dispatch

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
    for name in ("paged_attention", "paged_write"):
        kernel = functools.partial(
            getattr(pallas_kernels, name), interpret=plgpu.InterpretGPUParams()
        )
        monkeypatch.setattr(pallas_kernels, name, kernel)


def run(implementation, packed):
    rng = np.random.default_rng(0)
    cache = jaxkv.init(CONFIG, k_scales=0.05, v_scales=0.3)
    outputs = []
    for counts in ([60, 3], [2, 1]):
        how = {"total_tokens": 64} if packed else {"max_new_tokens": max(counts)}
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
                window=50,
                sinks=jnp.asarray([0.5, -1.0, 2.0]),
                return_lse=True,
                implementation=implementation,
            )
        )
    return cache, outputs


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_the_gpu_kernels_serve_the_public_verbs(interpreted, packed):
    cache, got = run("pallas_gpu", packed)
    want_cache, want = run("xla", packed)
    for (out, lse), (want_out, want_lse) in zip(got, want):
        error = np.linalg.norm(out - want_out) / np.linalg.norm(want_out)
        # bf16 and f16 products against split ones.
        assert error < 5e-3
        chex.assert_trees_all_close(lse, want_lse, atol=1e-2)
    chex.assert_trees_all_equal(cache.layers[0].k, want_cache.layers[0].k)
    codes, want_codes = cache.layers[0].v.data[0], want_cache.layers[0].v.data[0]
    # A rotated value may round across a bound differently, rarely.
    assert float((codes != want_codes).mean()) < 1e-2
