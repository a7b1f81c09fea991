"""Online calibration: pages end up as if the scales had been known from the start."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from marks import full_except

import jaxkv

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

S, T, N = 3, 6, 10
HEADS, DIM, V_DIM = 2, 32, 16
WINDOW, HEADROOM = 24, 1.5
FP8_MAX = 448.0


def config_of(name="fp8", *, calibrated=True, **fields):
    online = jaxkv.OnlineCalibration(window=WINDOW, headroom=HEADROOM) if calibrated else None
    return jaxkv.CacheConfig(
        **{
            **dict(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM),
            **dict(block_size=8, num_blocks=24, max_sequences=S, max_blocks_per_sequence=6),
            **dict(format=name, online_calibration=online),
            **fields,
        }
    )


@functools.partial(jax.jit, static_argnames="packed")
def append(cache, k, v, new_tokens, packed):
    how = {"total_tokens": N} if packed else {"max_new_tokens": T}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    for layer in range(cache.config.num_layers):
        # Layers differ, and so must their scales.
        cache = jaxkv.write(cache, layer, k * (layer + 1), v * (layer + 1), plan)
    return cache, plan


class Run:
    """A story told to a cache; the same tokens for every cache it is told to."""

    def __init__(self, cache):
        self.cache = cache
        self.rng = np.random.default_rng(2)
        self.seen = []

    def step(self, new_tokens, packed=False):
        lead = (N,) if packed else (S, T)
        k = self.rng.standard_normal((*lead, HEADS, DIM), np.float32) * 7
        v = self.rng.standard_normal((*lead, HEADS, V_DIM), np.float32) * 0.01
        self.cache, plan = append(self.cache, k, v, jnp.asarray(new_tokens), packed)
        stored = np.asarray(plan.slots).reshape(-1) >= 0
        self.seen += zip(k.reshape(-1, HEADS, DIM)[stored], v.reshape(-1, HEADS, V_DIM)[stored])
        return plan

    def count(self):
        return int(self.cache.staging.count)


def until_frozen(run, packed):
    """Everything that can happen to staged tokens before the window is full."""
    run.step([6, 1, 0])
    run.cache = jaxkv.fork(run.cache, jnp.array([0]), jnp.array([2]))
    run.step([1, 0, 1])
    run.cache = jaxkv.trim(run.cache, jnp.array([3, -1, -1]))
    # Slot 2 copies a block of which slot 0 holds the beginning only.
    run.cache = jaxkv.fork(run.cache, jnp.array([2]), jnp.array([1]))
    run.cache = jaxkv.reorder(run.cache, jnp.array([0, 2, 1]))
    run.step([0, 2, 0])
    run.cache = jaxkv.release(run.cache, jnp.array([True, False, False]))
    run.step([5, 1, 2], packed)
    run.cache = jaxkv.fork(run.cache, jnp.array([1]), jnp.array([2]))


def scales_of(seen, num_layers):
    largest = [max(np.abs(x).max() for x in side) for side in zip(*seen[:WINDOW])]
    layers = np.arange(1, num_layers + 1, dtype=np.float32)
    return [np.float32(a) * layers * np.float32(HEADROOM / FP8_MAX) for a in largest]


def stored(cache, slot, layer):
    spec, pages = cache.config.layer(layer), cache.layers[layer]
    length, size = int(cache.lengths[slot]), cache.config.block_size
    position = np.arange(length)
    where = np.asarray(cache.block_tables)[slot, position // size], slice(None), position % size
    scales = cache.k_scales[layer], cache.v_scales[layer]
    sides = zip((pages.k, pages.v), (spec.k, spec.v), scales)
    return [oracle.stored_rows(*side)[where] for side in sides]


def assert_as_if_known(run, story):
    """Each sequence holds what a cache would that had these scales all along."""
    k_scales, v_scales = scales_of(run.seen, run.cache.config.num_layers)
    np.testing.assert_allclose(run.cache.k_scales, k_scales, rtol=1e-6)
    np.testing.assert_allclose(run.cache.v_scales, v_scales, rtol=1e-6)
    config = run.cache.config
    known = jaxkv.init(config, k_scales=run.cache.k_scales, v_scales=run.cache.v_scales)
    frozen = dataclasses.replace(known.staging, count=run.cache.staging.count)
    other = Run(dataclasses.replace(known, staging=frozen))
    story(other)
    assert other.cache.lengths.tolist() == run.cache.lengths.tolist()
    for slot in range(S):
        for layer in range(config.num_layers):
            for got, want in zip(stored(run.cache, slot, layer), stored(other.cache, slot, layer)):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("packed, num_layers", full_except([(False, 1), (True, 2)], [(False, 1)]))
def test_the_step_that_fills_the_window_makes_everything_right(packed, num_layers):
    def story(run):
        until_frozen(run, packed)
        run.step([2, 6, 3])
        run.step([1, 0, 1])

    config = config_of(num_layers=num_layers)
    run = Run(jaxkv.init(config, k_scales=0.01, v_scales=100.0))
    until_frozen(run, packed)
    assert run.count() == 19
    assert run.cache.k_scales.tolist() == [np.float32(0.01)] * num_layers
    # Stored under the provisional scale, keys beyond 4.48 were clipped, and that was counted.
    saturated = int(run.cache.faults.saturated)
    assert saturated > 0
    plan = run.step([2, 6, 3])
    assert plan.granted.all() and int(plan.num_copies) > 0 and run.count() == WINDOW
    run.step([1, 0, 1])
    assert_as_if_known(run, story)
    # Nothing that fits the frozen scales is counted.
    assert int(run.cache.faults.saturated) == saturated


def test_scales_stay_once_frozen_and_what_outgrows_them_is_counted():
    run = Run(jaxkv.init(config_of()))
    for _ in range(4):
        run.step([2, 2, 2])
    frozen = run.cache.k_scales
    assert run.count() == WINDOW and int(run.cache.faults.saturated) == 0
    k = np.full((S, T, HEADS, DIM), 2000.0, np.float32)
    v = np.zeros((S, T, HEADS, V_DIM), np.float32)
    cache, _ = append(run.cache, k, v, jnp.array([1, 0, 0]), False)
    np.testing.assert_array_equal(cache.k_scales, frozen)
    assert int(cache.faults.saturated) == HEADS * DIM


@pytest.mark.slow
def test_a_side_that_is_not_fp8_is_left_alone():
    online = jaxkv.OnlineCalibration(4, HEADROOM)
    run = Run(jaxkv.init(config_of("fp8k_turbo4v", online_calibration=online)))
    # One step larger than the window freezes at once.
    run.step([6, 6, 6])
    largest = max(np.abs(k).max() for k, _ in run.seen[:4])
    np.testing.assert_allclose(run.cache.k_scales[0], largest * HEADROOM / FP8_MAX, rtol=1e-6)
    assert run.cache.v_scales.tolist() == [1.0] and run.cache.staging.layers[0].v is None


def test_a_short_first_request_does_not_freeze():
    run = Run(jaxkv.init(config_of()))
    run.step([3, 0, 0])
    run.cache = jaxkv.release(run.cache, jnp.array([True, False, False]))
    assert run.count() == 3 and run.cache.k_scales.tolist() == [1.0]
    for _ in range(4):
        run.step([0, 6, 0])
    assert run.count() == WINDOW and run.cache.k_scales[0] < 1


def test_zeros_and_nan_leave_a_usable_scale():
    cache = jaxkv.init(config_of(), k_scales=0.5)
    k = np.zeros((S, T, HEADS, DIM), np.float32)
    v = np.full((S, T, HEADS, V_DIM), np.nan, np.float32)
    v[0, 0, 0, 0] = 2.0
    for _ in range(2):
        cache, _ = append(cache, k, v, jnp.array([6, 6, 0]), False)
    assert cache.k_scales.tolist() == [0.5]
    np.testing.assert_allclose(cache.v_scales, [2 * HEADROOM / FP8_MAX], rtol=1e-6)


def test_blocks_cannot_leave_before_the_scales_are_frozen(tmp_path):
    run = Run(jaxkv.init(config_of()))
    run.step([6, 6, 0])
    run.step([3, 0, 0])
    prefix, prompt = jaxkv.PrefixCache(run.cache.config), list(range(16))
    refused = {
        "PrefixCache.insert": lambda: prefix.insert(run.cache, 0, prompt),
        "export_block": lambda: jaxkv.export_block(run.cache, 0, 0),
        "import_block": lambda: jaxkv.import_block(run.cache, 0, 0, b"", b""),
        "save": lambda: jaxkv.save(tmp_path / "kv", run.cache),
        "swap_out": lambda: jaxkv.swap_out(run.cache, 0, jaxkv.BlockStore()),
        "swap_in": lambda: jaxkv.swap_in(run.cache, 2, jaxkv.BlockStore()),
        "offload": lambda: jaxkv.offload(run.cache, jaxkv.BlockStore()),
    }
    for name, call in refused.items():
        with pytest.raises(jaxkv.CacheError, match=f"{name}: online calibration has seen 15 of 24"):
            call()
    run.step([6, 6, 0])
    jaxkv.save(tmp_path / "sequence", run.cache, slot=0)
    fresh = jaxkv.init(run.cache.config)
    with pytest.raises(jaxkv.CacheError, match="load: online calibration has seen 0 of 24"):
        jaxkv.load(tmp_path / "sequence", fresh.config, cache=fresh, slot=2)
    with pytest.raises(jaxkv.CacheError, match="Scheduler: online calibration has seen 0 of 24"):
        jaxkv.Scheduler(None, fresh, chunk=fresh.config.block_size)
    run.cache = prefix.insert(run.cache, 0, prompt)
    assert len(prefix) == 1
    assert len(jaxkv.export_block(run.cache, 0, 0)[0]) == 8 * HEADS * DIM


def test_config_checks_and_travels():
    config = config_of()
    assert jaxkv.CacheConfig.from_json(config.to_json()) == config
    assert jaxkv.OnlineCalibration() == jaxkv.OnlineCalibration(window=256, headroom=2.0)
    staged = WINDOW * HEADS * (DIM + V_DIM) * 4
    plain = jaxkv.init(config_of(calibrated=False))
    assert jaxkv.init(config).nbytes == plain.nbytes + staged and plain.staging is None
    with pytest.raises(ValueError, match="no scale to set, only fp8"):
        config_of("int8")
    with pytest.raises(TypeError, match="expected an OnlineCalibration"):
        config_of(online_calibration=256)
    with pytest.raises(ValueError, match=r"headroom: got 0\.5"):
        jaxkv.OnlineCalibration(headroom=0.5)
    with pytest.raises(ValueError, match="window: got 0"):
        jaxkv.OnlineCalibration(window=0)
