"""The write kernels compile for GPUs without one: no spills, in place, within a budget."""

import json
import pathlib

import numpy as np
import pytest
from write_inspection import WriteCompileCase, inspect

from jaxkv.formats import FORMATS, PAIR_NAMES, Format
from pallas_kernels.inspection import can_compile
from pallas_kernels.write import exact

BUDGETS = pathlib.Path(__file__).parent / "write_budgets.json"
GROWTH = 1.1

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(not can_compile(), reason="needs the cuda-compile group")

SYMMETRIC = [WriteCompileCase(f, f, d) for f in FORMATS for d in (64, 128, 256)]
REFERENCE = [WriteCompileCase(f, f, 128, "reference") for f in FORMATS if FORMATS[f].has_encodings]
PAIRS = [WriteCompileCase(pair.k.name, pair.v.name) for pair in map(Format.parse, PAIR_NAMES)]
FUSED = [
    WriteCompileCase("bf16", "bf16", rope="half"),
    WriteCompileCase("turbo4", "turbo4", rope="half"),
    WriteCompileCase("fp8", "turbo4", rope="interleaved"),
    WriteCompileCase("turbo3", "turbo8", rope="interleaved"),
]
PORTABLE = [WriteCompileCase(f, f) for f in FORMATS] + FUSED[1:2]


@pytest.fixture(scope="module")
def hopper(once):
    cases = SYMMETRIC + REFERENCE + PAIRS + FUSED
    found = once("write", lambda: inspect(cases, "sm_90a"))
    return {case.name: facts for case, facts in zip(cases, found)}


@needs_compiler
def test_every_kernel_compiles_for_hopper_without_spills(hopper):
    for name, facts in hopper.items():
        assert isinstance(facts, dict), f"{name}: {facts}"
        assert facts["spill_bytes"] == 0 and not facts["ptx"]["local"], name


@needs_compiler
def test_every_kernel_keeps_its_instruction_budget(hopper):
    """Regenerate with `python tests/kernels/test_paged_write_compiled.py` after a real gain."""
    budgets = json.loads(BUDGETS.read_text())
    assert set(budgets) == set(hopper)
    grown = {
        name: (facts["instructions"], budgets[name]["instructions"])
        for name, facts in hopper.items()
        if facts["instructions"] > GROWTH * budgets[name]["instructions"]
    }
    assert not grown


@needs_compiler
def test_every_kernel_divides_exactly_and_keeps_subnormals(hopper):
    for name, facts in hopper.items():
        allowed = {"rsqrt"} if "qkv" in name else set()
        assert set(facts["approximate"]) <= allowed, name
        assert not facts["ptx"]["ftz"], name


@needs_compiler
def test_every_kernel_writes_in_place(hopper):
    for name, facts in hopper.items():
        assert facts["alias_bytes"] >= facts["pool_bytes"], name
        assert facts["temporary_bytes"] < facts["pool_bytes"] / 2, name


@needs_compiler
@pytest.mark.parametrize("which", ["daily", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_every_format_compiles_for_other_generations(arch, which):
    cases = [c for c in PORTABLE if which == "all" or c.k in ("bf16", "int8", "turbo3")]
    for case, facts in zip(cases, inspect(cases, arch)):
        assert isinstance(facts, dict), f"{case.name}: {facts}"
        assert facts["spill_bytes"] == 0, case.name


@needs_compiler
def test_offsets_into_large_pools_are_64_bit_and_nothing_is_copied():
    """2^33 elements a side; three heads make the block stride a factor of its own."""
    case = WriteCompileCase("int8", "turbo4", heads=3, num_blocks=2**21)
    (facts,) = inspect([case], "sm_90a")
    row_bytes = {"int8": 128, "turbo4": 64}
    for bytes_ in row_bytes.values():
        assert 3 * 16 * bytes_ in facts["ptx"]["wide_factors"]
    assert facts["alias_bytes"] >= facts["pool_bytes"] > 2**33
    assert facts["temporary_bytes"] < 2**20


@needs_compiler
def test_pages_carried_by_a_loop_are_written_in_place():
    case = WriteCompileCase("fp8", "turbo4", layers=2, steps=5)
    (facts,) = inspect([case], "sm_90a")
    assert facts["alias_bytes"] >= facts["pool_bytes"]
    assert facts["temporary_bytes"] < facts["pool_bytes"] / 10


@needs_compiler
def test_equal_layers_are_lowered_once():
    case = WriteCompileCase("turbo4", "turbo4", layers=4)
    (facts,) = inspect([case], "sm_90a")
    assert facts["lowered_kernels"] == 1


@pytest.mark.parametrize("operands", [1, 2])
def test_inline_instructions_act_register_by_register(operands):
    """Emulates a warpgroup: 128 lanes of each register, one value a lane."""
    rng = np.random.default_rng(0)
    registers = [np.empty((2, 1, 4, 16), object) for _ in range(operands)]
    for array in registers:
        for index in np.ndindex(array.shape):
            array[index] = rng.uniform(1, 2, 128).astype(np.float32)
    instruction = {1: np.sqrt, 2: np.divide}[operands]
    result = exact.map_registers(instruction, registers)
    for index in np.ndindex(result.shape):
        np.testing.assert_array_equal(
            result[index], instruction(*(array[index] for array in registers))
        )


if __name__ == "__main__":
    cases = SYMMETRIC + REFERENCE + PAIRS + FUSED
    table = {}
    for case, facts in zip(cases, inspect(cases, "sm_90a")):
        assert isinstance(facts, dict), f"{case.name}: {facts}"
        table[case.name] = {k: facts[k] for k in ("instructions", "registers", "shared_bytes")}
    BUDGETS.write_text(json.dumps(table, indent=1) + "\n")
