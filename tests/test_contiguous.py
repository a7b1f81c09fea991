"""What only a contiguous cache does; the shared verbs are in test_layer_interface.py."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only
from stores import with_noise

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


@pytest.mark.parametrize("name", fast_only(FORMATS, [], ["turbo4"]))
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


def test_kept_first_tokens_belong_to_a_window():
    config = dataclasses.replace(CONFIG, window=32, keep_first=4)
    with pytest.raises(ValueError, match="keep_first = 4, expected 0"):
        jaxkv.init_contiguous(config, batch=1, capacity=16)


def test_grow_refuses_what_cannot_grow():
    with pytest.raises(TypeError, match="expected a ContiguousCache"):
        jaxkv.grow(jaxkv.init(CONFIG), 64)
    with pytest.raises(ValueError, match="closed"):
        jaxkv.grow(jaxkv.close(make()), 64)


def bits(cache):
    """The leaves of layer 0 as unsigned integers, where no NaN differs from itself."""
    leaves = map(np.asarray, jax.tree.leaves(cache.layers[0]))
    return [leaf.view(f"u{leaf.itemsize}") for leaf in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turbo4", "int8", "turbo8"])
def test_a_long_sequence_is_copied_whole_in_parts(name):
    cache = make(name, batch=3, capacity=1040)
    cache, _ = jaxkv.reserve(cache, jnp.asarray([1030, 0, 0]), max_new_tokens=1030)
    cache = with_noise(cache)
    before = bits(cache)
    cache = jaxkv.fork(cache, jnp.asarray([0]), jnp.asarray([1]))
    cache, plan = jaxkv.reserve(cache, jnp.asarray([0, 1, 0]))
    assert int(plan.num_copies) == 1
    kv = rows((2, 3, 1, 2, 32))
    cache = jax.jit(jaxkv.write, static_argnums=1)(cache, 0, kv[0], kv[1], plan)
    shared, own = cache.block_tables[:2, 0].tolist()
    kept = np.arange(1040) != 1030
    for old, new in zip(before, bits(cache)):
        axis = next(i for i, size in enumerate(old.shape) if size == 1040) - 1
        np.testing.assert_array_equal(new[shared], old[shared])
        copied, source = (np.compress(kept, x, axis) for x in (new[own], old[shared]))
        np.testing.assert_array_equal(copied, source)
        written = np.take(new[own], 1030, axis)
        assert (written != np.take(old[shared], 1030, axis)).any()
    third = ({0, 1, 2} - {shared, own}).pop()
    for old, new in zip(before, bits(cache)):
        np.testing.assert_array_equal(new[third], old[third])


@pytest.mark.as_shipped
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_temporary_memory_does_not_grow_with_the_capacity(kind):
    def temporary_bytes(capacity):
        if kind == "paged":
            columns = capacity // 16
            config = dataclasses.replace(
                CONFIG, max_sequences=B, num_blocks=B * columns, max_blocks_per_sequence=columns
            )
            cache = jax.eval_shape(lambda: jaxkv.init(config))
        else:
            cache = jax.eval_shape(lambda: make(capacity=capacity))
        q, kv = (jnp.zeros(shape) for shape in ((B, T, 4, 32), (2, B, T, 2, 32)))
        donated = jax.jit(step.__wrapped__, donate_argnums=0)
        compiled = donated.lower(cache, q, kv, jnp.asarray([5, 3])).compile()
        # A row of the block table for each sequence is part of the plan.
        return compiled.memory_analysis().temp_size_in_bytes - 4 * B * capacity // 16

    assert temporary_bytes(32768) <= temporary_bytes(4096) + 4096
