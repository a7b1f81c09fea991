"""Rotary embeddings and RMSNorm as pure functions."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.qkv import (
    RopeScaling,
    apply_rope,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rope_tables,
)


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_a_quarter_turn_moves_one_half_into_the_other():
    cos, sin = jnp.zeros((1, 2)), jnp.ones((1, 2))
    x = jnp.asarray([[[1.0, 2.0, 3.0, 4.0]]])
    at = jnp.zeros(1, jnp.int32)
    np.testing.assert_array_equal(apply_rope(x, at, cos, sin, "half")[0, 0], [-3, -4, 1, 2])
    np.testing.assert_array_equal(apply_rope(x, at, cos, sin, "interleaved")[0, 0], [-2, 1, -4, 3])
    np.testing.assert_array_equal(apply_rope(x, at, cos, sin, "none"), x)


def test_styles_are_one_rotation_under_a_permutation_of_dims():
    x, positions = random((5, 2, 16)), jnp.arange(5)
    cos, sin = rope_tables(8, 16, 1e4)
    neighbours = x.reshape(5, 2, 2, 8).swapaxes(2, 3).reshape(x.shape)
    expected = apply_rope(x, positions, cos, sin, "half")
    got = apply_rope(neighbours, positions, cos, sin, "interleaved")
    got = got.reshape(5, 2, 8, 2).swapaxes(2, 3).reshape(x.shape)
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_scores_depend_on_distance_alone(style):
    q, k = random((1, 1, 32), 1), random((1, 1, 32), 2)
    cos, sin = rope_tables(64, 32, 1e4)
    scores = [
        jnp.vdot(
            apply_rope(q, jnp.asarray([p + 5]), cos, sin, style),
            apply_rope(k, jnp.asarray([p]), cos, sin, style),
        )
        for p in (0, 7, 50)
    ]
    np.testing.assert_allclose(scores, [scores[0]] * 3, rtol=1e-4)


def test_dims_beyond_rotary_dim_are_untouched():
    x = random((3, 2, 24))
    cos, sin = rope_tables(4, 8, 1e4)
    out = apply_rope(x, jnp.asarray([1, 2, 3]), cos, sin)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])
    assert not np.allclose(out[..., :8], x[..., :8])
    with pytest.raises(ValueError, match="rotary_dim 8 exceeds head_dim 6"):
        apply_rope(x[..., :6], jnp.asarray([1, 2, 3]), cos, sin)


def test_a_position_past_the_tables_is_nan_not_a_wrong_angle():
    cos, sin = rope_tables(4, 8, 1e4)
    out = apply_rope(jnp.ones((3, 1, 8)), jnp.asarray([3, 4, -1]), cos, sin)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), [False, True, True])
    assert np.isfinite(out[0]).all()


def test_tables_are_the_angles_of_all_positions():
    cos, sin = rope_tables(6, 8, 1e4)
    at_cos, at_sin = rope_angles(jnp.asarray([[2, 5]]), 8, 1e4)
    np.testing.assert_array_equal(cos[jnp.asarray([[2, 5]])], at_cos)
    np.testing.assert_array_equal(sin[jnp.asarray([[2, 5]])], at_sin)
    exact = np.cos(np.arange(6)[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(cos, exact, atol=1e-6)


def test_linear_scaling_divides_every_frequency():
    plain = rope_frequencies(16, 1e4)
    np.testing.assert_allclose(rope_frequencies(16, 1e4, RopeScaling(4.0)), plain / 4, rtol=1e-6)


def test_llama_scaling_keeps_fast_and_stretches_slow_frequencies():
    scaling = RopeScaling(8.0, 1.0, 4.0, original_max_positions=8192)
    plain = np.asarray(rope_frequencies(128, 5e5))
    ratio = plain / np.asarray(rope_frequencies(128, 5e5, scaling))
    wavelengths = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelengths < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelengths > 8192], 8, rtol=1e-6)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any() and np.all((ratio[between] > 1) & (ratio[between] < 8))


def test_bad_rope_geometry_is_refused():
    with pytest.raises(ValueError, match="even, got 7"):
        rope_frequencies(7, 1e4)
    with pytest.raises(ValueError, match="3 divisors for 4 frequencies"):
        rope_frequencies(8, 1e4, RopeScaling(divisors=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="factor must be positive"):
        RopeScaling(factor=0.0)
    with pytest.raises(ValueError, match="must exceed"):
        RopeScaling(2.0, 4.0, 1.0, original_max_positions=64)
    with pytest.raises(ValueError, match="one of none, half, interleaved, got 'both'"):
        apply_rope(jnp.ones((1, 1, 8)), jnp.zeros(1, jnp.int32), *rope_tables(1, 8, 1e4), "both")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_works_in_f32_and_keeps_the_dtype(dtype):
    x = (100 * random((4, 32))).astype(dtype)
    weight = 1 + random((32,), 1)
    out = rms_norm(x, weight, 1e-5)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), exact, rtol=1e-5 if dtype == jnp.float32 else 1e-2, atol=1e-6
    )
