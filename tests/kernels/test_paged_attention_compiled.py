"""The attention kernels compile for GPUs that are not there: no spills, within their budgets."""

import json
import pathlib
import sys

import jax
import pytest

from jaxkv.formats import FORMATS, PAIR_NAMES, Format
from pallas_kernels.inspection import Case, attention_case, can_compile, inspect_cases

HERE = pathlib.Path(__file__).parent
BUDGETS = HERE / "attention_budgets.json"
GROWTH = 1.1
# Bytes that one SM of an H200 reads from memory in a cycle.
BYTES_PER_CYCLE = 20.7

needs_compiler = pytest.mark.skipif(not can_compile(), reason="needs the cuda-compile group")

SYMMETRIC = [Case(f, f, head_dim) for f in FORMATS for head_dim in (64, 128, 256)]
PAIRS = [Case(pair.k.name, pair.v.name) for pair in map(Format.parse, PAIR_NAMES)]
VARIANTS = [
    *(Case(f, f, encoding="reference") for f in ("turbo4", "turbo3", "turbo2")),
    Case("turbo4", "turbo4", block_size=16),
    Case("turbo4", "turbo4", block_size=128, window=1024, soft_cap=30.0),
    Case("bf16", "bf16", num_blocks=2**17),
    Case("fp8", "turbo4", tokens=8),
    Case("turbo4", "turbo4", left_out=True),
    Case("fp8", "turbo4", tokens=8, window=1024, left_out=True),
    Case("turbo4", "turbo4", tokens=64, left_out=True),
    *(Case(f, f, tokens=64) for f in FORMATS),
    Case("bf16", "bf16", head_dim=256, tokens=64),
    Case("bf16", "bf16", path="mma"),
]
CASES = SYMMETRIC + PAIRS + VARIANTS
PORTABLE = [Case(f, f, path="mma") for f in FORMATS]
# What the daily run compiles of them.
DAILY_PORTABLE = ("bf16", "turbo3")


@pytest.fixture(scope="module")
def hopper(once):
    target = HERE / "targets/sm_90a.txtpb"
    return dict(zip(CASES, once("attention", lambda: inspect_cases(CASES, "sm_90a", target))))


@pytest.mark.slow
@needs_compiler
def test_every_kernel_compiles_for_hopper_without_spills(hopper):
    for case, report in hopper.items():
        assert not isinstance(report, str), f"{case.name}: {report}"
        assert report.spill_bytes == 0, case.name


@pytest.mark.slow
@needs_compiler
def test_every_kernel_keeps_its_instruction_budget(hopper):
    """Regenerate with `python tests/kernels/test_paged_attention_compiled.py` after a gain."""
    budgets = json.loads(BUDGETS.read_text())
    assert set(budgets) == {case.name for case in CASES}
    grown = {
        case.name: (report.loop_instructions, budgets[case.name])
        for case, report in hopper.items()
        if report.loop_instructions > GROWTH * budgets[case.name]
    }
    assert not grown


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "encoding", "goal"),
    [
        ("fp8", "searched", 1.8),
        ("int8", "searched", 1.8),
        ("nvfp4", "searched", 2.2),
        ("turbo4", "searched", 2.5),
        ("turbo3", "searched", 3.0),
        ("turbo2", "searched", 3.2),
        ("turbo4", "reference", 1.8),
    ],
)
def test_modelled_speed_against_bf16(hopper, name, encoding, goal):
    """Time of a tile: its memory cycles or its instructions, whichever is more."""
    bf16 = Case("bf16", "bf16")
    case = Case(name, name, encoding=encoding)
    assert cycles(hopper[bf16], bf16) == bf16.tile_bytes / BYTES_PER_CYCLE
    assert cycles(hopper[bf16], bf16) / cycles(hopper[case], case) >= goal


def cycles(report, case):
    return max(case.tile_bytes / BYTES_PER_CYCLE, report.loop_instructions)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("which", ["daily", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_the_portable_path_compiles_without_spills(arch, which):
    cases = [case for case in PORTABLE if which == "all" or case.k in DAILY_PORTABLE]
    reports = inspect_cases(cases, arch, HERE / f"targets/{arch}.txtpb")
    for case, report in zip(cases, reports):
        assert not isinstance(report, str), f"{case.name}: {report}"
        assert report.spill_bytes == 0, case.name


def test_equal_layers_lower_to_one_kernel():
    function, arguments = attention_case(Case("bf16", "bf16"))

    def model(q, *rest):
        for _ in range(5):
            out, _ = function(q, *rest)
            q = out.astype(q.dtype)
        return q

    text = jax.jit(model).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("call @_paged_attention") == 5


if __name__ == "__main__":
    found = inspect_cases(CASES, "sm_90a", HERE / "targets/sm_90a.txtpb")
    errors = [f"{c.name}: {r}" for c, r in zip(CASES, found) if isinstance(r, str)]
    if errors:
        sys.exit("\n".join(errors))
    budgets = {c.name: r.loop_instructions for c, r in zip(CASES, found)}
    BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
