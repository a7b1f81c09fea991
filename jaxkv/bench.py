"""Speed of write, attend and reserve on the device at hand, as ratios within one run.

Rounds are interleaved, so that whatever else the machine does falls on all cases alike, and
medians are compared. The yardstick of attention is an einsum over dense head-major f32; beside it
stands `jax.nn.dot_product_attention` over contiguous f32, what most people would write.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import blocks
from jaxkv.blocks import BlockPool
from jaxkv.cache import PagedCache, attend, init, reserve, write
from jaxkv.config import CacheConfig
from jaxkv.sequences import Sequences, StepPlan

Progress = Callable[[int, int], None]

# Names of the two yardsticks of attention.
DENSE = "dense f32"
LIBRARY = "jax.nn f32"

# Writes of one timed loop.
_WRITES = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is measured: one layer, in tokens, heads and elements."""

    batch: int = 1
    context: int = 4096
    num_kv_heads: int = 8
    num_q_heads: int = 32
    head_dim: int = 128
    block_size: int = 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"{field.name}: got {getattr(self, field.name)}, expected at least 1"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: got {self.num_q_heads}, expected a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )

    def config(self, format: str, *, pool_factor: int = 1) -> CacheConfig:
        """A cache of one layer that holds the batch, times `pool_factor` in blocks."""
        columns = -(-(self.context + 64) // self.block_size)
        return CacheConfig(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=self.batch * columns * pool_factor,
            max_sequences=self.batch,
            max_blocks_per_sequence=columns,
            format=format,
        )


@dataclasses.dataclass
class Case:
    """Something to time.

    Attributes:
      name: what it is.
      run: runs it `n` times and returns what to wait for.
      per_run: how many steps one run makes; seconds are per step.
    """

    name: str
    run: Callable[[int], object]
    per_run: int = 1


def interleave(
    cases: Sequence[Case], *, rounds: int = 15, inner: int = 3, progress: Progress | None = None
) -> dict[str, float]:
    """Median seconds of one step of each case, over interleaved rounds.

    Args:
      cases: what to time; each is warmed up once.
      rounds: how many medians are over.
      inner: runs per measurement.
      progress: called with (done, total).
    """
    for case in cases:
        jax.block_until_ready(case.run(1))
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    total = rounds * len(cases)
    for done in range(total):
        case = cases[done % len(cases)]
        start = time.perf_counter()
        jax.block_until_ready(case.run(inner))
        elapsed = time.perf_counter() - start
        seconds[case.name].append(elapsed / (inner * case.per_run))
        if progress is not None:
            progress(done + 1, total)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@jax.jit
def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Decode attention by einsum over head-major f32.

    Args:
      q: [batch, kv_heads, group, dim].
      k: [batch, kv_heads, tokens, dim].
      v: [batch, kv_heads, tokens, dim].

    Returns:
      [batch, kv_heads, group, dim].
    """
    scores = jnp.einsum("bhgd,bhtd->bhgt", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhgt,bhtd->bhgd", jax.nn.softmax(scores, -1), v)


def filled(config: CacheConfig, context: int) -> tuple[PagedCache, StepPlan]:
    """A cache with `context` random tokens in every sequence, and the plan of its last one."""
    spec = config.layer(0)
    chunk = min(context - 1, 1024)

    @functools.partial(jax.jit, static_argnames="tokens", donate_argnames="cache")
    def append(
        cache: PagedCache, key: jax.Array, count: jax.Array, tokens: int
    ) -> tuple[PagedCache, StepPlan]:
        new = jnp.full(config.max_sequences, count, jnp.int32)
        cache, plan = reserve(cache, new, max_new_tokens=tokens)
        lead = (*plan.token_shape, spec.num_kv_heads)
        k, v = jax.random.normal(key, (2, *lead, spec.head_dim), jnp.float32)
        return write(cache, 0, k, v, plan), plan

    cache, done = init(config), 0
    while done < context - 1:
        count = min(chunk, context - 1 - done)
        cache, _ = append(cache, jax.random.key(done), jnp.int32(count), chunk)
        done += count
    return append(cache, jax.random.key(done), jnp.int32(1), 1)


def attention_cases(shape: Shape, formats: Sequence[str]) -> Iterator[Case]:
    """One decode step's attention: dense, `jax.nn`, then every format."""
    batch, heads, dim = shape.batch, shape.num_kv_heads, shape.head_dim
    group = shape.num_q_heads // heads
    q = _normal(batch, heads, group, dim)
    k, v = (
        _normal(batch, heads, shape.context, dim, seed=1),
        _normal(batch, heads, shape.context, dim, seed=2),
    )

    def repeat(run: Callable[[], object]) -> Callable[[int], object]:
        return lambda n: [run() for _ in range(n)]

    yield Case(DENSE, repeat(lambda: dense_attention(q, k, v)))
    library = jax.jit(jax.nn.dot_product_attention)
    rows = q.reshape(batch, 1, -1, dim)
    # Token-major, as that function wants it.
    k_rows, v_rows = jnp.swapaxes(k, 1, 2) + 0, jnp.swapaxes(v, 1, 2) + 0
    yield Case(LIBRARY, repeat(lambda: library(rows, k_rows, v_rows)))
    for name in formats:
        cache, plan = filled(shape.config(name), shape.context)
        yield Case(name, repeat(functools.partial(_attend, cache, rows, plan)))


@jax.jit
def _attend(cache: PagedCache, q: jax.Array, plan: StepPlan) -> jax.Array:
    out = attend(cache, 0, q, plan)
    assert isinstance(out, jax.Array)
    return out


def write_cases(
    shape: Shape, formats: Sequence[str], *, pool_factors: Sequence[int] = (1,)
) -> Iterator[Case]:
    """Writing one token of every sequence, for pools of several sizes."""
    for name in formats:
        for factor in pool_factors:
            config = shape.config(name, pool_factor=factor)
            cache, plan = reserve(init(config), jnp.ones(shape.batch, jnp.int32))
            kv = _normal(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim)
            yield Case(f"{name} x{factor}", _writer(cache, kv, plan), per_run=_WRITES)


def _writer(cache: PagedCache, kv: jax.Array, plan: StepPlan) -> Callable[[int], object]:
    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache: PagedCache, n: jax.Array) -> PagedCache:
        # The loop keeps the pools in place; only the marginal cost of a write is of interest.
        return jax.lax.fori_loop(0, n, lambda _, c: write(c, 0, kv[0], kv[1], plan), cache)

    state = cache

    def repeat(n: int) -> object:
        nonlocal state
        state = run(state, jnp.int32(_WRITES * n))
        return state.layers

    return repeat


def reserve_cases(num_sequences: int = 256, num_blocks: int = 2**20) -> Iterator[Case]:
    """Planning a decode step of many sequences in a large pool, inside a jitted loop.

    `reserve` by itself; `retain` of every last block and `reserve`, so that all sequences append
    into a shared block and plan a copy; and what a pool without a free stack does for each block:
    an argmin over all counts.
    """
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        num_blocks=num_blocks,
        max_sequences=num_sequences,
        max_blocks_per_sequence=64,
    )
    # The pages have no part in it, so a million of them need not exist.
    start = PagedCache(
        layers=(),
        k_scales=jnp.ones(1),
        v_scales=jnp.ones(1),
        pool=BlockPool.create(num_blocks),
        sequences=Sequences.create(num_sequences, 64),
        config=config,
    )
    ones = jnp.ones(num_sequences, jnp.int32)
    slots = jnp.arange(num_sequences)

    def plan(_: int, cache: PagedCache) -> PagedCache:
        return reserve(cache, ones)[0]

    def share_and_plan(_: int, cache: PagedCache) -> PagedCache:
        tails = cache.block_tables[slots, cache.lengths // config.block_size]
        pool = blocks.retain(cache.pool, tails)
        return reserve(dataclasses.replace(cache, pool=pool), ones)[0]

    def search(_: int, counts: jax.Array) -> jax.Array:
        def take(counts: jax.Array, _: None) -> tuple[jax.Array, None]:
            return counts.at[jnp.argmin(counts)].add(1), None

        return jax.lax.scan(take, counts, None, length=num_sequences)[0]

    # So many steps that copying the state once into the loop does not show.
    yield Case("reserve", _looper(plan, start, 512), per_run=512)
    yield Case("retain and reserve, all copy", _looper(share_and_plan, start, 512), per_run=512)
    yield Case("argmin per block", _looper(search, start.pool.counts, 1))


def _looper(body: Callable[[int, Any], Any], start: Any, steps: int) -> Callable[[int], object]:
    """Runs `body` `steps` times per run, in one jitted loop whose state starts anew."""

    @jax.jit
    def loop(state: Any, n: jax.Array) -> Any:
        return jax.lax.fori_loop(0, n, body, state)

    return lambda n: [loop(start, jnp.int32(steps)) for _ in range(n)]
