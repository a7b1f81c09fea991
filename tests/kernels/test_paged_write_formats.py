"""The write kernel, interpreted with race detection, stores the codec's bytes and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_except
from write_cases import (
    COVER,
    WriteCase,
    assert_audits_equal,
    assert_bytes_equal,
    assert_groups_agree,
    assert_reference_codes,
    make_case,
    side,
)

from jaxkv import codecs
from jaxkv.formats import FORMATS, SideSpec

GROUPED = ("nvfp4", "turbo8", "turbo4", "turbo3", "turbo2")


def assert_same(case: WriteCase) -> None:
    got, expected = case.run(), case.expected()
    assert_bytes_equal(got[0], expected[0])
    assert_bytes_equal(got[1], expected[1])
    assert_audits_equal(got[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", full_except([64, 128, 256], [128]))
@pytest.mark.parametrize("names", COVER, ids="-".join)
def test_reference_bytes_of_rotated_input_are_the_codecs(names, head_dim):
    specs = [side(name, head_dim, "reference", "none") for name in names]
    case = make_case(*specs, dtype=jnp.float32, tokens=19)
    got = case.run()
    assert_reference_codes(case, got)
    assert_audits_equal(got[2], case.expected()[2])


def test_one_small_write_stores_the_codecs_bytes():
    specs = [side(name, 256, "reference", "none") for name in ("fp8", "turbo2")]
    assert_same(make_case(*specs, tokens=5, heads=1, dtype=jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["searched", "reference"])
@pytest.mark.parametrize("names", [("turbo4", "turbo3"), ("turbo2", "nvfp4")], ids="-".join)
def test_rotated_and_searched_groups_are_the_codecs(names, encoding):
    specs = [side(name, 128, encoding) for name in names]
    case = make_case(*specs, tokens=19)
    assert_groups_agree(case, case.run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotation", "head_dim"),
    full_except(
        [("signs", 64), ("signs", 256), ("hadamard", 64), ("hadamard", 256)],
        [("signs", 64), ("hadamard", 256)],
    ),
)
def test_rotation_of_every_head_dim(rotation, head_dim):
    specs = [side(name, head_dim, "searched", rotation) for name in ("turbo8", "turbo4")]
    case = make_case(*specs, tokens=9)
    assert_groups_agree(case, case.run())


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
@pytest.mark.parametrize("block_size", full_except([32, 64, 128], [64]))
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
