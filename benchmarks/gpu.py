"""Checks and times the GPU kernels on a real GPU, in one command.

    python benchmarks/gpu.py            # one H200: under 8 minutes, compilation included

It checks every kernel against a plain f32 oracle, times decode attention and paged writes, measures
the machine's copy bandwidth and what else is installed, and writes one JSON and one table to
benchmarks/results/. Nothing in this file has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv.codecs import Pages, decode_pages, decode_rows, encode_rows, rotate
from jaxkv.formats import FORMATS, SideSpec
from jaxkv.qkv import rotate_pairs
from pallas_kernels.row_blocks import LeftOut
from pallas_kernels.sides import Side
from pallas_kernels.tuning import default_tuning

RESULTS = pathlib.Path(__file__).parent / "results"
HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 8, 4, 128, 64
BATCHES, CONTEXTS = (1, 16, 64), (2048, 8192, 32768)
WRITE_BATCHES, WRITE_POOLS = (1, 64, 256), (1, 16)
TOLERANCE = {jnp.bfloat16: 2e-2, jnp.float16: 4e-3}
# Seconds after which no new measurement starts.
TIME_LIMIT = 440.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's pages and the sequences over them."""

    k_spec: SideSpec = dataclasses.field(metadata=dict(static=True))
    v_spec: SideSpec = dataclasses.field(metadata=dict(static=True))
    k_pages: Pages
    v_pages: Pages
    tables: jax.Array
    lengths: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def random_pages(key: jax.Array, spec: SideSpec, blocks: int, heads: int, scale: Any) -> Pages:
    """A pool of distinct memory whose contents repeat every 64 blocks."""
    unique = min(blocks, 64)
    x = jax.random.normal(key, (unique, heads, BLOCK_SIZE, spec.head_dim))
    rows, _ = jax.jit(lambda x: encode_rows(x, spec, scale))(x)
    scales = rows.scales
    if scales is not None and scales.ndim == 4:
        scales = jnp.swapaxes(scales, -1, -2)

    def repeat(leaf: jax.Array) -> jax.Array:
        return jnp.tile(leaf, (-(-blocks // unique), *[1] * (leaf.ndim - 1)))[:blocks]

    return jax.tree.map(repeat, Pages(rows.data, scales))


def make_layer(
    k: str,
    v: str,
    batch: int,
    context: int,
    *,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    encoding: Any = "searched",
    num_blocks: int | None = None,
    first_block: int = 0,
) -> Layer:
    """Random pages, and a table of shuffled blocks from `first_block` on."""
    k_spec, v_spec = (SideSpec(FORMATS[name], head_dim, encoding) for name in (k, v))
    columns = context // BLOCK_SIZE
    blocks = num_blocks or batch * columns
    keys = jax.random.split(jax.random.key(0), 2)
    scale = jnp.float32(0.01)
    k_scale, v_scale = (scale if s.format.name == "fp8" else None for s in (k_spec, v_spec))
    k_pages = random_pages(keys[0], k_spec, blocks, heads, k_scale)
    v_pages = random_pages(keys[1], v_spec, blocks, heads, v_scale)
    order = np.random.default_rng(0).permutation(batch * columns) + first_block
    tables = jnp.asarray(order.reshape(batch, columns), jnp.int32)
    lengths = jnp.full((batch,), context, jnp.int32)
    return Layer(k_spec, v_spec, k_pages, v_pages, tables, lengths, k_scale, v_scale)


def attend(layer: Layer, q: jax.Array, starts: jax.Array, **options: Any) -> Any:
    """Our kernel over a layer; q [S, T, q_heads, D]."""
    new_tokens = jnp.full(len(starts), q.shape[1], jnp.int32)
    return pallas_kernels.paged_attention(
        q,
        layer.k_pages,
        layer.v_pages,
        layer.tables,
        starts,
        new_tokens,
        k_spec=layer.k_spec,
        v_spec=layer.v_spec,
        scale=layer.k_spec.head_dim**-0.5,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        **options,
    )


@functools.partial(jax.jit, static_argnames=("window", "left_out"))
def oracle(
    q: Any, k: Any, v: Any, starts: Any, window: int | None = None, left_out: int | None = None
) -> jax.Array:
    """Plain f32 attention; k, v [S, heads, context, D] decoded."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[1]
    q = q.astype(jnp.float32).reshape(*q.shape[:2], k.shape[1], group, q.shape[-1])
    precise = functools.partial(jnp.einsum, precision="highest")
    scores = precise("sthgd,shcd->shgtc", q, k) * k.shape[-1] ** -0.5
    position = starts[:, None] + jnp.arange(tokens)
    key = jnp.arange(k.shape[2])
    seen = key <= position[..., None]
    if window is not None:
        seen &= key > position[..., None] - window
    if left_out is not None:
        seen &= (key >= 2) & (position[..., None] - key >= left_out)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    out = precise("shgtc,shcd->sthgd", weights, v)
    return out.reshape(*out.shape[:2], -1, v.shape[-1])


def gathered(pages: Pages, spec: SideSpec, scale: Any, tables: jax.Array) -> jax.Array:
    """The decoded context of each sequence, f32 [S, heads, context, D]."""
    num, columns = tables.shape
    part = jax.tree.map(lambda leaf: leaf[tables.reshape(-1)], pages)
    rows = decode_pages(part, spec, scale).reshape(num, columns, -1, BLOCK_SIZE, spec.head_dim)
    return rows.swapaxes(1, 2).reshape(num, rows.shape[2], -1, spec.head_dim)


def check_attention(
    layer: Layer,
    tokens: int,
    window: int | None = None,
    path: Any = None,
    left_out: int | None = None,
    interpret: Any = None,
) -> float:
    """The largest error of a kernel; raises AssertionError where it is too large.

    With `left_out` two first keys and the nearest `left_out` of every query are not seen.
    """
    heads = layer.k_pages.data[0].shape[1]
    shape = (len(layer.tables), tokens, heads * GROUP, layer.k_spec.head_dim)
    q = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    starts = layer.lengths - tokens - jnp.arange(len(layer.tables)) * 37
    options: dict[str, Any] = dict(window=window, interpret=interpret)
    if left_out is not None:
        first, since = jnp.full_like(starts, 2), jnp.zeros_like(starts)
        options["left_out"] = LeftOut(first, since, left_out)
    k_side, v_side = Side(layer.k_spec, BLOCK_SIZE), Side(layer.v_spec, BLOCK_SIZE)
    if path is not None:
        options["tuning"] = default_tuning(k_side, v_side, tokens * GROUP, path)
    out, lse = attend(layer, q, starts, **options)
    k = gathered(layer.k_pages, layer.k_spec, layer.k_scale, layer.tables)
    v = gathered(layer.v_pages, layer.v_spec, layer.v_scale, layer.tables)
    error = float(jnp.abs(out - oracle(q, k, v, starts, window, left_out)).max())
    tolerance = max(TOLERANCE[side.dtype] for side in (k_side, v_side))
    assert np.isfinite(np.asarray(lse)).all() and error <= tolerance, f"error {error}"
    return error


def check_write(
    k: str, v: str, *, head_dim: int = HEAD_DIM, fused: bool = False, interpret: Any = None
) -> float:
    """By how much a kernel's stored rows err more than the codec's; fails where that is much.

    The squared error of the stored rows is compared, and every other slot byte for byte.
    """
    heads, num_q_heads, tokens = 2, 4, 40
    layer = make_layer(k, v, 1, 4 * BLOCK_SIZE, heads=heads, head_dim=head_dim)
    keys = jax.random.split(jax.random.key(6), 3)
    slots = jax.random.permutation(keys[0], 4 * BLOCK_SIZE)[:tokens].astype(jnp.int32)
    slots = slots.at[3].set(-1)
    shape = (tokens, (num_q_heads + 2 * heads) * head_dim)
    qkv = jax.random.normal(keys[1], shape, jnp.bfloat16)
    parts = qkv.reshape(tokens, -1, head_dim).astype(jnp.float32)
    x_k, x_v = parts[:, num_q_heads:-heads], parts[:, -heads:]
    pages = (layer.k_pages, layer.v_pages)
    specs = dict(k_spec=layer.k_spec, v_spec=layer.v_spec, interpret=interpret)
    specs |= dict(k_scale=layer.k_scale, v_scale=layer.v_scale)
    if fused:
        turns = jax.random.uniform(keys[2], (tokens, head_dim // 2), maxval=6.0)
        angles = jnp.cos(turns), jnp.sin(turns)
        _, *new, _ = pallas_kernels.paged_qkv_write(
            qkv, *pages, slots, num_q_heads=num_q_heads, rope_style="half", angles=angles, **specs
        )
        x_k = rotate_pairs(x_k, *angles, "half")
    else:
        *new, _ = pallas_kernels.paged_write(
            x_k.astype(jnp.bfloat16), x_v.astype(jnp.bfloat16), *pages, slots, **specs
        )
    worst = 0.0
    scales = (layer.k_scale, layer.v_scale)
    for x, spec, scale, old, got in zip(
        (x_k, x_v), (layer.k_spec, layer.v_spec), scales, pages, new
    ):
        rows = np.asarray(decode_pages(got, spec, scale)).swapaxes(1, 2)
        before = np.asarray(decode_pages(old, spec, scale)).swapaxes(1, 2)
        flat = rows.reshape(-1, heads, head_dim)
        used = np.asarray(slots)[np.asarray(slots) >= 0]
        others = np.setdiff1d(np.arange(len(flat)), used)
        same = flat[others] == before.reshape(flat.shape)[others]
        assert same.all(), f"{(~same).sum()} elements beside the written slots changed"
        target = np.asarray(rotate(x, spec))[np.asarray(slots) >= 0]
        encoded, _ = encode_rows(rotate(x, spec), spec, scale)
        codec = np.asarray(decode_rows(encoded.data, encoded.scales, spec, scale))
        error = ((flat[used] - target) ** 2).mean()
        reference = ((codec[np.asarray(slots) >= 0] - target) ** 2).mean()
        # 16-bit storage of bf16 input is exact but for RoPE's last bits.
        excess = float(max(error - reference, 0) / max(reference, 1e-6))
        assert excess <= 0.01, f"squared error {error} against the codec's {reference}"
        worst = max(worst, excess)
    return worst


def correctness(log: Callable[..., None], deadline: float) -> list[dict[str, Any]]:
    """Every kernel against the oracle: what was checked, its error or what went wrong."""
    names = list(FORMATS)
    pairs = [("fp8", "turbo4"), ("turbo4", "turbo3"), ("bf16", "turbo2"), ("turbo3", "turbo8")]
    checks: list[tuple[str, Callable[[], float]]] = []

    def add(name: str, k: str, v: str, tokens: int, layer: Any = None, **options: Any) -> None:
        fields = layer or {}

        def run() -> float:
            built = make_layer(k, v, fields.pop("batch", 2), 4096, **{"heads": 2, **fields})
            return check_attention(built, tokens, **options)

        checks.append((name, run))

    for name in names:
        add(f"decode {name}", name, name, 1)
        add(f"mma {name}", name, name, 1, path="mma")
        add(f"prefill {name}", name, name, 64)
    for name in names:
        add(f"decode {name} head_dim 64", name, name, 1, {"head_dim": 64})
        add(f"decode {name} head_dim 256", name, name, 1, {"head_dim": 256})
    for k, v in pairs:
        add(f"decode {k}k_{v}v", k, v, 4, window=1000)
    for name in ("turbo4", "turbo3", "turbo2"):
        add(f"decode {name} reference", name, name, 1, {"encoding": "reference"})
    add("decode turbo4, recent keys left out", "turbo4", "turbo4", 1, left_out=64)
    add("verify fp8k_turbo4v, the same", "fp8", "turbo4", 4, window=1000, left_out=64)
    for name in names:
        checks.append((f"write {name}", functools.partial(check_write, name, name)))
    for k, v in pairs:
        run = functools.partial(check_write, k, v, fused=True)
        checks.append((f"fused write {k}k_{v}v", run))
    big = {"batch": 1, "heads": 8, "num_blocks": 40_000, "first_block": 39_900}
    add("pool above 2^31 elements", "fp8", "fp8", 1, big)
    results = []
    for name, run in checks:
        if time.monotonic() > deadline:
            results.append({"check": name, "skipped": "out of time"})
            continue
        try:
            results.append({"check": name, "error": run()})
        except Exception as error:  # One kernel's failure must not hide the others'.
            results.append({"check": name, "failed": f"{type(error).__name__}: {error}"[:500]})
        log(results[-1])
    return results


def seconds(step: Callable[..., jax.Array], q: jax.Array, context: Any, repeats: int) -> float:
    """Median seconds of `step(q, context)`, looped on the device, each fed by the last.

    The context is an argument of the loop: a captured array would be copied into the program.
    """

    @jax.jit
    def loop(q: jax.Array, context: Any) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            return q + 0 * step(q, context).astype(q.dtype)

        return jax.lax.fori_loop(0, repeats, body, q)

    jax.block_until_ready(loop(q, context))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(loop(q, context))
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a copy, reads and writes counted."""
    x = jnp.zeros((1 << 30,), jnp.int8)
    copy = jax.jit(lambda x: x + jnp.int8(1), donate_argnums=0)
    x = jax.block_until_ready(copy(x))
    start = time.perf_counter()
    for _ in range(20):
        x = copy(x)
    jax.block_until_ready(x)
    return 20 * 2 * x.nbytes / (time.perf_counter() - start)


def context_bytes(layer: Layer) -> int:
    """Bytes of pages that one decode step reads."""
    per_block = (layer.k_pages.nbytes + layer.v_pages.nbytes) / layer.k_pages.num_blocks
    return int(per_block * layer.tables.size)


def time_decode(name: str, batch: int, context: int) -> dict[str, Any]:
    """One decode step of one format."""
    layer = make_layer(name, name, batch, context)
    q = jax.random.normal(jax.random.key(2), (batch, 1, HEADS * GROUP, HEAD_DIM), jnp.bfloat16)
    repeats = max(5, min(200, int(2e10 / context_bytes(layer))))
    took = seconds(lambda q, layer: attend(layer, q, layer.lengths - 1)[0], q, layer, repeats)
    return {"what": f"decode {name}", "seconds": took, "bytes": context_bytes(layer)}


def time_peers(batch: int, context: int) -> list[dict[str, Any]]:
    """What else attends to bf16 contexts here; absent where it does not run."""
    shape = (batch, context, HEADS, HEAD_DIM)
    k = jax.random.normal(jax.random.key(3), shape, jnp.bfloat16)
    q = jax.random.normal(jax.random.key(4), (batch, 1, HEADS * GROUP, HEAD_DIM), jnp.bfloat16)
    peers: dict[str, Callable[[], float]] = {}
    for implementation in ("xla", "cudnn"):
        sdpa = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        peers[f"jax dot_product_attention {implementation}"] = functools.partial(
            seconds, lambda q, k, sdpa=sdpa: sdpa(q, k, k), q, k, 10
        )
    peers["jax paged_attention (deprecated)"] = lambda: _time_jax_paged(q, k)
    peers["torch sdpa"] = lambda: _time_torch(batch, context)
    out = []
    for name, run in peers.items():
        try:
            out.append({"what": name, "seconds": run(), "bytes": 2 * k.nbytes})
        except Exception as error:  # A peer that does not run here is reported as such.
            out.append({"what": name, "absent": f"{type(error).__name__}: {error}"[:200]})
    return out


def _time_jax_paged(q: jax.Array, k: jax.Array) -> float:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    batch, context = k.shape[:2]
    pages = k.reshape(-1, BLOCK_SIZE, HEADS, HEAD_DIM).transpose(2, 0, 1, 3)
    tables = jnp.arange(batch * context // BLOCK_SIZE, dtype=jnp.int32).reshape(batch, -1)
    lengths = jnp.full((batch,), context, jnp.int32)

    def step(q: jax.Array, pages: jax.Array) -> jax.Array:
        return paged_attention(q[:, 0], pages, pages, tables, lengths)[:, None]

    return seconds(step, q, pages, 10)


def _time_torch(batch: int, context: int) -> float:
    import torch

    options = dict(dtype=torch.bfloat16, device="cuda")
    q = torch.randn(batch, HEADS * GROUP, 1, HEAD_DIM, **options)
    k = torch.randn(batch, HEADS, context, HEAD_DIM, **options)
    run = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, q, k, k, enable_gqa=True
    )
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def time_write(name: str, batch: int, pool: int) -> dict[str, Any]:
    """One paged write of `batch` tokens into a pool of `pool` times 1024 blocks."""
    layer = make_layer(name, name, 1, BLOCK_SIZE, num_blocks=1024 * pool)
    x = jax.random.normal(jax.random.key(5), (batch, HEADS, HEAD_DIM), jnp.bfloat16)
    slots = jnp.arange(batch, dtype=jnp.int32) * BLOCK_SIZE % (1024 * BLOCK_SIZE)

    def write(k_pages: Pages, v_pages: Pages) -> Any:
        return pallas_kernels.paged_write(
            x,
            x,
            k_pages,
            v_pages,
            slots,
            k_spec=layer.k_spec,
            v_spec=layer.v_spec,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )[:2]

    repeats = 100
    loop = jax.jit(
        lambda pages: jax.lax.fori_loop(0, repeats, lambda _, p: write(*p), pages),
        donate_argnums=0,
    )
    pages = jax.block_until_ready(loop((layer.k_pages, layer.v_pages)))
    start = time.perf_counter()
    jax.block_until_ready(loop(pages))
    took = (time.perf_counter() - start) / repeats
    return {"what": f"write {name}", "seconds": took, "batch": batch, "pool": pool}


def measure(log: Callable[..., None], deadline: float) -> list[dict[str, Any]]:
    """All timings, most important first, until the time is used up."""
    jobs: list[tuple[dict[str, int], Callable[[], Any]]] = []
    points = [(16, 8192), *((b, c) for b in BATCHES for c in CONTEXTS if (b, c) != (16, 8192))]
    for batch, context in points:
        where = {"batch": batch, "context": context}
        jobs += [(where, functools.partial(time_decode, f, batch, context)) for f in FORMATS]
        jobs.append((where, functools.partial(time_peers, batch, context)))
    writes = [
        ({"batch": batch, "pool": pool}, functools.partial(time_write, name, batch, pool))
        for name in ("bf16", "fp8", "turbo4")
        for batch in WRITE_BATCHES
        for pool in WRITE_POOLS
    ]
    jobs[len(FORMATS) + 1 : len(FORMATS) + 1] = writes
    out: list[dict[str, Any]] = []
    for where, run in jobs:
        if time.monotonic() > deadline:
            out.append({**where, "skipped": "out of time"})
            continue
        try:
            found = run()
        except Exception as error:  # One failure must not lose the rest of the run.
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        for item in found if isinstance(found, list) else [found]:
            out.append({**where, **item})
            log(out[-1])
    return out


def table(timings: list[dict[str, Any]], copy: float) -> str:
    """Decode timings as text: bandwidth, its share of the copy's, and the ratio to our bf16."""
    lines = [f"{'':<36}{'batch':>6}{'context':>8}{'us':>9}{'GB/s':>7}{'of copy':>9}{'x bf16':>8}"]
    ours = {
        (t["batch"], t["context"]): t["seconds"]
        for t in timings
        if t.get("what") == "decode bf16" and "seconds" in t
    }
    for t in timings:
        if "seconds" not in t or "context" not in t:
            continue
        rate = t["bytes"] / t["seconds"]
        bf16 = ours.get((t["batch"], t["context"]))
        ratio = f"{bf16 / t['seconds']:>8.2f}" if bf16 else f"{'':>8}"
        lines.append(
            f"{t['what']:<36}{t['batch']:>6}{t['context']:>8}{t['seconds'] * 1e6:>9.1f}"
            f"{rate / 1e9:>7.0f}{rate / copy:>9.0%}{ratio}"
        )
    lines += ["", f"{'':<36}{'batch':>6}{'pool':>8}{'us':>9}"]
    lines += [
        f"{t['what']:<36}{t['batch']:>6}{t['pool']:>7}x{t['seconds'] * 1e6:>9.1f}"
        for t in timings
        if "seconds" in t and "pool" in t
    ]
    return "\n".join(lines)


def main() -> None:
    """Checks, measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--checks-only", action="store_true")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        sys.exit(f"benchmarks/gpu.py needs an NVIDIA GPU; the default device is a {device}")
    start = time.monotonic()

    def log(item: Any) -> None:
        print(f"{time.monotonic() - start:6.1f}s {json.dumps(item)}", flush=True)

    result: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "shape": dict(kv_heads=HEADS, group=GROUP, head_dim=HEAD_DIM, block_size=BLOCK_SIZE),
    }
    share = 1.0 if arguments.checks_only else 0.45
    result["checks"] = correctness(log, start + share * TIME_LIMIT)
    text = ""
    if not arguments.checks_only:
        result["copy_bytes_per_second"] = copy_bandwidth()
        result["timings"] = measure(log, start + TIME_LIMIT)
        text = table(result["timings"], result["copy_bytes_per_second"])
    failed = [c["check"] for c in result["checks"] if "error" not in c]
    text += f"\n{len(result['checks']) - len(failed)} of {len(result['checks'])} checks passed\n"
    text += "".join(f"not passed: {name}\n" for name in failed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = f"gpu-{device.device_kind.lower().replace(' ', '-')}-{result['date']}"
    (arguments.out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / f"{stem}.txt").write_text(text)
    print(text)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
