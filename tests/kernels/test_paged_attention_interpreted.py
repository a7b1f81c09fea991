"""Interpreted attention kernels, races detected, against a float64 oracle.

Every slot that no query sees is set to all ones, NaN in every float format.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_except
from paged_cases import TOLERANCE, Problem, make, oracle, run, side

from jaxkv.formats import FORMATS, PAIR_NAMES, Format
from pallas_kernels import paged_attention, unsupported_reasons
from pallas_kernels.sides import Side
from pallas_kernels.tuning import Tuning


def slow(*args):
    return pytest.param(*args, marks=pytest.mark.slow)


def check(problem: Problem, tuning: Tuning | None = None) -> None:
    arrays = make(problem)
    out, lse = run(problem, arrays, tuning)
    expected_out, expected_lse = oracle(problem, arrays)
    dtypes = (Side(problem.k, 64).dtype, Side(problem.v, 64).dtype)
    tolerance = max(TOLERANCE[d] for d in dtypes)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected_out, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    seen = np.isfinite(expected_lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=tolerance, rtol=0)


def sides(k: str, v: str | None = None, head_dim: int = 64, encoding: str = "searched") -> dict:
    return dict(k=side(k, head_dim, encoding), v=side(v or k, head_dim, encoding))


@pytest.mark.parametrize("name", [n if n in ("bf16", "turbo4") else slow(n) for n in FORMATS])
def test_every_format_decodes(name):
    check(Problem(**sides(name)))


@pytest.mark.slow
@pytest.mark.parametrize("pair", full_except(PAIR_NAMES, PAIR_NAMES[::2]))
def test_every_named_pair_decodes(pair):
    fmt = Format.parse(pair)
    check(Problem(**sides(fmt.k.name, fmt.v.name, 128), starts=(70,), new_tokens=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "turbo4", "turbo3", "turbo2"])
def test_the_reference_encoding_decodes(name):
    check(Problem(**sides(name, encoding="reference"), starts=(70,), new_tokens=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_except(["bf16", "int8", "turbo8", "turbo3"], ["turbo3"]))
def test_wide_heads_decode(name):
    check(Problem(**sides(name, head_dim=256), starts=(70,), new_tokens=(1,), block_size=32))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", full_except([16, 32, 64, 128], [32, 128]))
@pytest.mark.parametrize("pair", [("turbo3", "int8"), ("turbo8", "bf16")])
def test_every_block_size(pair, block_size):
    check(Problem(**sides(*pair), starts=(200,), new_tokens=(1,), block_size=block_size))


@pytest.mark.slow
def test_heads_of_different_size():
    problem = Problem(side("turbo4", 128), side("turbo2", 64), starts=(30,), new_tokens=(1,))
    check(problem)


FEATURES = dict(
    window=dict(window=50),
    soft_cap=dict(soft_cap=3.0),
    sinks=dict(has_sinks=True),
    several=dict(tokens=3, new_tokens=(3, 2), starts=(60, 0)),
    all=dict(window=20, soft_cap=5.0, has_sinks=True, tokens=2, new_tokens=(2, 1), starts=(90, 7)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "feature"),
    full_except(
        [
            (p, f)
            for p in (("bf16", "bf16"), ("fp8", "turbo4"), ("turbo8", "int8"))
            for f in FEATURES
        ],
        [*((("fp8", "turbo4"), f) for f in FEATURES), (("turbo8", "int8"), "all")],
    ),
)
def test_features_on_formats(pair, feature):
    check(Problem(**sides(*pair), **FEATURES[feature]))


@pytest.mark.slow
@pytest.mark.parametrize("group", full_except([1, 5, 7, 24, 71], [1, 7, 71]))
def test_any_group_ratio(group):
    check(Problem(**sides("bf16"), group=group, starts=(20,), new_tokens=(1,)))


@pytest.mark.slow
def test_heads_and_splits():
    problem = Problem(**sides("turbo8", "fp8"), heads=2, starts=(300, 90), columns=32)
    check(problem, Tuning(split_tokens=128))


@pytest.mark.slow
def test_empty_sequences_and_padding_tokens_are_zero():
    check(Problem(**sides("bf16"), tokens=2, starts=(0, 70, 5), new_tokens=(0, 1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "v"),
    full_except(
        [("bf16", "bf16"), ("turbo4", "turbo3"), ("int8", "fp8"), ("turbo8", "nvfp4")],
        [("turbo4", "turbo3")],
    ),
)
def test_a_long_chunk(k, v):
    problem = Problem(**sides(k, v), tokens=40, starts=(50, 3), new_tokens=(40, 17), window=64)
    check(problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "new_tokens", [(20, 1, 0), pytest.param((1, 1, 1), marks=pytest.mark.full)]
)
def test_packed_queries(new_tokens):
    problem = Problem(**sides("bf16", "turbo4"), starts=(50, 3, 64), new_tokens=new_tokens)
    check(dataclasses.replace(problem, packed=True))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 60])
def test_keys_read_from_elsewhere_are_left_out(window, tokens):
    """The first sequence keeps some keys, the second none, the third's exact ones begin late."""
    problem = Problem(
        **sides("fp8", "bf16"),
        starts=(90, 5, 40),
        new_tokens=(tokens,) * 3,
        tokens=tokens,
        window=window,
        left_out=((2, 0), (4, 0), (0, 38)),
        distance=20,
    )
    check(problem)


@pytest.mark.slow
def test_negative_and_zero_scales():
    for scale in (-0.3, 0.0):
        check(Problem(**sides("bf16"), starts=(20,), new_tokens=(1,), scale=scale))


@pytest.mark.slow
def test_a_sequence_does_not_depend_on_its_batch():
    problem = Problem(**sides("turbo4"), starts=(100, 40), columns=8)
    arrays = make(problem)
    both, _ = run(problem, arrays)
    swapped = dataclasses.replace(
        arrays,
        q=arrays.q[::-1],
        tables=arrays.tables[::-1],
        starts=jnp.asarray([40, 3], jnp.int32),
    )
    other, _ = run(problem, swapped)
    np.testing.assert_array_equal(both[1], other[0])


@pytest.mark.slow
def test_a_nan_key_reaches_only_the_sequences_that_attend_to_it():
    problem = Problem(**sides("turbo4"), starts=(20, 20))
    arrays = make(problem)
    block = int(arrays.tables[0, 0])
    scales = arrays.k_pages.scales.at[block, 0, 0, 3].set(jnp.uint32(0x7F7F7F7F))
    poisoned = dataclasses.replace(
        arrays, k_pages=dataclasses.replace(arrays.k_pages, scales=scales)
    )
    out, _ = run(problem, poisoned)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_what_cannot_serve_says_why():
    reasons = unsupported_reasons(side("turbo4", 80), side("bf16", 512), 24, (7, 5))
    assert len(reasons) == 4
    assert "80" in reasons[0] and "512" in reasons[1] and "24" in reasons[2]
    problem = Problem(**sides("bf16", head_dim=80))
    arrays = make(problem)
    with pytest.raises(NotImplementedError, match="head_dim is 80"):
        run(problem, arrays)


@pytest.mark.slow
def test_equal_layers_trace_once():
    problem = Problem(**sides("bf16"))
    arrays = make(problem)

    def layers(q, count):
        for _ in range(count):
            out, _ = paged_attention(
                q,
                arrays.k_pages,
                arrays.v_pages,
                arrays.tables,
                arrays.starts,
                arrays.new_tokens,
                k_spec=problem.k,
                v_spec=problem.v,
                scale=1.0,
            )
            q = out.astype(q.dtype)
        return q

    jaxpr = str(jax.make_jaxpr(lambda q: layers(q, 3))(arrays.q))
    # The traced kernel is printed once and shared by name.
    assert jaxpr.count("name=_paged_attention") == 3
    assert jaxpr.count("mpmd_map[") + jaxpr.count("core_map[") + jaxpr.count("pallas_call[") <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "v"),
    full_except(
        [("bf16", "bf16"), ("turbo4", "int8"), ("fp8", "turbo3")],
        [("bf16", "bf16"), ("fp8", "turbo3")],
    ),
)
def test_the_portable_path(k, v):
    problem = Problem(**sides(k, v), tokens=2, starts=(90, 3), new_tokens=(2, 1), window=40)
    check(problem, Tuning(path="mma", rows=16))


@pytest.mark.slow
def test_keys_through_shared_memory_and_many_rows():
    problem = Problem(**sides("turbo4"), tokens=9, group=4, starts=(70,), new_tokens=(9,))
    check(problem, Tuning(rows=64, key_in_registers=False, stages=2))


def test_a_tuning_that_does_not_fit_is_refused():
    problem = Problem(**sides("bf16", head_dim=256))
    with pytest.raises(ValueError, match="shared memory"):
        run(problem, make(problem), Tuning(stages=6))
