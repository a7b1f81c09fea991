"""What only a contiguous cache does; the shared verbs are in test_layer_interface.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.formats import FORMATS

CONFIG = jaxkv.CacheConfig(num_layers=2, num_kv_heads=2, head_dim=32)
B, T = 2, 5


def make(name="bf16", **fields):
    config = dataclasses.replace(CONFIG, format=name)
    return jaxkv.init_contiguous(config, **{"batch": B, "capacity": 32, **fields})


def rows(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def step(cache, q, kv, new_tokens):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=T)
    outputs = []
    for layer in range(2):
        cache = jaxkv.write(cache, layer, kv[0], kv[1], plan)
        outputs.append(jaxkv.attend(cache, layer, q, plan))
    return cache, jnp.stack(outputs), plan


def append(cache, n, seed=0):
    return step(cache, rows((B, T, 4, 32), seed), rows((2, B, T, 2, 32), seed + 1), jnp.asarray(n))


def test_shape_bytes_and_view():
    cache = make("turbo4", capacity=33)
    assert cache.capacity == 48
    assert cache.layers[0].k.data[0].shape == (B, 2, 48, 4)
    view = cache.layer(1)
    assert (view.block_size, view.capacity, view.head_dim, view.num_kv_heads) == (0, 48, 32, 2)
    assert jaxkv.init(CONFIG).layer(0).block_size == 16
    assert cache.nbytes == 2 * 2 * B * 2 * 48 * 32 * 4.5 / 8


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_grow_keeps_everything_and_at_least_doubles(name):
    cache, _, _ = append(make(name), [5, 3])
    grown = jaxkv.grow(cache, 33)
    assert grown.capacity == 64 and isinstance(grown, jaxkv.ContiguousCache)
    assert jaxkv.grow(grown, 64) is grown
    assert jaxkv.grow(grown, 300).capacity == 304
    for old, new in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(grown.layers)):
        axis = 2 if new.ndim == 4 and new.shape[2] == 64 else -1
        chex.assert_trees_all_equal(jnp.take(new, jnp.arange(32), axis=axis), old)
    want, out, _ = append(cache, [1, 4], seed=3)
    got, grown_out, _ = append(grown, [1, 4], seed=3)
    chex.assert_trees_all_close(grown_out, out, atol=1e-6)
    chex.assert_trees_all_equal(got.lengths, want.lengths)


@pytest.mark.slow
def test_overflow_is_refused_and_counted_and_grow_helps():
    cache = make()
    for _ in range(6):
        cache, _, plan = append(cache, [5, 0])
    assert plan.granted.all() and cache.lengths.tolist() == [30, 0]
    before = jax.tree.map(jnp.copy, cache.layers)
    cache, out, plan = append(cache, [3, 0])
    assert plan.refusal.tolist() == [2, 0] and int(cache.faults.full) == 1
    assert cache.lengths.tolist() == [30, 0] and not out.any()
    chex.assert_trees_all_equal(cache.layers, before)
    cache, _, plan = append(jaxkv.grow(cache, 33), [3, 0])
    assert plan.granted.all() and cache.lengths.tolist() == [33, 0]


@pytest.mark.parametrize(("batch", "capacity"), [(0, 16), (1, 0), (1, -3)])
def test_bad_sizes(batch, capacity):
    with pytest.raises(ValueError, match="expected at least 1"):
        jaxkv.init_contiguous(CONFIG, batch=batch, capacity=capacity)


def test_grow_refuses_what_cannot_grow():
    with pytest.raises(TypeError, match="expected a ContiguousCache"):
        jaxkv.grow(jaxkv.init(CONFIG), 64)
    with pytest.raises(ValueError, match="closed"):
        jaxkv.grow(jaxkv.close(make()), 64)
