"""The lane programs, register for register, against their array twins and the codecs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import NumpyLanes, gather_rows, shared_plane
from marks import fast_only
from paged_cases import random_pages, side

from jaxkv.codecs import decode_pages
from jaxkv.formats import FORMATS
from pallas_kernels import dequantize, register_order, twin
from pallas_kernels.sides import Side

DECODED = [name for name, f in FORMATS.items() if f.bits < 16]
HEAD_DIMS = [
    64,
    pytest.param(128, marks=[pytest.mark.slow, pytest.mark.full]),
    pytest.param(256, marks=[pytest.mark.slow, pytest.mark.full]),
]
FAST = [("fp8", "searched"), ("turbo4", "searched"), ("turbo3", "reference")]
ENCODED = fast_only(
    [
        (name, encoding)
        for name in DECODED
        for encoding in ("searched", "reference")
        if encoding == "searched" or FORMATS[name].is_codebook
    ],
    FAST,
)


def tile_of(spec, block_size, seed=0):
    """(planes [64, words], scales [rows, 64], decoded f32 [64, D] in natural order)."""
    one = Side(spec, block_size)
    pages = random_pages(
        np.random.default_rng(seed), spec, one.pages_per_tile, 1, one.page_tokens, None
    )
    planes = tuple(np.asarray(p).reshape(64, -1) for p in pages.data)
    scales = None
    if pages.scales is not None:
        rows = np.asarray(pages.scales).reshape(one.pages_per_tile, -1, one.page_tokens)
        scales = rows.swapaxes(0, 1).reshape(rows.shape[1], 64)
    return planes, scales, np.asarray(decode_pages(pages, spec)).reshape(64, -1)


def shared_scales(one, scales):
    """The bytes of a tile's scales in shared memory; what padding holds is noise."""
    if scales is None:
        return None
    where = one.scale_tile
    by_page = scales.reshape(len(scales), one.pages_per_tile, one.page_tokens).swapaxes(0, 1)
    padded = np.full((one.pages_per_tile, where.rows, one.page_tokens), 7, scales.dtype)
    padded[:, : len(scales)] = by_page
    return padded.reshape(-1).view(np.uint8)


def run_lanes(spec, block_size, planes, scales, bounds=None, has_e4m3=True):
    one, lanes = Side(spec, block_size), NumpyLanes(has_e4m3)
    buffers = tuple(shared_plane(p, bool(plane.transforms)) for p, plane in zip(planes, one.planes))
    limits = None if bounds is None else tuple(lanes.const(b & 0xFFFFFFFF) for b in bounds)
    rows = dequantize.decode_tile(
        lanes, spec, one.scale_tile, buffers, shared_scales(one, scales), limits
    )
    return gather_rows(rows, spec.head_dim, np.dtype(one.dtype))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "encoding"), ENCODED)
def test_lanes_compute_what_the_twin_computes(name, encoding, head_dim):
    spec = side(name, head_dim, encoding)
    planes, scales, _ = tile_of(spec, 16)
    got = run_lanes(spec, 16, planes, scales)
    args = (tuple(map(jnp.asarray, planes)), None if scales is None else jnp.asarray(scales))
    expected = jax.jit(lambda *a: twin.decode_tile(spec, *a, None))(*args)
    np.testing.assert_array_equal(got.view(np.uint16), np.asarray(expected).view(np.uint16))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "encoding"), ENCODED)
def test_lanes_decode_what_the_codec_decodes(name, encoding, head_dim):
    spec = side(name, head_dim, encoding)
    planes, scales, expected = tile_of(spec, 64)
    got = run_lanes(spec, 64, planes, scales).astype(np.float32) * dequantize.unit(spec)
    if dequantize.has_row_scale(spec):
        got = got * scales.astype(np.float32).T
    got = got[:, register_order.columns_of_dims(spec)]
    # E4M3 levels times E4M3 scales are exact in f16; the rest rounds once.
    rounding = 2.0**-8 if name == "turbo8" else 2.0**-10 if encoding == "reference" else 1e-6
    np.testing.assert_allclose(got, expected, rtol=rounding, atol=1e-30)


@pytest.mark.parametrize("name", fast_only([n for n in DECODED if n != "int8"], ["turbo4"]))
def test_rows_out_of_bounds_decode_to_zero_whatever_they_hold(name):
    spec = side(name, 64)
    planes, scales, _ = tile_of(spec, 32)
    inside = run_lanes(spec, 32, planes, scales)
    ones = tuple(np.where(np.arange(64)[:, None] < 10, p, ~np.zeros_like(p)) for p in planes)
    noise = None
    if scales is not None:
        bits = scales.view(f"u{scales.itemsize}")
        noise = np.where(np.arange(64) < 10, bits, ~np.zeros_like(bits)).view(scales.dtype)
    got = run_lanes(spec, 32, ones, noise, bounds=(3, 10)).astype(np.float32)
    np.testing.assert_array_equal(got[3:10], inside[3:10].astype(np.float32))
    assert (got[:3] == 0).all() and (got[10:] == 0).all()


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "turbo4", "turbo3", "turbo2"])
def test_targets_without_e4m3_conversion_decode_the_same(name):
    spec = side(name, 64)
    planes, scales, _ = tile_of(spec, 64)
    with_it = run_lanes(spec, 64, planes, scales, has_e4m3=True)
    without = run_lanes(spec, 64, planes, scales, has_e4m3=False)
    np.testing.assert_array_equal(with_it.view(np.uint16), without.view(np.uint16))


def test_every_e4m3_byte_converts_without_hardware():
    lanes = NumpyLanes(has_e4m3=False)
    bytes_ = np.arange(256, dtype=np.uint8)
    words = np.resize(bytes_.view(np.uint32), 128)
    expected = NumpyLanes().e4m3_to_f16(words)
    for got, want in zip(lanes.e4m3_to_f16(words), expected):
        got, want = (x[:, None].view(np.float16).astype(np.float32) for x in (got, want))
        np.testing.assert_array_equal(got, want)


def test_row_scales_are_read_and_masked():
    spec = side("int8", 64)
    for block_size in (16, 64):
        _, scales, _ = tile_of(spec, block_size)
        one, lanes = Side(spec, block_size), NumpyLanes()
        limits = (lanes.const(5), lanes.const(40))
        words = dequantize.row_scale_bits(lanes, one.scale_tile, shared_scales(one, scales), limits)
        got = np.zeros(64, np.float16)
        for half, word in enumerate(words):
            got[lanes.row(half)] = word.astype(np.uint16).view(np.float16)
        expected = np.where((np.arange(64) >= 5) & (np.arange(64) < 40), scales[0], 0)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", DECODED)
def test_register_order_is_a_permutation_that_inverts(name, head_dim):
    spec = side(name, head_dim)
    dims, columns = register_order.dims_of_columns(spec), register_order.columns_of_dims(spec)
    np.testing.assert_array_equal(np.sort(dims), np.arange(head_dim))
    np.testing.assert_array_equal(dims[columns], np.arange(head_dim))
