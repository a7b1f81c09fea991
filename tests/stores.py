"""Stores of either kind, pages of random bytes, and what must hold when pages have moved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv


class Killed(BaseException):
    """Ends the process, as far as the code under test can tell: no handler cleans up."""


@pytest.fixture(params=["memory", "disk"])
def either_store(request, tmp_path):
    """A store in host memory, and one on disk. A module names it: `store = either_store`."""
    store = jaxkv.BlockStore(None if request.param == "memory" else tmp_path / "kv")
    yield store
    store.close()


def with_noise(cache, seed=0):
    """The cache with pages of random bytes: NaN, infinities and all."""
    rng = np.random.default_rng(seed)

    def noise(leaf):
        raw = rng.integers(0, 256, leaf.nbytes, np.uint8)
        return jnp.asarray(raw.view(leaf.dtype).reshape(leaf.shape))

    return dataclasses.replace(cache, layers=jax.tree.map(noise, cache.layers))


def contents(cache, slot, first=0):
    """Raw bytes of a sequence from a column on, in all layers."""
    used = -(-int(cache.lengths[slot]) // cache.config.block_size)
    ids = np.asarray(cache.block_tables[slot, first:used])
    assert (ids >= 0).all()
    return [
        np.asarray(leaf)[ids].tobytes() for leaf in jax.tree.leaves(jax.device_get(cache.layers))
    ]


def raw(tree):
    """Bytes of all leaves: NaN equals itself."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_no_leak(cache, extra=()):
    """Every block is counted once for each holder; the others are free."""
    tables = np.asarray(cache.block_tables)
    held = np.concatenate([tables[tables >= 0], np.asarray(extra, np.int32)])
    counts = np.bincount(held, minlength=cache.config.num_blocks)
    np.testing.assert_array_equal(np.asarray(cache.pool.counts), counts)
    free = np.asarray(cache.pool.free_blocks)[: int(cache.num_free_blocks)]
    assert sorted(free.tolist()) == np.flatnonzero(counts == 0).tolist()
