"""Decoded chunks against the codecs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_only, full_except

from jaxkv._xla import chunks
from jaxkv.codecs import decode_pages, encode_rows, init_pages, scatter_rows
from jaxkv.formats import FORMATS, SideSpec

BLOCK_SIZE, NUM_BLOCKS, HEADS = 8, 5, 3
ORDER = np.array([4, 0, 3, 1])


@functools.partial(jax.jit, static_argnames="spec")
def filled_pages(rows, spec):
    slot = jnp.arange(rows.shape[0])
    encoded, _ = encode_rows(rows, spec)
    pages = init_pages(NUM_BLOCKS, HEADS, BLOCK_SIZE, spec)
    return scatter_rows(pages, encoded, slot // BLOCK_SIZE, slot % BLOCK_SIZE)


@functools.partial(jax.jit, static_argnames="spec")
def both_readings(pages, spec):
    """A chunk decoded for keys and for values, and the codec's rows of the same tokens."""
    chunk = chunks.read_blocks(pages, jnp.asarray(ORDER))
    decoded = [chunks.decode(chunk, spec, shield=shield) for shield in (False, True)]
    scaled = [
        d.values.astype(jnp.float32)
        * (1 if d.token_scale is None else d.token_scale[..., None])
        * chunks.factor(spec)
        for d in decoded
    ]
    expected = decode_pages(pages, spec)[ORDER].swapaxes(0, 1)
    bad = decoded[1].bad
    assert decoded[0].values.dtype == chunks.value_dtype(spec)
    return *scaled, bad, expected.reshape(HEADS, -1, spec.head_dim)


def check(name, head_dim, encoding="searched"):
    spec = SideSpec(FORMATS[name], head_dim, encoding)
    rng = np.random.default_rng(head_dim)
    shape = (NUM_BLOCKS * BLOCK_SIZE, HEADS, head_dim)
    rows = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 6, (*shape[:2], 1)))
    rows[26, 1, 3] = np.nan
    rows[27] = 0
    plain, shielded, bad, expected = map(
        np.asarray, both_readings(filled_pages(rows.astype(np.float32), spec), spec)
    )
    np.testing.assert_allclose(plain, expected, rtol=2e-7)
    is_nan = np.isnan(expected).any(-1)
    assert is_nan.sum() == 1
    if bad.dtype == object:  # NaN stays in the values of formats without scales
        np.testing.assert_allclose(shielded, expected, rtol=2e-7)
    else:
        np.testing.assert_array_equal(bad, is_nan)
        np.testing.assert_allclose(shielded[~is_nan], expected[~is_nan], rtol=2e-7)
        assert np.isfinite(shielded).all()


@pytest.mark.parametrize("name", fast_only(FORMATS, ["int8", "turbo4", "turbo3"]))
def test_a_chunk_decodes_as_the_codec_does(name):
    check(name, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dim", full_except([16, 32, 48, 80, 96, 112, 128, 192, 256, 512], [16, 48, 112, 128, 256])
)
@pytest.mark.parametrize("name", full_except(["nvfp4", "turbo4", "turbo3", "turbo2"], ["turbo3"]))
def test_every_head_dim(name, head_dim):
    check(name, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turbo4", "turbo3", "turbo2", "nvfp4"])
def test_reference_encoding(name):
    check(name, 64, "reference")


def test_two_bf16_terms_hold_sixteen_bits():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    terms = np.asarray(chunks.split_bf16(jnp.asarray(x), 2).astype(jnp.float32))
    np.testing.assert_allclose(terms[:4] + terms[4:], x, rtol=2.0**-16)
    np.testing.assert_allclose(chunks.split_bf16(jnp.asarray(x), 1), x, rtol=2.0**-8)


def test_a_nan_survives_the_split():
    x = jnp.asarray(np.array([[0x7FC00000, 0x7FFFFFFF, 0xFFC00001]], np.uint32).view(np.float32))
    terms = np.asarray(chunks.split_bf16(x, 2).astype(jnp.float32))
    assert np.isnan(terms).any(0).all()
