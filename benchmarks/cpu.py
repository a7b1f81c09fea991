"""Decode attention on a CPU: every format as a ratio to a dense f32 einsum, all in one run.

The dense yardstick is `einsum` on contiguous head-major f32 [heads, tokens, dim]; beside it stands
`jax.nn.dot_product_attention` on token-major f32, what most people would write. Rounds are
interleaved, so that what else the machine does falls on all alike; ratios are of medians.

    python benchmarks/cpu.py [--formats bf16,turbo4] [--rounds 15] [--processes 3]
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import attention, sequences
from jaxkv.blocks import BlockPool
from jaxkv.codecs import Pages, encode_rows, init_pages, scatter_rows
from jaxkv.formats import FORMATS, Format, SideSpec
from jaxkv.sequences import Sequences, StepPlan

KV_HEADS, Q_HEADS, HEAD_DIM, TOKENS, BLOCK_SIZE = 8, 32, 128, 4096, 16
# What the project promises, as ratios to dense; None where it promises only to beat the other.
TARGETS = {"bf16": 0.90, "int8": 0.85, "fp8": 0.85, "turbo4": 1.15, "nvfp4": 1.15}
TARGETS |= {"turbo3": 1.1, "turbo2": 1.1}

Timed = tuple[Callable, tuple]


@jax.jit
def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by einsum: q [kv_heads, group, dim], k and v [kv_heads, tokens, dim]."""
    scores = jnp.einsum("hgd,htd->hgt", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("hgt,htd->hgd", jax.nn.softmax(scores, -1), v)


@functools.partial(jax.jit, static_argnames="spec")
def fill(rows: jax.Array, slots: jax.Array, spec: SideSpec) -> Pages:
    """Pages that hold rows [tokens, heads, dim] in the plan's slots."""
    pages = init_pages(rows.shape[0] // BLOCK_SIZE + 8, rows.shape[1], BLOCK_SIZE, spec)
    encoded, _ = encode_rows(rows, spec)
    return scatter_rows(pages, encoded, slots // BLOCK_SIZE, slots % BLOCK_SIZE)


def decode_plan(tokens: int) -> tuple[StepPlan, jax.Array]:
    """The step that appends the last of `tokens` tokens over shuffled blocks, and all slots."""
    columns = tokens // BLOCK_SIZE
    order = np.random.default_rng(0).permutation(columns + 8).astype(np.int32)
    pool = BlockPool.create(columns + 8)
    pool = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(pool),
        [jnp.asarray(order) if x is pool.free_blocks else x for x in jax.tree.leaves(pool)],
    )
    state = Sequences.create(1, columns)
    reserve = functools.partial(sequences.reserve, block_size=BLOCK_SIZE)
    pool, state, first = reserve(pool, state, jnp.array([tokens - 1]), max_new_tokens=tokens)
    pool, state, plan = reserve(pool, state, jnp.array([1]))
    return plan, jnp.concatenate([first.slots[0, : tokens - 1], plan.slots[0]])


def cases(names: list[str]) -> dict[str, Timed]:
    """What is timed, by name."""
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM), np.float32))
    k, v = (
        jnp.asarray(rng.standard_normal((TOKENS, KV_HEADS, HEAD_DIM), np.float32)) for _ in "kv"
    )
    timed: dict[str, Timed] = {
        "dense": (dense, (q, jnp.array(k.swapaxes(0, 1)), jnp.array(v.swapaxes(0, 1)))),
        "jax.nn": (
            jax.jit(jax.nn.dot_product_attention),
            (q.reshape(1, 1, Q_HEADS, HEAD_DIM), k[None], v[None]),
        ),
    }
    plan, slots = decode_plan(TOKENS)
    for name in names:
        both = Format.parse(name)
        k_spec, v_spec = SideSpec(both.k, HEAD_DIM), SideSpec(both.v, HEAD_DIM)
        run = jax.jit(functools.partial(attention.attend_pages, k_spec=k_spec, v_spec=v_spec))
        args = (q.reshape(1, 1, Q_HEADS, HEAD_DIM), fill(k, slots, k_spec), fill(v, slots, v_spec))
        timed[name] = (run, (*args, plan))
    return timed


def measure(timed: dict[str, Timed], rounds: int, inner: int = 3) -> dict[str, float]:
    """Median seconds of each, over interleaved rounds."""
    for run, args in timed.values():
        jax.block_until_ready(run(*args))
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, (run, args) in timed.items():
            start = time.perf_counter()
            for _ in range(inner):
                result = run(*args)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / inner)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def table(runs: list[dict[str, float]]) -> str:
    """Best ratio to dense over processes, the promise, and the factor over jax.nn."""
    lines = [f"{'':10} {'ms':>7} {'x dense':>8} {'promise':>8} {'x faster than jax.nn':>21}"]
    for name in runs[0]:
        ratios = [run[name] / run["dense"] for run in runs]
        faster = max(run["jax.nn"] / run[name] for run in runs)
        best = min(run[name] for run in runs) * 1e3
        promise = f"{TARGETS[name]:8.2f}" if name in TARGETS else " " * 8
        lines.append(f"{name:10} {best:7.2f} {min(ratios):8.2f} {promise} {faster:21.1f}")
    return "\n".join(lines)


def main() -> None:
    """Runs several processes one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one process, medians as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(cases(options.formats.split(",")), options.rounds)))
        return
    command = [sys.executable, __file__, "--json", f"--formats={options.formats}"]
    command.append(f"--rounds={options.rounds}")
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(options.processes)
    ]
    print(table(runs))


if __name__ == "__main__":
    main()
