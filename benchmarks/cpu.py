"""What the cache costs on a CPU, against what the project promises.

Sections: attention, write, reserve, prefill, ragged, memory, step (all by default). Times are
medians of interleaved rounds, compared within one process. Attention, where other load on the
machine can move a whole process, takes the best ratio of several processes.

    python benchmarks/cpu.py [sections] [--formats bf16,turbo4] [--rounds 15] [--processes 3]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import bench
from jaxkv.formats import FORMATS

# 8 KV heads, 32 query heads, dim 128, 4k tokens.
SHAPE = bench.Shape()
# Promised ratios to dense f32.
PROMISES = {
    "bf16": 0.90,
    "int8": 0.85,
    "fp8": 0.85,
    "turbo4": 1.15,
    "nvfp4": 1.15,
    "turbo3": 1.1,
    "turbo2": 1.1,
}
# Promised factor over `jax.nn.dot_product_attention`, for every format.
FASTER_THAN_LIBRARY = 4.0
# Promised milliseconds that 4k of context add to a step of SmolLM2-135M.
STEP_PROMISES = {"fp8": 40.0, "turbo4": 58.0}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def attention(options: argparse.Namespace) -> str:
    """Decode attention of every format, best ratios over processes, beside the promises."""
    command = [sys.executable, __file__, "--json", f"--formats={options.formats}"]
    command.append(f"--rounds={options.rounds}")
    runs = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(options.processes)
    ]
    rows = []
    for name in runs[0]:
        ratio = min(run[name] / run[bench.DENSE] for run in runs)
        faster = max(run[bench.LIBRARY] / run[name] for run in runs)
        kept = ratio <= PROMISES.get(name, ratio)
        kept &= name not in FORMATS or faster >= FASTER_THAN_LIBRARY
        milliseconds = min(run[name] for run in runs) * 1e3
        promise = f"{PROMISES[name]:.2f}" if name in PROMISES else ""
        row = [name, f"{milliseconds:.2f}", f"{ratio:.2f}", promise, f"{faster:.1f}"]
        rows.append([*row, "" if kept else "missed"])
    return table(("", "ms", "x dense f32", "promised", "x faster than jax.nn", ""), rows)


def write(options: argparse.Namespace) -> str:
    """One token into pools of 1x and 64x the blocks."""
    names = [name for name in ("bf16", "fp8", "turbo4") if name in options.formats.split(",")]
    cases = list(bench.write_cases(SHAPE, names, pool_factors=(1, 64)))
    seconds = bench.interleave(cases, rounds=options.rounds)
    rows = []
    for name in names:
        small, large = seconds[f"{name} x1"], seconds[f"{name} x64"]
        rows.append([name, f"{small * 1e6:.1f}", f"{large * 1e6:.1f}", f"{large / small:.2f}"])
    return table(("", "µs, pool x1", "µs, pool x64", "ratio"), rows)


def reserve(options: argparse.Namespace) -> str:
    """Planning a step of 256 sequences in a pool of 2^20 blocks."""
    # An argmin over a million counts per block takes a second a step.
    *fast, slow = bench.reserve_cases()
    seconds = bench.interleave(fast, rounds=options.rounds, inner=1)
    seconds |= bench.interleave([slow], rounds=1, inner=1)
    return table(("", "µs a step"), [[name, f"{s * 1e6:.0f}"] for name, s in seconds.items()])


def prefill(options: argparse.Namespace) -> str:
    """A chunk of 512 at several contexts, in tables of 16k and of 64k tokens."""
    chunk, contexts, capacities = 512, (1024, 4096, 8192, 15872), (16384, 65536)
    cases = [
        case
        for capacity in capacities
        for case in _chunk_cases("turbo4", chunk, contexts, capacity)
    ]
    seconds = bench.interleave(cases, rounds=max(3, options.rounds // 3), inner=1)
    rows = []
    for context in contexts:
        times = [seconds[f"{context} of {capacity}"] * 1e3 for capacity in capacities]
        rows.append([str(context), *(f"{t:.0f}" for t in times), f"{times[1] / times[0]:.2f}"])
    header = ("context", *(f"ms, table of {c} tokens" for c in capacities), "ratio")
    return table(header, rows)


def _chunk_cases(
    name: str, chunk: int, contexts: Sequence[int], capacity: int
) -> Iterator[bench.Case]:
    shape = bench.Shape(context=capacity)
    config = shape.config(name)
    q = jax.random.normal(jax.random.key(0), (1, chunk, SHAPE.num_q_heads, SHAPE.head_dim))
    # The blocks hold zeros; what they hold does not change the cost.
    append = jax.jit(
        lambda c, n: jaxkv.reserve(c, n[None], max_new_tokens=capacity), donate_argnums=0
    )
    attend = jax.jit(lambda c, q, plan: jaxkv.attend(c, 0, q, plan))
    for context in contexts:
        cache, _ = append(jaxkv.init(config), jnp.int32(context - chunk))
        cache, plan = jaxkv.reserve(cache, jnp.asarray([chunk]), max_new_tokens=chunk)
        run = functools.partial(attend, cache, q, plan)
        yield bench.Case(f"{context} of {capacity}", lambda n, run=run: [run() for _ in range(n)])


def ragged(options: argparse.Namespace) -> str:
    """Eight sequences, one of them long: the cost is that of the sum of their lengths."""
    batch, long, short = 8, 4096, 64
    lengths = {
        "one of 4096, seven of 64": [long] + [short] * (batch - 1),
        "eight of 568 (the same sum)": [(long + short * (batch - 1)) // batch] * batch,
        "eight of 4096": [long] * batch,
    }
    shape = bench.Shape(batch=batch)
    config = shape.config("turbo4")
    append = jax.jit(lambda c, n: jaxkv.reserve(c, n, max_new_tokens=long), donate_argnums=0)
    attend = jax.jit(lambda c, q, plan: jaxkv.attend(c, 0, q, plan))
    q = jax.random.normal(jax.random.key(0), (batch, 1, SHAPE.num_q_heads, SHAPE.head_dim))
    cases = []
    for name, counts in lengths.items():
        cache, _ = append(jaxkv.init(config), jnp.asarray(counts) - 1)
        cache, plan = jaxkv.reserve(cache, jnp.ones(batch, jnp.int32))
        run = functools.partial(attend, cache, q, plan)
        cases.append(bench.Case(name, lambda n, run=run: [run() for _ in range(n)]))
    seconds = bench.interleave(cases, rounds=options.rounds, inner=2)
    rows = [[name, str(sum(lengths[name])), f"{s * 1e3:.1f}"] for name, s in seconds.items()]
    return table(("lengths", "tokens", "ms"), rows)


def memory(options: argparse.Namespace) -> str:
    """Temporary memory of a compiled chunk of 256 tokens, whatever the capacity."""
    rows = []
    for kind in ("paged", "contiguous"):
        for name in ("bf16", "turbo4"):
            sizes = [_temp_bytes(kind, name, capacity) for capacity in (4096, 32768)]
            rows.append([kind, name, *(f"{size / 2**20:.1f}" for size in sizes)])
    return table(("cache", "format", "MiB, 4k tokens", "MiB, 32k tokens"), rows)


def _temp_bytes(kind: str, name: str, capacity: int) -> int:
    config = bench.Shape(context=capacity - 64).config(name)
    if kind == "paged":
        make = functools.partial(jaxkv.init, config)
    else:
        make = functools.partial(jaxkv.init_contiguous, config, batch=1, capacity=capacity)
    cache = jax.eval_shape(make)
    q, kv = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.float32) for heads in (32, 8))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, q, k, v):
        cache, plan = jaxkv.reserve(cache, jnp.asarray([256]), max_new_tokens=256)
        cache = jaxkv.write(cache, 0, k, v, plan)
        return cache, jaxkv.attend(cache, 0, q, plan)

    analysis = step.lower(cache, q, kv, kv).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def step(options: argparse.Namespace) -> str:
    """A decode step of SmolLM2-135M with 64 and with 4096 tokens of context."""
    from jaxkv.models import load_gguf

    model, _ = load_gguf()
    rows = []
    for name in ("f16", "fp8", "turbo4"):
        cases = list(_step_cases(model, name, (64, 4096)))
        seconds = bench.interleave(cases, rounds=options.rounds, inner=2)
        short, long = (seconds[case.name] * 1e3 for case in cases)
        promise = f"{STEP_PROMISES[name]:.0f}" if name in STEP_PROMISES else ""
        rows.append([name, f"{short:.1f}", f"{long:.1f}", f"{long - short:+.1f}", promise])
    return table(("", "ms at 64", "ms at 4096", "difference", "promised"), rows)


def _step_cases(model: Any, name: str, contexts: Sequence[int]) -> Iterator[bench.Case]:
    config = model.config.cache_config(
        format=name, num_blocks=288, max_sequences=1, max_blocks_per_sequence=288
    )
    append = jax.jit(lambda c, n: jaxkv.reserve(c, n[None], max_new_tokens=4096)[0])

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(model, cache, n):
        def body(_, carry):
            cache, token = carry
            cache, plan = jaxkv.reserve(cache, jnp.ones(1, jnp.int32))
            hidden, cache = model.hidden(token, cache, plan)
            return cache, jnp.argmax(model.logits(hidden), -1).astype(jnp.int32)

        token = jnp.ones((1, 1), jnp.int32)
        return jax.lax.fori_loop(0, n, body, (cache, token))[0]

    def runner(cache: jaxkv.PagedCache) -> Callable[[int], object]:
        def run(n: int) -> object:
            nonlocal cache
            cache = decode(model, cache, jnp.int32(8 * n))
            return cache.lengths

        return run

    for context in contexts:
        cache = append(jaxkv.init(config), jnp.int32(context))
        yield bench.Case(str(context), runner(cache), per_run=8)


SECTIONS = (attention, write, reserve, prefill, ragged, memory, step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("sections", nargs="*", help=", ".join(names))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one process, medians as JSON")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(names):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if options.json:
        cases = list(bench.attention_cases(SHAPE, options.formats.split(",")))
        print(json.dumps(bench.interleave(cases, rounds=options.rounds)))
        return
    for section in SECTIONS:
        if not options.sections or section.__name__ in options.sections:
            print(f"\n{section.__doc__}\n\n{section(options)}", flush=True)


if __name__ == "__main__":
    main()
