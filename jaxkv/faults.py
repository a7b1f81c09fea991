"""Counters of what went wrong inside a running program, and how they read on the host.

A jitted step cannot raise, so trouble that only shows at run time becomes data: a count per kind,
and where the first of each kind happened. Recording is a handful of elementwise operations on eight
numbers; it never looks at a page.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np


class CacheError(RuntimeError):
    """A cache has counted faults: the message says what, where and what to do."""


class FaultKind(enum.IntEnum):
    """What can go wrong at run time; the value indexes `Faults.counts` and `Faults.first`.

    Attributes:
      EXHAUSTED: sequences refused for want of a free block, or over the resident limit.
      FULL: sequences refused because their block table is full.
      RELEASE_AT_ZERO: releases of blocks that nobody held.
      BAD_ID: slots or blocks out of range, and negative new_tokens.
      PAST_CAPACITY: sequences with more tokens than the step has room for, and trims that would
        lengthen or reach dropped blocks.
      SATURATED: elements (fp8, f16) or scales beyond what the format holds.
      FLUSHED: groups of nonzero values whose scale rounded to zero.
      NON_FINITE: tokens with a NaN or an infinity, per head and side.
    """

    EXHAUSTED = 0
    FULL = 1
    RELEASE_AT_ZERO = 2
    BAD_ID = 3
    PAST_CAPACITY = 4
    SATURATED = 5
    FLUSHED = 6
    NON_FINITE = 7


CORRUPTION = frozenset(
    {
        FaultKind.RELEASE_AT_ZERO,
        FaultKind.BAD_ID,
        FaultKind.PAST_CAPACITY,
        FaultKind.NON_FINITE,
    }
)
"""Kinds that mean a bug in the caller, or numbers that cannot be right."""

BACKPRESSURE = frozenset(FaultKind) - CORRUPTION
"""Kinds that mean too little room or too little precision: expected in a busy system."""


def _count_of(kind: FaultKind) -> property:
    """A property that reads one kind's count out of `Faults.counts`."""
    return property(lambda faults: faults.counts[..., kind], doc=f"uint32: {kind.name} so far.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faults:
    """Counts of run-time faults, one per `FaultKind`, and the place of each kind's first.

    Attributes:
        counts: uint32[8], occurrences of each kind; they stop at the largest uint32.
        first: int32[8, 3], (step, layer, slot or block) of the first of each kind; -1 where there
            was none, or where a column does not apply.
    """

    counts: jax.Array
    first: jax.Array

    exhausted = _count_of(FaultKind.EXHAUSTED)
    full = _count_of(FaultKind.FULL)
    release_at_zero = _count_of(FaultKind.RELEASE_AT_ZERO)
    bad_id = _count_of(FaultKind.BAD_ID)
    past_capacity = _count_of(FaultKind.PAST_CAPACITY)
    saturated = _count_of(FaultKind.SATURATED)
    flushed = _count_of(FaultKind.FLUSHED)
    non_finite = _count_of(FaultKind.NON_FINITE)

    @classmethod
    def create(cls) -> Faults:
        """No faults so far."""
        kinds = len(FaultKind)
        return cls(
            counts=jnp.zeros((kinds,), jnp.uint32), first=jnp.full((kinds, 3), -1, jnp.int32)
        )


def record(
    faults: Faults,
    kind: FaultKind,
    count: jax.Array | int,
    *,
    step: jax.Array | int,
    layer: jax.Array | int = -1,
    where: jax.Array | int = -1,
) -> Faults:
    """Adds occurrences of one kind; a count of 0 changes nothing.

    Args:
        faults: the counters so far.
        kind: which counter.
        count: scalar >= 0, how many occurred.
        step: the step they occurred in.
        layer: the layer, -1 if it has none.
        where: the slot or block of the first of them, -1 if it has none.

    Returns:
        The new counters. The first place ever recorded for a kind stays.
    """
    is_kind = jnp.arange(len(FaultKind)) == kind
    return record_kinds(
        faults, jnp.where(is_kind, count, 0), step=step, layer=layer, where=jnp.asarray(where)
    )


def record_kinds(
    faults: Faults,
    counts: jax.Array,
    *,
    step: jax.Array | int,
    layer: jax.Array | int = -1,
    where: jax.Array,
) -> Faults:
    """Adds occurrences of every kind at once.

    Args:
        faults: the counters so far.
        counts: int[8] >= 0, occurrences of each kind.
        step: the step they occurred in.
        layer: the layer, -1 if it has none.
        where: int32[8] or a scalar, slot or block of the first of each kind.

    Returns:
        The new counters.
    """
    counts = counts.astype(jnp.uint32)
    is_first = (faults.counts == 0) & (counts > 0)
    shape = faults.counts.shape
    place = jnp.stack(
        [jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in (step, layer, where)], axis=-1
    )
    # A counter that wrapped to 0 would hide its faults and lose the first place.
    room = jnp.uint32(0xFFFFFFFF) - faults.counts
    return Faults(
        counts=faults.counts + jnp.minimum(counts, room),
        first=jnp.where(is_first[:, None], place, faults.first),
    )


def record_masks(
    faults: Faults,
    masks: Mapping[FaultKind, jax.Array],
    places: jax.Array,
    *,
    step: jax.Array | int,
    layer: jax.Array | int = -1,
) -> Faults:
    """Adds one occurrence for every entry that a kind's mask selects.

    Args:
        faults: the counters so far.
        masks: bool[n] of each kind.
        places: int32[n], slot or block of each entry.
        step: the step they occurred in.
        layer: the layer, -1 if it has none.

    Returns:
        The new counters.
    """
    n = places.shape[0]
    if n == 0:
        return faults
    marks = jnp.stack([masks.get(kind, jnp.zeros((n,), jnp.bool_)) for kind in FaultKind])
    first = jnp.min(jnp.where(marks, jnp.arange(n, dtype=jnp.int32), n - 1), axis=1)
    counts = jnp.sum(marks, axis=1, dtype=jnp.int32)
    return record_kinds(faults, counts, step=step, layer=layer, where=places[first])


_PLACE_NAMES = {
    FaultKind.RELEASE_AT_ZERO: "block",
    FaultKind.BAD_ID: "slot or block",
}

_MEANINGS = {
    FaultKind.EXHAUSTED: (
        "exhausted: a request found no free block and was refused",
        "release or trim sequences, or raise CacheConfig.num_blocks",
    ),
    FaultKind.FULL: (
        "full: a sequence would have outgrown its block table and was refused",
        "raise CacheConfig.max_blocks_per_sequence, or trim or release the sequence",
    ),
    FaultKind.RELEASE_AT_ZERO: (
        "release at zero: a block that nobody held was released again; it was not freed twice",
        "release each reference once: look for a second release of the same ids",
    ),
    FaultKind.BAD_ID: (
        "bad id: a slot or block out of range or not held, or negative new_tokens; it was skipped",
        "pass slots below max_sequences, blocks below num_blocks, new_tokens >= 0",
    ),
    FaultKind.PAST_CAPACITY: (
        "past capacity: more new tokens than the step has room for, or a trim longer than the "
        "sequence or back to blocks that a window dropped; it was ignored",
        "raise max_new_tokens or total_tokens, or pass fewer tokens; trim only to shorter lengths",
    ),
    FaultKind.SATURATED: (
        "saturated: values or scales beyond the format's largest number were clipped",
        "calibrate a larger scale, or choose a format with more range",
    ),
    FaultKind.FLUSHED: (
        "flushed: groups too small for their scale were stored as zero",
        "choose a format with more range; harmless when such groups carry nothing",
    ),
    FaultKind.NON_FINITE: (
        "non-finite: NaN or infinity was written to the cache",
        "find the layer that first produced it",
    ),
}


def explain(faults: Faults, kinds: Collection[FaultKind] = tuple(FaultKind)) -> list[str]:
    """Says in words what was counted, on the host.

    Args:
        faults: the counters.
        kinds: which kinds to speak of; all by default.

    Returns:
        One sentence per kind that occurred: what, how often, where first, and what to do.
    """
    counts, first = np.asarray(faults.counts), np.asarray(faults.first)
    lines = []
    for kind in FaultKind:
        if kind not in kinds or counts[kind] == 0:
            continue
        what, advice = _MEANINGS[kind]
        names = ("step", "layer", _PLACE_NAMES.get(kind, "slot"))
        places = zip(names, first[kind].tolist(), strict=True)
        where = ", ".join(f"{name} {value}" for name, value in places if value != -1)
        times = "1 time" if counts[kind] == 1 else f"{counts[kind]} times"
        lines.append(f"{what} ({times}; first at {where or 'an unknown place'}): {advice}.")
    return lines
