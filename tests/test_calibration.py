"""Calibration, and caches that store keys without their mean."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from marks import fast_only

import jaxkv
from jaxkv import attention
from jaxkv.qkv import rope_tables

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

S, T, QH, KH, D, DV, LAYERS = 2, 10, 4, 2, 32, 16, 2
LAST = LAYERS - 1
CONFIG = jaxkv.CacheConfig(
    num_layers=LAYERS,
    num_kv_heads=KH,
    head_dim=D,
    v_head_dim=DV,
    block_size=8,
    num_blocks=12,
    max_sequences=S,
    max_blocks_per_sequence=4,
    format="f16",
)
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0])},
    "soft cap": {"soft_cap": 3.0},
    "everything": {
        "sinks": jnp.asarray([0.5, -1.0, 2.0, 0.0]),
        "soft_cap": 2.0,
        "window": 5,
        "scale": 0.3,
    },
}


def sixteenths(*shape, seed=0):
    """Noise that f16 holds, and whose sums it holds."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(np.round(x * 16) / 16, jnp.float32)


def calibration_of(means, **changes):
    ones, zeros = jnp.ones(LAYERS), jnp.zeros(LAYERS, jnp.int32)
    calibration = jaxkv.Calibration(
        k_means=means,
        k_scales=0.02 * ones,
        v_scales=0.03 * ones,
        k_amax=ones,
        v_amax=ones,
        k_saturated=zeros,
        v_saturated=zeros,
        tokens=jnp.int32(100),
    )
    return dataclasses.replace(calibration, **changes)


# Large beside the noise, as the means of real keys are.
MEANS = tuple(3 * sixteenths(KH, D, seed=seed) for seed in (7, 8))


@functools.partial(jax.jit, static_argnames=("packed", "names"))
def step(cache, q, k, v, new_tokens, packed, names):
    how = {"total_tokens": S * T} if packed else {"max_new_tokens": T}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    for layer in range(LAYERS):
        cache = jaxkv.write(cache, layer, k[layer], v[layer], plan)
    outputs = {
        name: jaxkv.attend(cache, LAST, q, plan, return_lse=True, **OPTIONS[name]) for name in names
    }
    return cache, outputs, plan


def run(cache, packed=False, names=tuple(OPTIONS)):
    shape = (S * T,) if packed else (S, T)
    q = sixteenths(*shape, QH, D, seed=1)
    k = sixteenths(LAYERS, *shape, KH, D, seed=2)
    k = k + jnp.stack(MEANS).reshape(LAYERS, *[1] * len(shape), KH, D)
    v = sixteenths(LAYERS, *shape, KH, DV, seed=3)
    for new_tokens in ([T, 7], [3, 0]):
        cache, outputs, plan = step(cache, q, k, v, jnp.asarray(new_tokens), packed, names)
    return cache, outputs, plan, q


@pytest.mark.parametrize(
    ("packed", "names"),
    fast_only(
        [(False, ("sinks", "everything")), (False, ("plain", "soft cap")), (True, tuple(OPTIONS))],
        [(False, ("sinks", "everything"))],
    ),
)
def test_with_lossless_storage_centered_and_plain_attention_agree_to_rounding(packed, names):
    plain_cache, plain, _, _ = run(jaxkv.init(CONFIG), packed, names)
    cache = jaxkv.init(CONFIG, calibration=calibration_of(MEANS))
    cache, centered, _, _ = run(cache, packed, names)
    chex.assert_trees_all_close(centered, plain, atol=2e-5, rtol=2e-5)
    # Not because nothing was centered.
    for layer, mean in enumerate(MEANS):
        stored, whole = (
            np.asarray(c.layers[layer].k.data[0])[0].astype(np.float32)
            for c in (cache, plain_cache)
        )
        np.testing.assert_array_equal(stored, whole - np.asarray(mean)[:, None])


@pytest.mark.slow
def test_exact_tokens_beside_centered_keys_agree_to_rounding_too():
    _, plain, _, _ = run(jaxkv.init(CONFIG))
    # bf16 holds the centered keys without loss, and would not hold the others.
    exact = dataclasses.replace(CONFIG, exact_first=1, exact_recent=4, max_step_tokens=T)
    _, centered, _, _ = run(jaxkv.init(exact, calibration=calibration_of(MEANS)))
    chex.assert_trees_all_close(centered, plain, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "name", fast_only(["turbo4", "fp8", "int8", "nvfp4", "turbo2"], [], ["turbo4", "fp8"])
)
def test_centered_attention_is_that_over_the_stored_keys_plus_their_mean(name):
    config = dataclasses.replace(CONFIG, format=name)
    cache, outputs, plan, q = run(jaxkv.init(config, calibration=calibration_of(MEANS)))
    spec, pages = cache.config.layer(LAST), cache.layers[LAST]
    k, v = (
        oracle.stored_rows(pages.k, spec.k, cache.k_scales[LAST]),
        oracle.stored_rows(pages.v, spec.v, cache.v_scales[LAST]),
    )
    k = k + np.asarray(MEANS[LAST])[:, None]
    for label, options in OPTIONS.items():
        expected, expected_lse = oracle.attend(q, k, v, plan, **options)
        out, lse = outputs[label]
        live = np.asarray(plan.slots) >= 0
        np.testing.assert_allclose(np.asarray(out)[live], expected[live], atol=1e-4)
        np.testing.assert_allclose(np.asarray(lse)[live], expected_lse[live], atol=1e-3)
        assert (np.asarray(lse)[~live] == -np.inf).all()


@functools.partial(jax.jit, static_argnames="fused")
def write_one(cache, k, fused):
    cache, plan = jaxkv.reserve(cache, jnp.full(S, T), max_new_tokens=T)
    v = jnp.zeros((S, T, KH, DV))
    if not fused:
        return jaxkv.write(cache, 1, k, v, plan)
    rows = [x.reshape(S, T, -1) for x in (jnp.ones((S, T, QH, D)), k, v)]
    # Position 0 leaves every pair as it is.
    rope, zero = rope_tables(1, D, 1e4), jnp.zeros((S, T), jnp.int32)
    qkv = jnp.concatenate(rows, -1)
    return jaxkv.write_qkv(cache, 1, qkv, plan, num_q_heads=QH, rope=rope, positions=zero)[0]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_centered_key_is_stored_as_the_key_without_its_mean(fused):
    config = dataclasses.replace(CONFIG, format="int8")
    k = sixteenths(S, T, KH, D, seed=5)
    plain = write_one(jaxkv.init(config), k, False)
    centered = write_one(jaxkv.init(config, calibration=calibration_of(MEANS)), k + MEANS[1], fused)
    chex.assert_trees_all_equal(centered.layers, plain.layers)


def test_centered_keys_cost_nothing_at_read_time_and_plain_ones_nothing_at_all():
    plain, centered = jaxkv.init(CONFIG), jaxkv.init(CONFIG, calibration=calibration_of(MEANS))
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(centered)) - LAYERS
    q = jnp.ones((S, 1, QH, D))

    def products(cache, **options):
        def read(cache):
            cache, plan = jaxkv.reserve(cache, jnp.ones(S, jnp.int32))
            return jaxkv.attend(cache, 0, q, plan, window=5, **options)

        return str(jax.make_jaxpr(read)(cache)).count("dot_general")

    assert products(plain) == products(centered) == products(plain, return_lse=True)
    assert products(centered, return_lse=True) == products(plain) + 1


def test_a_gpu_kernel_refuses_a_soft_cap_over_centered_keys_by_name():
    def read(cache, q):
        cache, plan = jaxkv.reserve(cache, jnp.ones(S, jnp.int32))
        spec, pages = CONFIG.layer(0), cache.layers[0]
        return attention.attend_pages(
            q,
            pages.k,
            pages.v,
            plan,
            k_spec=spec.k,
            v_spec=spec.v,
            k_mean=cache.k_means[0],
            soft_cap=5.0,
            implementation="pallas_gpu",
        )

    cache = jaxkv.init(CONFIG, calibration=calibration_of(MEANS))
    with pytest.raises(NotImplementedError, match="soft_cap: 'pallas_gpu' cannot cap"):
        jax.eval_shape(read, cache, jnp.ones((S, 1, QH, D)))


def test_init_takes_scales_from_a_calibration_unless_given():
    calibration = calibration_of(None)
    cache = jaxkv.init(CONFIG, calibration=calibration)
    assert cache.k_means is None
    np.testing.assert_array_equal(cache.k_scales, calibration.k_scales)
    np.testing.assert_array_equal(cache.v_scales, calibration.v_scales)
    given = jaxkv.init(CONFIG, k_scales=0.5, calibration=calibration)
    assert given.k_scales.tolist() == [0.5, 0.5]
    twin = jaxkv.init_contiguous(CONFIG, capacity=16, calibration=calibration_of(MEANS))
    chex.assert_trees_all_equal(twin.k_means, MEANS)
    # A donated cache must not take the calibration with it.
    jaxkv.close(jaxkv.init(CONFIG, calibration=calibration_of(MEANS)))
    assert not MEANS[0].is_deleted()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "made for 2 layers, the config has 3"),
        ({"head_dim": 64}, r"key mean of layer 0 is \[2, 32\], the config has \[2, 64\]"),
        ({"layer_dims": ((2, 32), (4, 32))}, r"key mean of layer 1 .* has \[4, 32\]"),
    ],
)
def test_a_calibration_of_another_geometry_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.init(dataclasses.replace(CONFIG, **changes), calibration=calibration_of(MEANS))


def lookup(tables, tokens, cache, plan):
    """A model whose keys and values are rows of tables [layers, vocabulary, heads, dim]."""
    k, v = tables
    for layer in range(LAYERS):
        cache = jaxkv.write(cache, layer, k[layer, tokens], v[layer, tokens], plan)
    return jnp.zeros((*tokens.shape, 4)), cache


TABLES = (sixteenths(LAYERS, 11, KH, D, seed=20) + 2, sixteenths(LAYERS, 11, KH, DV, seed=21))
MODEL = jax.tree_util.Partial(lookup, TABLES)
BATCHES = [[[1, 2, 3], [4, 5, 6, 7, 8]], np.array([[9, 10], [2, 2]]), [3, 3, 3]]
SEEN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2, 2, 3, 3, 3]


def test_calibrate_finds_means_and_magnitudes_of_what_is_written():
    calls = []
    found = jaxkv.calibrate(MODEL, CONFIG, BATCHES, headroom=4.0, on_progress=calls.append)
    assert calls == [8, 12, 15] and int(found.tokens) == 15
    for layer in range(LAYERS):
        k, v = (np.asarray(table[layer])[SEEN] for table in TABLES)
        np.testing.assert_allclose(found.k_means[layer], k.mean(0), atol=1e-6)
        k_amax = np.abs(k - k.mean(0)).max()
        np.testing.assert_allclose(found.k_amax[layer], k_amax, rtol=1e-6)
        np.testing.assert_allclose(found.v_amax[layer], np.abs(v).max())
        np.testing.assert_allclose(found.k_scales[layer], k_amax * 4 / 448, rtol=1e-6)
        np.testing.assert_allclose(found.v_scales[layer], np.abs(v).max() * 4 / 448, rtol=1e-6)
    assert not found.k_saturated.any() and not found.v_saturated.any()
    assert "15 tokens, keys centered, headroom 4" in repr(found)


def test_calibrate_counts_what_earlier_batches_did_not_foresee():
    k, v = (np.array(table) for table in TABLES)
    v[0, 9], v[0, 10, 0, 0] = 40, -50
    model = jax.tree_util.Partial(lookup, (jnp.asarray(k), jnp.asarray(v)))
    found = jaxkv.calibrate(model, CONFIG, BATCHES, center_keys=False)
    assert found.k_means is None
    assert found.k_amax[0] == np.abs(k[0][SEEN]).max()
    assert found.v_saturated.tolist() == [KH * DV + 1, 0]
    assert found.v_amax[0] == 50


def test_a_calibration_saves_and_loads(tmp_path):
    for name, means in (("with.npz", MEANS), ("without.npz", None)):
        calibration = calibration_of(means, headroom=1.5)
        calibration.save(tmp_path / name)
        loaded = jaxkv.Calibration.load(tmp_path / name)
        chex.assert_trees_all_equal(loaded, calibration)
        assert loaded.headroom == 1.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["with.npz", "without.npz"]
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="not a file that Calibration"):
        jaxkv.Calibration.load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "got no tokens"),
        ([[[]]], {}, "got no tokens"),
        ([[[1, -1]]], {}, "not negative, got -1"),
        ([[[0.5, 1.0]]], {}, "expected ints"),
        ([[1]], {"headroom": 0.0}, "headroom: got 0.0"),
    ],
)
def test_what_cannot_calibrate_is_refused(batches, options, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.calibrate(MODEL, CONFIG, batches, **options)


def test_a_model_that_makes_nan_cannot_calibrate():
    model = jax.tree_util.Partial(lookup, (TABLES[0].at[1, 3].set(jnp.nan), TABLES[1]))
    with pytest.raises(jaxkv.CacheError, match="non-finite"):
        jaxkv.calibrate(model, CONFIG, BATCHES)
