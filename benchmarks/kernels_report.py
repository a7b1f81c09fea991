"""What the GPU kernels compile to, without a GPU: `make kernels-report`.

Nothing here ran on a GPU. Modelled time of 64 tokens is the larger of their bytes over the memory
bandwidth of one SM of an H200 and the instructions of the main loop, one a cycle.
"""

from __future__ import annotations

import pathlib
import sys

from jaxkv.formats import FORMATS, PAIR_NAMES, Format
from pallas_kernels.inspection import Case, Report, can_compile, inspect_cases

TARGETS = pathlib.Path(__file__).resolve().parents[1] / "tests/kernels/targets"
BYTES_PER_CYCLE = 20.7

CASES = [
    *(Case(f, f, head_dim) for head_dim in (128, 64, 256) for f in FORMATS),
    *(Case(f, f, encoding="reference") for f in ("turbo4", "turbo3", "turbo2")),
    *(Case(pair.k.name, pair.v.name) for pair in map(Format.parse, PAIR_NAMES)),
    *(Case(f, f, tokens=64) for f in FORMATS),
]
HEADER = (
    f"{'attention kernel (sm_90a, never run)':<44}{'regs':>5}{'spill':>6}{'shared':>8}{'CTAs':>5}"
    f"{'instr':>7}{'bytes':>7}{'bound':>8}{'cycles':>8}{'of mem':>8}{'x bf16':>8}"
)


def row(case: Case, report: Report, bf16_cycles: float) -> str:
    """One line of the table; `of mem` is the share of the bandwidth limit that is reached."""
    memory = case.tile_bytes / BYTES_PER_CYCLE
    cycles = max(memory, report.loop_instructions)
    bound = "memory" if cycles == memory else "instr"
    return (
        f"{case.name:<44}{report.registers:>5}{report.spill_bytes:>6}{report.shared_bytes:>8}"
        f"{report.ctas_per_sm:>5}{report.loop_instructions:>7}{case.tile_bytes:>7}{bound:>8}"
        f"{cycles:>8.0f}{memory / cycles:>8.0%}{bf16_cycles / cycles:>8.2f}"
    )


def main() -> None:
    """Compiles and prints the table."""
    if not can_compile():
        sys.exit("the cuda-compile dependency group is missing: run `make kernels-report`")
    reports = inspect_cases(CASES, "sm_90a", TARGETS / "sm_90a.txtpb", timeout=1200)
    print(HEADER)
    for case, report in zip(CASES, reports, strict=True):
        if isinstance(report, str):
            print(f"{case.name:<44}does not compile: {report[:120]}")
            continue
        bf16 = Case("bf16", "bf16", case.head_dim).tile_bytes / BYTES_PER_CYCLE
        print(row(case, report, bf16))


if __name__ == "__main__":
    main()
