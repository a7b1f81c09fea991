"""Decode attention on a CPU against what the project promises, best of several processes.

Each process measures every format, a dense f32 einsum and `jax.nn.dot_product_attention` in
interleaved rounds (see `jaxkv.bench`) and takes ratios of medians; other load on the machine moves
a whole process at times, so the best ratio of several counts.

    python benchmarks/cpu.py [--formats bf16,turbo4] [--rounds 15] [--processes 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from jaxkv import bench
from jaxkv.formats import FORMATS

# 8 KV heads, 32 query heads, dim 128, 4k tokens.
SHAPE = bench.Shape()
# Promised ratios to dense f32.
PROMISES = {"bf16": 0.90, "int8": 0.85, "fp8": 0.85, "turbo4": 1.15, "nvfp4": 1.15}
PROMISES |= {"turbo3": 1.1, "turbo2": 1.1}
# Promised factor over `jax.nn.dot_product_attention`, for every format.
FASTER_THAN_LIBRARY = 4.0


def table(runs: list[dict[str, float]]) -> str:
    """Best ratios over processes, beside the promises."""
    lines = [f"{'':10} {'ms':>7} {'x dense':>8} {'promise':>8} {'x faster than jax.nn':>21}"]
    for name in runs[0]:
        milliseconds = min(run[name] for run in runs) * 1e3
        ratio = min(run[name] / run[bench.DENSE] for run in runs)
        faster = max(run[bench.LIBRARY] / run[name] for run in runs)
        promise = f"{PROMISES[name]:8.2f}" if name in PROMISES else " " * 8
        lines.append(f"{name:10} {milliseconds:7.2f} {ratio:8.2f} {promise} {faster:21.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one process, medians as JSON")
    options = parser.parse_args()
    if options.json:
        cases = list(bench.attention_cases(SHAPE, options.formats.split(",")))
        print(json.dumps(bench.interleave(cases, rounds=options.rounds)))
        return
    command = [sys.executable, __file__, "--json", f"--formats={options.formats}"]
    command.append(f"--rounds={options.rounds}")
    runs = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(options.processes)
    ]
    print(table(runs))
    for name in runs[0]:
        ratio = min(run[name] / run[bench.DENSE] for run in runs)
        faster = max(run[bench.LIBRARY] / run[name] for run in runs)
        if name in FORMATS and (ratio > PROMISES.get(name, ratio) or faster < FASTER_THAN_LIBRARY):
            print(f"{name} misses its promise")


if __name__ == "__main__":
    main()
