"""The write kernel, interpreted with race detection, stores the codec's bytes and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from write_cases import (
    WriteCase,
    assert_bytes_equal,
    group_scales,
    make_case,
    side,
)

from jaxkv import codecs
from jaxkv.formats import FORMATS, SideSpec

# Every format on one side or the other.
COVER = (
    ("bf16", "f16"),
    ("fp8", "int8"),
    ("turbo8", "nvfp4"),
    ("turbo4", "turbo3"),
    ("turbo2", "turbo4"),
)
GROUPED = ("nvfp4", "turbo8", "turbo4", "turbo3", "turbo2")


def assert_audits_equal(got, expected) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_same(case: WriteCase) -> None:
    got, expected = case.run(), case.expected()
    assert_bytes_equal(got[0], expected[0])
    assert_bytes_equal(got[1], expected[1])
    assert_audits_equal(got[2], expected[2])


def norm_before_rounding(x: np.ndarray, spec: SideSpec) -> np.ndarray:
    """f32 scale of each group of a reference codebook, before it becomes E4M3."""
    book = spec.codebook
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, 16)
    step = np.abs(groups).max(-1, keepdims=True) / book.top
    codes = sum((groups >= bound * step).astype(int) for bound in book.bounds)
    levels = np.asarray(book.levels)[codes]
    norm = np.sqrt((groups**2).sum(-1)) / np.sqrt((levels**2).sum(-1))
    return np.asarray(norm, np.float32)


def near_rounding_boundary(scale: np.ndarray) -> np.ndarray:
    """Where a scale lies within 4 ulp of halfway between two E4M3 numbers."""
    grid = np.arange(0x7F, dtype=np.uint8)
    values = np.asarray(codecs.floats.from_e4m3(jnp.asarray(grid)), np.float64)
    halfway = (values[1:] + values[:-1]) / 2
    nearest = np.abs(scale[..., None] - halfway).min(-1)
    return nearest <= 4 * np.spacing(scale)


def assert_reference_side(got, expected, spec: SideSpec, x: jax.Array, slots: jax.Array) -> None:
    """Codes exactly; scales too, except norms within 4 ulp of a rounding boundary."""
    for a, b in zip(got.data, expected.data, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    if not spec.format.is_codebook:
        assert_bytes_equal(got, expected)
        return
    differ = group_scales(got, spec) != group_scales(expected, spec)
    near = near_rounding_boundary(norm_before_rounding(np.asarray(x, np.float32), spec))
    for token, slot in enumerate(np.asarray(slots)):
        if slot >= 0:
            block, offset = divmod(int(slot), got.block_size)
            differ[block, :, offset] &= ~near[token]
    assert not differ.any()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("names", COVER, ids="-".join)
def test_reference_bytes_of_rotated_input_are_the_codecs(names, head_dim):
    specs = [side(name, head_dim, "reference", "none") for name in names]
    case = make_case(*specs, dtype=jnp.float32, tokens=19)
    got, expected = case.run(), case.expected()
    sides = zip(got[:2], expected[:2], specs, (case.x_k, case.x_v))
    for pages, truth, spec, x in sides:
        assert_reference_side(pages, truth, spec, x, case.slots)
    assert_audits_equal(got[2], expected[2])


def test_one_small_write_stores_the_codecs_bytes():
    specs = [side(name, 256, "reference", "none") for name in ("fp8", "turbo2")]
    assert_same(make_case(*specs, tokens=5, heads=1, dtype=jnp.bfloat16))


def group_errors(pages, spec: SideSpec, case: WriteCase, x, scale) -> np.ndarray:
    """Relative squared error of every stored group, [tokens, heads, groups]; 0 where skipped."""
    stored = np.asarray(codecs.decode_pages(pages, spec, scale))
    target = np.asarray(codecs.rotate(x, spec))
    errors = np.zeros((*x.shape[:2], spec.num_groups))
    for token, slot in enumerate(np.asarray(case.slots)):
        if slot >= 0:
            block, offset = divmod(int(slot), pages.block_size)
            difference = (stored[block, :, offset] - target[token]).reshape(x.shape[1], -1, 16)
            energy = (target[token].reshape(difference.shape) ** 2).sum(-1)
            errors[token] = (difference**2).sum(-1) / np.maximum(energy, 1e-30)
    return errors


def assert_groups_agree(case: WriteCase) -> None:
    """At most 1e-3 of the groups differ from the codec's, none in error by more than 1e-5."""
    got, expected = case.run(), case.expected()
    sides = (
        (case.k, case.x_k, case.k_scale),
        (case.v, case.x_v, case.v_scale),
    )
    for pages, truth, (spec, x, scale) in zip(got[:2], expected[:2], sides):
        a = group_errors(pages, spec, case, x, scale)
        b = group_errors(truth, spec, case, x, scale)
        assert (a != b).mean() <= 1e-3
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["searched", "reference"])
@pytest.mark.parametrize("names", [("turbo4", "turbo3"), ("turbo2", "nvfp4")], ids="-".join)
def test_rotated_and_searched_groups_are_the_codecs(names, encoding):
    specs = [side(name, 128, encoding) for name in names]
    assert_groups_agree(make_case(*specs, tokens=19))


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["signs", "hadamard"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_rotation_of_every_head_dim(head_dim, rotation):
    specs = [side(name, head_dim, "searched", rotation) for name in ("turbo8", "turbo4")]
    assert_groups_agree(make_case(*specs, tokens=9))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_input_dtypes(dtype):
    specs = [side(name, 128, "reference", "none") for name in ("f16", "int8")]
    assert_same(make_case(*specs, dtype=dtype))


@pytest.mark.slow
def test_sides_of_different_head_dim():
    assert_same(
        make_case(side("turbo4", 128, "reference", "none"), side("fp8", 64), tokens=33, heads=1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size):
    specs = side("turbo4", 128, "reference", "none"), side("turbo8", 128, "searched", "none")
    assert_same(make_case(*specs, block_size=block_size, num_blocks=2))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("turbo4", "turbo3"), ("turbo2", "nvfp4")], ids="-".join)
def test_ties_take_the_codecs_code(names):
    """Elements exactly on a bound, on both sides of zero."""
    specs = [side(name, 128, "reference", "none") for name in names]
    case = make_case(*specs, tokens=8)
    rng = np.random.default_rng(3)

    def ties(spec: SideSpec) -> jax.Array:
        shape = (8, 2, spec.num_groups, 16)
        if spec.format.is_codebook:
            book, top = spec.codebook, np.float32(spec.codebook.top)
            bounds = np.asarray(book.bounds, np.float32)
            amax = np.exp(rng.standard_normal(shape[:3])).astype(np.float32)
            step = amax * np.float32(1 / top)
            x = rng.choice(bounds, shape) * step[..., None]
            x[..., 0] = amax
        else:
            # Multiples of a quarter of an exact scale hit every E2M1 midpoint.
            x = rng.choice(np.arange(-24, 25) / 4, shape) * 2.0 ** rng.integers(-3, 4)
            x[..., 0] = 6 * 2.0
        return jnp.asarray(x.reshape(8, 2, -1), jnp.float32)

    assert_same(dataclasses.replace(case, x_k=ties(specs[0]), x_v=ties(specs[1])))


@pytest.mark.slow
@pytest.mark.parametrize("names", COVER, ids="-".join)
def test_values_that_do_not_fit_are_the_codecs_and_counted(names):
    """NaN, infinities, huge and tiny values, and zeros."""
    specs = [side(name, 128) for name in names]
    case = make_case(*specs, tokens=12, dtype=jnp.float32)

    def spoil(x: jax.Array) -> jax.Array:
        x = np.array(x)
        x[0, 0, 7], x[1, 1, 20], x[2, 0, 127] = np.nan, np.inf, -np.inf
        x[5] *= 1e6
        x[6] *= 1e-5
        x[7], x[8] = 0.0, -0.0
        return jnp.asarray(x)

    case = dataclasses.replace(case, x_k=spoil(case.x_k), x_v=spoil(case.x_v))
    got, expected = case.run(), case.expected()
    assert_audits_equal(got[2], expected[2])
    sides = zip(got[:2], expected[:2], specs, (case.k_scale, case.v_scale))
    for pages, truth, spec, scale in sides:
        a, b = (np.asarray(codecs.decode_pages(p, spec, scale)) for p in (pages, truth))
        differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        assert differ.mean() <= 1e-3


def test_all_tokens_skipped_changes_nothing():
    case = make_case(side("bf16", 256), side("int8", 256), tokens=5, heads=1)
    case = dataclasses.replace(case, slots=jnp.full(5, -1, jnp.int32))
    k_pages, v_pages, audits = case.run()
    assert_bytes_equal(k_pages, case.k_pages)
    assert_bytes_equal(v_pages, case.v_pages)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(audits))


def test_every_format_is_covered():
    assert {name for names in COVER for name in names} == set(FORMATS)
    assert {name for name, f in FORMATS.items() if f.group_size} == set(GROUPED)
