"""What sharing, swapping and saving are worth: hit rates, tokens per second, copy rates, sizes.

Sections: prefix (requests that share a prompt's beginning, with and without a prefix cache), swap
(a sequence to the host and back) and save (a sequence to disk and back); all by default.

    python benchmarks/sharing.py [sections] [--requests 16] [--shared 1024] [--layers 4]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from jaxkv.models import Llama, LlamaConfig

FORMATS = ("bf16", "fp8k_turbo4v", "turbo4")
OWN_TOKENS, NEW_TOKENS = 32, 32
ROUNDS = 5


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - started, result


def prefix(options: argparse.Namespace) -> str:
    """Tokens per second of requests that begin alike, without and with sharing."""
    geometry = LlamaConfig(
        vocab_size=4096,
        num_layers=options.layers,
        features=576,
        mlp_features=1536,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    model = Llama(geometry, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    common = rng.integers(0, 4096, options.shared).tolist()
    prompts = [common + rng.integers(0, 4096, OWN_TOKENS).tolist() for _ in range(options.requests)]
    columns = -(-(options.shared + OWN_TOKENS + NEW_TOKENS) // 16)
    config = geometry.cache_config(
        format="fp8k_turbo4v",
        num_blocks=columns * options.requests,
        max_sequences=options.requests,
        max_blocks_per_sequence=columns,
    )
    rows, answers = [], []
    for shares in (False, True):
        tree = jaxkv.PrefixCache(config) if shares else None
        cache = jaxkv.init(config)
        # The first two requests compile.
        for batch in (prompts[:2], prompts):
            cache = cache if tree is None else tree.clear(cache)
            scheduler = jaxkv.Scheduler(model, cache, chunk=64, prefix=tree, tokens_per_step=128)
            for prompt in batch:
                scheduler.submit(prompt, NEW_TOKENS)
            started, least = time.perf_counter(), config.num_blocks
            while not scheduler.is_idle:
                scheduler.step()
                least = min(least, scheduler.num_free_blocks)
            seconds = time.perf_counter() - started
            cache = scheduler.cache
        answers.append([scheduler.answer(i) for i in range(len(prompts))])
        s = scheduler.statistics
        used = (config.num_blocks - least) * config.block_bytes_total / 2**20
        reused = s.tokens_reused / sum(map(len, prompts))
        rows.append(
            [
                "shared" if shares else "alone",
                f"{seconds:.1f}",
                f"{s.tokens / seconds:.1f}",
                f"{s.tokens_computed:,}",
                f"{reused:.0%}",
                f"{used:.1f}",
            ]
        )
    same = "the same" if answers[0] == answers[1] else "different"
    header = ("", "seconds", "tokens/s", "tokens computed", "prompt reused", "MiB of blocks")
    title = (
        f"{options.requests} requests at once, {options.shared} tokens of their prompts alike, "
        f"{OWN_TOKENS} own, {NEW_TOKENS} new; {options.layers} layers, 3 KV heads of 64, "
        f"{config.format}; answers {same}"
    )
    return f"{title}\n{table(header, rows)}"


def filled_cache(fmt: str, tokens: int) -> jaxkv.PagedCache:
    """A sequence of random tokens in slot 0 of 8 layers with 8 KV heads of 128."""
    columns = tokens // 16
    config = jaxkv.CacheConfig(
        num_layers=8,
        num_kv_heads=8,
        head_dim=128,
        num_blocks=columns + 8,
        max_sequences=2,
        max_blocks_per_sequence=columns,
        format=fmt,
    )
    cache, _ = jaxkv.reserve(jaxkv.init(config), [tokens, 0], total_tokens=tokens)
    rng = np.random.default_rng(0)

    def random_pages(leaf: jax.Array) -> jax.Array:
        raw = rng.integers(0, 256, leaf.nbytes, np.uint8).view(leaf.dtype)
        return jnp.array(raw.reshape(leaf.shape))

    # Any bytes will do: nothing is computed with them.
    return dataclasses.replace(cache, layers=jax.tree.map(random_pages, cache.layers))


def forget_cached(folder: str) -> None:
    """Asks the system to drop its copies of files, so that they are next read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for entry in os.scandir(folder):
        with open(entry.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def swap(options: argparse.Namespace) -> str:
    """GB/s of a sequence that goes to the host, or to disk, and comes back.

    What comes back from disk was read there: the store keeps no copy, nor is the system to.
    """
    rows = []
    for fmt in FORMATS:
        for where in ("memory", "disk"):
            cache = filled_cache(fmt, options.tokens)
            size = options.tokens * cache.config.bytes_per_token
            with tempfile.TemporaryDirectory() as folder:
                path = folder if where == "disk" else None
                store = jaxkv.BlockStore(path, max_bytes=2**32, memory_bytes=0)
                seconds_out, seconds_in = [], []
                for _ in range(ROUNDS + 1):
                    seconds, cache = timed(lambda c=cache, s=store: jaxkv.swap_out(c, 0, s))
                    seconds_out.append(seconds)
                    forget_cached(folder)
                    seconds, cache = timed(lambda c=cache, s=store: jaxkv.swap_in(c, 0, s))
                    seconds_in.append(seconds)
            # The first round compiles.
            rates = [size / statistics.median(s[1:]) / 1e9 for s in (seconds_out, seconds_in)]
            rows.append([fmt, where, f"{size / 2**20:.1f}", *(f"{rate:.2f}" for rate in rates)])
    title = f"one sequence of {options.tokens} tokens, 8 layers of 8 KV heads of 128"
    return f"{title}\n{table(('format', 'to', 'MiB', 'GB/s out', 'GB/s in'), rows)}"


def save(options: argparse.Namespace) -> str:
    """Seconds and bytes of a sequence that is saved and loaded."""
    rows = []
    for fmt in FORMATS:
        cache = filled_cache(fmt, options.tokens)
        size = options.tokens * cache.config.bytes_per_token
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "sequence")
            saving, _ = timed(lambda c=cache, p=path: jaxkv.save(p, c, slot=0))
            empty = jaxkv.release(cache, np.array([True, False]))
            loading, _ = timed(lambda c=empty, p=path: jaxkv.load(p, c.config, cache=c, slot=0))
            on_disk = sum(
                os.path.getsize(os.path.join(root, file))
                for root, _, files in os.walk(path)
                for file in files
            )
        row = [f"{size / 2**20:.1f}", f"{on_disk / 2**20:.1f}", f"{saving:.2f}", f"{loading:.2f}"]
        rows.append([fmt, *row])
    header = ("format", "MiB of blocks", "MiB on disk", "s to save", "s to load")
    return f"one sequence of {options.tokens} tokens, first call\n{table(header, rows)}"


SECTIONS = {"prefix": prefix, "swap": swap, "save": save}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of the sequence moved")
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        print(f"## {name}\n\n{SECTIONS[name](options)}\n", flush=True)


if __name__ == "__main__":
    main()
