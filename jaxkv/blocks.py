"""The block pool: a stack of free block ids and a reference count per block.

Every function takes a pool and returns the new one. A bulk call equals its ids handled one at a
time in array order, duplicates included. Costs follow the number of ids, never the pool: the only
operations on pool-sized arrays are gathers and in-place scatters of those ids, and every gather
comes before the scatter to the same array, so that a donated or loop-carried pool is not copied.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv.faults import FaultKind, Faults, record_masks

EVENTS = ("allocate", "retain", "release", "copy", "release at zero")
"""Names of traced events. `copy`: a holder left a shared block for a copy of its own."""

ALLOCATE, RETAIN, RELEASE, COPY, RELEASE_AT_ZERO = range(len(EVENTS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EventTrace:
    """The last E events of each block.

    Attributes:
        events: int32[num_blocks, E, 3], rings of (index into `EVENTS`, count after, step).
        totals: int32[num_blocks], events of each block ever; the next goes to totals % E.
    """

    events: jax.Array
    totals: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Which blocks are free, and how many holders each of the others has.

    Attributes:
        free_blocks: int32[num_blocks], a stack: entries below `num_free` are the free blocks, the
            last of them is handed out next; entries above are left over and mean nothing.
        num_free: int32, height of the stack.
        counts: int32[num_blocks], holders of each block; 0 means free.
        faults: what went wrong so far.
        step: int32, how often `reserve` was called.
        trace: the last events of each block, or None.
    """

    free_blocks: jax.Array
    num_free: jax.Array
    counts: jax.Array
    faults: Faults
    step: jax.Array
    trace: EventTrace | None = None

    @classmethod
    def create(cls, num_blocks: int, trace_events: int = 0) -> BlockPool:
        """A pool of free blocks that hands out 0, 1, 2, ...

        Args:
            num_blocks: how many blocks, at least 1.
            trace_events: how many events to keep of each block; 0 keeps none and costs nothing.

        Raises:
            ValueError: for a number of blocks below 1 or of events below 0.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if trace_events < 0:
            raise ValueError(f"trace_events must be at least 0, got {trace_events}")
        trace = None
        if trace_events:
            trace = EventTrace(
                events=jnp.full((num_blocks, trace_events, 3), -1, jnp.int32),
                totals=jnp.zeros((num_blocks,), jnp.int32),
            )
        return cls(
            free_blocks=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.full((), num_blocks, jnp.int32),
            counts=jnp.zeros((num_blocks,), jnp.int32),
            faults=Faults.create(),
            step=jnp.zeros((), jnp.int32),
            trace=trace,
        )

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, free or not."""
        return self.counts.shape[-1]


def allocate(pool: BlockPool, wanted: ArrayLike) -> tuple[BlockPool, jax.Array]:
    """Pops a block for each wanted entry, in array order, until none is left.

    Args:
        pool: the pool.
        wanted: bool[n].

    Returns:
        The new pool and int32[n] block ids with count 1; -1 where not wanted or none was left.
        Each wanted entry that got none counts as exhausted, with its index as the place.

    Raises:
        TypeError: if `wanted` is not boolean.
        ValueError: if it does not have one axis.
    """
    wanted = jnp.asarray(wanted)
    if wanted.dtype != jnp.bool_:
        raise TypeError(f"wanted must be boolean, got dtype {wanted.dtype}")
    if wanted.ndim != 1:
        raise ValueError(f"wanted must have one axis, got shape {wanted.shape}")
    return _allocate(pool, wanted)


@jax.jit
def _allocate(pool: BlockPool, wanted: jax.Array) -> tuple[BlockPool, jax.Array]:
    order = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    is_granted = wanted & (order < pool.num_free)
    blocks = peek(pool, order, is_granted)
    trace = pool.trace
    if trace is not None:
        trace = trace_events(trace, blocks, ALLOCATE, 1, pool.step)
    pool = dataclasses.replace(
        pool,
        num_free=pool.num_free - jnp.sum(is_granted, dtype=jnp.int32),
        counts=add_counts(pool.counts, blocks, 1),
        faults=record_masks(
            pool.faults,
            {FaultKind.EXHAUSTED: wanted & ~is_granted},
            jnp.arange(wanted.shape[0], dtype=jnp.int32),
            step=pool.step,
        ),
        trace=trace,
    )
    return pool, blocks


def retain(pool: BlockPool, blocks: ArrayLike) -> BlockPool:
    """Adds one holder to each block.

    Args:
        pool: the pool.
        blocks: int32[n] block ids; negative ones are skipped, duplicates add up. An id past the
            pool, or of a block that nobody holds, is skipped and counted as bad id.

    Returns:
        The new pool.

    Raises:
        TypeError: if `blocks` is not an integer array.
        ValueError: if it does not have one axis.
    """
    return _retain(pool, as_int32("blocks", blocks, (None,)))


@jax.jit
def _retain(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    counts = holders(pool, blocks)
    held = jnp.where(counts > 0, blocks, -1)
    trace = pool.trace
    if trace is not None:
        trace = trace_events(trace, held, RETAIN, counts + occurrence_rank(held) + 1, pool.step)
    return dataclasses.replace(
        pool,
        counts=add_counts(pool.counts, held, 1),
        faults=record_masks(
            pool.faults,
            {FaultKind.BAD_ID: (blocks >= 0) & (counts == 0)},
            blocks,
            step=pool.step,
        ),
        trace=trace,
    )


def release(pool: BlockPool, blocks: ArrayLike) -> BlockPool:
    """Takes one holder from each block; a block that loses its last one becomes free.

    Args:
        pool: the pool.
        blocks: int32[n] block ids; negative ones are skipped. A release of a block that nobody
            holds, or no longer holds because of an earlier entry, pushes nothing and is counted as
            release at zero; an id past the pool is counted as bad id.

    Returns:
        The new pool; the freed blocks are pushed in the order in which they became free.

    Raises:
        TypeError: if `blocks` is not an integer array.
        ValueError: if it does not have one axis.
    """
    return _release(pool, as_int32("blocks", blocks, (None,)))


@jax.jit
def _release(pool: BlockPool, blocks: jax.Array) -> BlockPool:
    is_block = (blocks >= 0) & (blocks < pool.num_blocks)
    left = holders(pool, blocks) - occurrence_rank(blocks)
    is_held = is_block & (left > 0)
    is_freed = is_block & (left == 1)
    height = pool.num_free + jnp.cumsum(is_freed, dtype=jnp.int32)
    trace = pool.trace
    if trace is not None:
        what = jnp.where(is_held, RELEASE, RELEASE_AT_ZERO)
        ids = jnp.where(is_block, blocks, -1)
        trace = trace_events(trace, ids, what, jnp.maximum(left - 1, 0), pool.step)
    return dataclasses.replace(
        pool,
        free_blocks=pool.free_blocks.at[jnp.where(is_freed, height - 1, pool.num_blocks)].set(
            blocks, mode="drop"
        ),
        num_free=pool.num_free + jnp.sum(is_freed, dtype=jnp.int32),
        counts=add_counts(pool.counts, jnp.where(is_held, blocks, -1), -1),
        faults=record_masks(
            pool.faults,
            {
                FaultKind.RELEASE_AT_ZERO: is_block & ~is_held,
                FaultKind.BAD_ID: blocks >= pool.num_blocks,
            },
            blocks,
            step=pool.step,
        ),
        trace=trace,
    )


def as_int32(name: str, values: ArrayLike, shape: tuple[int | None, ...]) -> jax.Array:
    """Checks an integer argument and converts it to int32.

    Args:
        name: the argument's name, for the messages.
        values: integers of any width; those beyond int32 become the nearest int32.
        shape: what its shape must be; None matches any length.

    Returns:
        int32 array.

    Raises:
        TypeError: if the values are not integers.
        ValueError: if the shape is another one.
    """
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if len(shape) != array.ndim or any(
        want not in (None, got) for want, got in zip(shape, array.shape, strict=True)
    ):
        wanted = ", ".join("n" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(array.shape)}")
    if not np.can_cast(array.dtype, np.int32):
        lowest = max(np.iinfo(array.dtype).min, np.iinfo(np.int32).min)
        array = array.clip(lowest, np.iinfo(np.int32).max)
    return jnp.asarray(array, jnp.int32)


def peek(pool: BlockPool, order: jax.Array, mask: jax.Array) -> jax.Array:
    """Reads the ids that pops would hand out; `num_free` and the counts are the caller's to move.

    Args:
        pool: the pool.
        order: int32[...], 0 for the next pop, 1 for the one after it, ...
        mask: bool[...], which entries to read; their order must be below `num_free`.

    Returns:
        int32[...] block ids, -1 where not read.
    """
    place = jnp.where(mask, pool.num_free - 1 - order, pool.num_blocks)
    return pool.free_blocks.at[place].get(mode="fill", fill_value=-1)


def holders(pool: BlockPool, blocks: jax.Array) -> jax.Array:
    """Reads the counts of int32[...] block ids; 0 for ids out of range, negative ones included."""
    place = jnp.where(blocks >= 0, blocks, pool.num_blocks)
    return pool.counts.at[place].get(mode="fill", fill_value=0)


def add_counts(counts: jax.Array, blocks: jax.Array, change: jax.Array | int) -> jax.Array:
    """Adds to the counts of int32[...] block ids, duplicates included; ids out of range drop."""
    place = jnp.where(blocks >= 0, blocks, counts.shape[0])
    return counts.at[place].add(change, mode="drop")


def occurrence_rank(ids: jax.Array) -> jax.Array:
    """For each entry of int32[n], how many earlier entries are equal to it: int32[n]."""
    n = ids.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    ordered, order = jax.lax.sort((ids, place), num_keys=1, is_stable=True)
    rank = place - search(ordered, ordered, side="left")
    return jnp.zeros((n,), jnp.int32).at[order].set(rank)


def search(ordered: jax.Array, values: jax.Array, side: Literal["left", "right"]) -> jax.Array:
    """Where values belong in an ascending int32[n]: int32, of the values' shape.

    Unrolled, the binary search is one kernel; a loop would launch several on a GPU.
    """
    place = jnp.searchsorted(ordered, values, side=side, method="scan_unrolled")
    return place.astype(jnp.int32)


def trace_events(
    trace: EventTrace,
    blocks: jax.Array,
    what: jax.Array | int,
    count_after: jax.Array | int,
    step: jax.Array,
) -> EventTrace:
    """Appends one event per block id, in array order; negative ids are skipped.

    Args:
        trace: the rings so far.
        blocks: int32[n] block ids, below num_blocks.
        what: int32[n] or scalar, indices into `EVENTS`.
        count_after: int32[n] or scalar, holders of the block after the event.
        step: int32, the step it happened in.

    Returns:
        The new rings.
    """
    num_blocks, length, _ = trace.events.shape
    rows = jnp.stack([jnp.broadcast_to(x, blocks.shape) for x in (what, count_after, step)], -1)
    place = jnp.where(blocks >= 0, blocks, num_blocks)
    total = trace.totals.at[place].get(mode="fill", fill_value=0)
    # XLA copies an array that is read and written in no fixed order.
    total, totals = jax.lax.optimization_barrier((total, trace.totals))
    turn = total + occurrence_rank(blocks)
    # Of more than E events of one block in a call, only the last E have a place in its ring.
    is_kept = occurrence_rank(blocks[::-1])[::-1] < length
    return EventTrace(
        events=trace.events.at[jnp.where(is_kept, place, num_blocks), turn % length].set(
            rows.astype(jnp.int32), mode="drop"
        ),
        totals=totals.at[place].add(1, mode="drop"),
    )


def read_trace(pool: BlockPool, block: int) -> list[tuple[str, int, int]]:
    """Lists what happened to a block, on the host.

    Args:
        pool: a pool created with `trace_events`.
        block: a block id.

    Returns:
        (what, count after, step) of the last events, oldest first; the names are in `EVENTS`.

    Raises:
        ValueError: if the pool keeps no trace, or has no such block.
    """
    if pool.trace is None:
        raise ValueError("this pool keeps no trace: create it with trace_events=24, say")
    if not 0 <= block < pool.num_blocks:
        raise ValueError(f"block must be in [0, {pool.num_blocks}), got {block}")
    ring = np.asarray(pool.trace.events[block])
    total, length = int(pool.trace.totals[block]), len(ring)
    rows = [ring[i % length].tolist() for i in range(max(0, total - length), total)]
    return [(EVENTS[what], count, step) for what, count, step in rows]
