"""Sequences over a block pool: block tables, lengths, and the verbs that move references.

`reserve` plans a step: which blocks and positions the new tokens of each sequence get, and which
shared blocks must be copied first. The other verbs run between steps. Entry j of a sequence's table
row is the block of its tokens j * block_size onwards; only entries >= 0 are held blocks. -1 means
none, and what lies below is left for callers to mark blocks that live elsewhere. Columns from
ceil(length / block_size) on are -1. With a window, columns below it may be -1 too.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import blocks
from jaxkv.blocks import BlockPool
from jaxkv.faults import FaultKind, record_masks

# Columns handled at a time when references move: the cost follows the blocks that move.
_CHUNK = 64


class Refusal(enum.IntEnum):
    """Why a sequence got nothing in a step: the values of `StepPlan.refusal`.

    Attributes:
      NONE: it was granted, or asked for nothing.
      EXHAUSTED: too few free blocks, over the resident limit, or its partly filled block is stored.
      FULL: its block table has no column left.
      PAST_CAPACITY: more tokens than max_new_tokens, or past total_tokens.
      BAD_ID: a negative count, or its partly filled block is missing.
    """

    NONE = 0
    EXHAUSTED = 1
    FULL = 2
    PAST_CAPACITY = 3
    BAD_ID = 4


_FAULT_OF_REFUSAL = {
    Refusal.EXHAUSTED: FaultKind.EXHAUSTED,
    Refusal.FULL: FaultKind.FULL,
    Refusal.PAST_CAPACITY: FaultKind.PAST_CAPACITY,
    Refusal.BAD_ID: FaultKind.BAD_ID,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Where the tokens of each sequence slot are.

    Attributes:
        block_tables: int32[S, M] block ids, -1 for none.
        lengths: int32[S], tokens in each sequence.
    """

    block_tables: jax.Array
    lengths: jax.Array

    @classmethod
    def create(cls, max_sequences: int, max_blocks_per_sequence: int) -> Sequences:
        """Empty sequences.

        Args:
            max_sequences: S, sequence slots.
            max_blocks_per_sequence: M, blocks a sequence can hold.
        """
        return cls(
            block_tables=jnp.full((max_sequences, max_blocks_per_sequence), -1, jnp.int32),
            lengths=jnp.zeros((max_sequences,), jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one step stores where; every layer of the step uses the same plan.

    Attributes:
        starts: int32[S], lengths before the step.
        lengths: int32[S], lengths after it.
        new_tokens: int32[S], tokens that each sequence stores; 0 where refused.
        granted: bool[S]; False where the sequence is exactly as it was.
        refusal: int32[S], a `Refusal`.
        block_tables: int32[S, M], tables after the step's blocks were handed out.
        slots: int32[S, T] (padded) or int32[N] (packed), block * block_size + offset of each
            token; -1 where nothing is stored.
        positions: as `slots`, the number of tokens before it in its sequence; 0 where skipped.
        rows: as `slots`, the sequence slot of each token; -1 where skipped.
        offsets: int32[S], index of each sequence's first token in the step's flat token order.
        copy_from: int32[S], blocks to copy before anything is stored; -1 past `num_copies`.
        copy_to: int32[S], where they go.
        num_copies: int32.
        step: int32, number of this step, from 1.
        max_new_tokens: no sequence stores more tokens than this.
        total_tokens: N of a packed plan; None in a padded one.
    """

    starts: jax.Array
    lengths: jax.Array
    new_tokens: jax.Array
    granted: jax.Array
    refusal: jax.Array
    block_tables: jax.Array
    slots: jax.Array
    positions: jax.Array
    rows: jax.Array
    offsets: jax.Array
    copy_from: jax.Array
    copy_to: jax.Array
    num_copies: jax.Array
    step: jax.Array
    max_new_tokens: int = dataclasses.field(metadata={"static": True})
    total_tokens: int | None = dataclasses.field(metadata={"static": True})

    @property
    def is_packed(self) -> bool:
        """Whether tokens lie sequence after sequence instead of one row per sequence."""
        return self.total_tokens is not None

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Leading axes of this step's tensors: [S, T] or [N]."""
        if self.total_tokens is not None:
            return (self.total_tokens,)
        return (self.starts.shape[0], self.max_new_tokens)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The static numbers of a step."""

    sequences: int
    columns: int
    block_size: int
    max_new_tokens: int
    total_tokens: int | None
    resident_blocks: int | None
    window: int | None
    keep_first: int

    @property
    def touched_columns(self) -> int:
        """Most table columns that one sequence's new tokens can fall into."""
        worst = -(-(self.block_size - 1 + self.max_new_tokens) // self.block_size)
        return min(self.columns, worst)


@dataclasses.dataclass(frozen=True)
class _Request:
    """What each sequence asks for, as int32[S] and bool[S] arrays.

    `wants` marks those that nothing but a lack of blocks can stop; `tokens` is 0 elsewhere. `first`
    is the table column of the first new token, `columns` how many columns the new tokens touch, and
    `tail` the partly filled block they begin in, -1 if they begin a new one.
    """

    tokens: jax.Array
    offsets: jax.Array
    wants: jax.Array
    refusal: jax.Array
    first: jax.Array
    columns: jax.Array
    tail: jax.Array


@dataclasses.dataclass(frozen=True)
class _Grant:
    """Who gets blocks: bool[S] `granted` and `copies` (needs a tail of its own), int32[S] `need`.

    `kept` is 1 where the first touched column keeps its block, and `base` counts the blocks that
    earlier slots pop.
    """

    granted: jax.Array
    copies: jax.Array
    kept: jax.Array
    need: jax.Array
    base: jax.Array


def reserve(
    pool: BlockPool,
    sequences: Sequences,
    new_tokens: ArrayLike,
    *,
    block_size: int,
    max_new_tokens: int | None = None,
    total_tokens: int | None = None,
    resident_blocks: int | None = None,
    window: int | None = None,
    keep_first: int = 0,
) -> tuple[BlockPool, Sequences, StepPlan]:
    """Hands out blocks and positions for the new tokens of a step, in slot order.

    It is all or nothing per sequence. A sequence that appends into a block which others hold too
    gets a block of its own for the copy; the last holder keeps the old one. Within one sequence the
    block of the copy is popped first, then new blocks by column.

    Args:
        pool: the block pool.
        sequences: S sequences.
        new_tokens: int32[S], tokens to append to each; 0 leaves a sequence alone.
        block_size: tokens per block.
        max_new_tokens: T, the most that one sequence may append; 1 by default in a padded step,
            N in a packed one.
        total_tokens: N, tokens of a packed step, where sequence s begins at the sum of the
            (non-negative) new_tokens before it; None plans a padded step [S, T].
        resident_blocks: a sequence that holds more blocks than this, or whose partly filled block
            is an entry below -1, is refused as exhausted; None sets no limit.
        window: W drops the blocks that no query sees from a sequence's length on, which is what
            lies below key length - W + 1; a sequence drops when it asks for tokens, whether or not
            it then gets them. None drops nothing.
        keep_first: blocks of the first tokens that a window does not drop.

    Returns:
        The new pool, the sequences with their tables and lengths advanced, and the plan.

    Raises:
        TypeError: if new_tokens does not hold integers.
        ValueError: for a wrong shape or a static number out of range.
    """
    layout = _layout(
        pool,
        sequences,
        block_size,
        max_new_tokens,
        total_tokens,
        resident_blocks,
        window,
        keep_first,
    )
    new_tokens = blocks.as_int32("new_tokens", new_tokens, (layout.sequences,))
    return _reserve(pool, sequences, new_tokens, layout)


@functools.partial(jax.jit, static_argnames="layout")
def _reserve(
    pool: BlockPool, sequences: Sequences, new_tokens: jax.Array, layout: _Layout
) -> tuple[BlockPool, Sequences, StepPlan]:
    request = _request(pool, sequences, new_tokens, layout)
    if layout.window is not None:
        lengths = jnp.where(request.wants, sequences.lengths, 0)
        pool, tables = _drop_unseen(pool, sequences.block_tables, lengths, layout)
        sequences = dataclasses.replace(sequences, block_tables=tables)
    held = blocks.holders(pool, request.tail)
    grant = _grant(request, held, pool.num_free)
    refusal = jnp.where(request.wants & ~grant.granted, Refusal.EXHAUSTED, request.refusal)
    tokens = jnp.where(grant.granted, request.tokens, 0)
    step = pool.step + 1

    fresh, tables = _hand_out(pool, sequences.block_tables, request, grant, layout)
    copy_to = tables[jnp.arange(layout.sequences), jnp.minimum(request.first, layout.columns - 1)]
    copy_from, copy_to, num_copies = _compact(grant.copies, request.tail, copy_to)
    pool = _take(pool, request, grant, held, fresh, step)
    pool = dataclasses.replace(
        pool,
        step=step,
        faults=record_masks(
            pool.faults,
            {kind: refusal == code for code, kind in _FAULT_OF_REFUSAL.items()},
            jnp.arange(layout.sequences, dtype=jnp.int32),
            step=step,
        ),
    )
    lengths = sequences.lengths + tokens
    slots, positions, rows = _place_tokens(
        tables, sequences.lengths, tokens, request.offsets, layout
    )
    plan = StepPlan(
        starts=sequences.lengths,
        lengths=lengths,
        new_tokens=tokens,
        granted=refusal == Refusal.NONE,
        refusal=refusal,
        block_tables=tables,
        slots=slots,
        positions=positions,
        rows=rows,
        offsets=request.offsets,
        copy_from=copy_from,
        copy_to=copy_to,
        num_copies=num_copies,
        step=step,
        max_new_tokens=layout.max_new_tokens,
        total_tokens=layout.total_tokens,
    )
    return pool, Sequences(block_tables=tables, lengths=lengths), plan


def release(pool: BlockPool, sequences: Sequences, mask: ArrayLike) -> tuple[BlockPool, Sequences]:
    """Empties the sequences that `mask`, bool[S], selects; blocks go tail first, slots ascending.

    Raises:
        TypeError: if the mask is not boolean.
        ValueError: if it does not have one entry per slot.
    """
    num_sequences = sequences.lengths.shape[0]
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean, got dtype {mask.dtype}")
    if mask.shape != (num_sequences,):
        raise ValueError(f"mask must have shape [{num_sequences}], got {list(mask.shape)}")
    return _release(pool, sequences, mask)


@jax.jit
def _release(pool: BlockPool, sequences: Sequences, mask: jax.Array) -> tuple[BlockPool, Sequences]:
    columns = sequences.block_tables.shape[1]
    tables = sequences.block_tables
    pool, tables = _drop_columns(pool, tables, jnp.where(mask, 0, columns), _extents(tables))
    return pool, Sequences(block_tables=tables, lengths=jnp.where(mask, 0, sequences.lengths))


def trim(
    pool: BlockPool,
    sequences: Sequences,
    new_lengths: ArrayLike,
    *,
    block_size: int,
    window: int | None = None,
) -> tuple[BlockPool, Sequences]:
    """Shortens sequences, and releases the blocks that no token is left in.

    Args:
        pool: the block pool.
        sequences: S sequences.
        new_lengths: int32[S]; negative leaves a sequence alone. One longer than the sequence is
            ignored and counted as past capacity.
        block_size: tokens per block.
        window: that of `reserve`. A trim after which the next query would see a block that was
            dropped, or append to one, is ignored and counted as past capacity.

    Returns:
        The new pool and sequences.

    Raises:
        TypeError: if new_lengths does not hold integers.
        ValueError: if it does not have one entry per slot.
    """
    num_sequences = sequences.lengths.shape[0]
    new_lengths = blocks.as_int32("new_lengths", new_lengths, (num_sequences,))
    return _trim(pool, sequences, new_lengths, block_size, window)


@functools.partial(jax.jit, static_argnames=("block_size", "window"))
def _trim(
    pool: BlockPool,
    sequences: Sequences,
    new_lengths: jax.Array,
    block_size: int,
    window: int | None,
) -> tuple[BlockPool, Sequences]:
    num_sequences, columns = sequences.block_tables.shape
    is_longer = new_lengths > sequences.lengths
    if window is not None:
        is_longer |= _sees_dropped(sequences.block_tables, new_lengths, block_size, window)
    is_trimmed = (new_lengths >= 0) & ~is_longer
    lengths = jnp.where(is_trimmed, new_lengths, sequences.lengths)
    keep = jnp.where(is_trimmed, _blocks_of(lengths, block_size), columns)
    tables = sequences.block_tables
    pool, tables = _drop_columns(pool, tables, keep, _extents(tables))
    faults = record_masks(
        pool.faults,
        {FaultKind.PAST_CAPACITY: is_longer},
        jnp.arange(num_sequences, dtype=jnp.int32),
        step=pool.step,
    )
    pool = dataclasses.replace(pool, faults=faults)
    return pool, Sequences(block_tables=tables, lengths=lengths)


def fork(
    pool: BlockPool, sequences: Sequences, source: ArrayLike, destination: ArrayLike
) -> tuple[BlockPool, Sequences]:
    """Makes each destination slot share all blocks of its source slot.

    All sources are read and retained first, then destinations in use are released, so a swap works
    and a source equal to its destination changes nothing.

    Args:
        pool: the block pool.
        sequences: S sequences.
        source: int32[n] slots; a pair with a negative one is skipped.
        destination: int32[n] distinct slots, likewise. Each slot past S, and each destination that
            an earlier pair has, is counted as bad id and its pair skipped.

    Returns:
        The new pool and sequences.

    Raises:
        TypeError: if a slot is not an integer.
        ValueError: if the two do not have one axis of one length.
    """
    source = blocks.as_int32("source", source, (None,))
    destination = blocks.as_int32("destination", destination, (source.shape[0],))
    return _fork(pool, sequences, source, destination)


@jax.jit
def _fork(
    pool: BlockPool, sequences: Sequences, source: jax.Array, destination: jax.Array
) -> tuple[BlockPool, Sequences]:
    num_sequences = sequences.lengths.shape[0]
    pairs = jnp.stack([source, destination], axis=-1)
    slot, is_repeated = fork_slots(source, destination, num_sequences)
    rows = jnp.arange(num_sequences, dtype=jnp.int32).at[slot].set(source, mode="drop")
    is_bad = (pairs >= num_sequences).at[:, 1].max(is_repeated)
    faults = record_masks(
        pool.faults, {FaultKind.BAD_ID: is_bad.ravel()}, pairs.ravel(), step=pool.step
    )
    pool = dataclasses.replace(pool, faults=faults)
    return _take_rows(pool, sequences, rows)


def fork_slots(
    source: ArrayLike, destination: ArrayLike, num_sequences: int
) -> tuple[jax.Array, jax.Array]:
    """The slots that a fork fills: int32[n], num_sequences for each pair that is skipped.

    Args:
        source: int32[n].
        destination: int32[n].
        num_sequences: S.

    Returns:
        The slots, and bool[n], pairs skipped because an earlier one has their destination.
    """
    source, destination = jnp.asarray(source), jnp.asarray(destination)
    pairs = jnp.stack([source, destination], axis=-1)
    is_pair = jnp.all((pairs >= 0) & (pairs < num_sequences), axis=-1)
    slot = jnp.where(is_pair, destination, num_sequences)
    is_repeated = is_pair & (blocks.occurrence_rank(slot) > 0)
    return jnp.where(is_repeated, num_sequences, slot), is_repeated


def reorder(pool: BlockPool, sequences: Sequences, rows: ArrayLike) -> tuple[BlockPool, Sequences]:
    """Gives slot s what slot rows[s] had, as a beam search does after each step.

    Args:
        pool: the block pool.
        sequences: S sequences.
        rows: int32[S]; slots with equal entries share blocks, -1 empties a slot. Any other entry
            out of range leaves the slot as it was and is counted as bad id.

    Returns:
        The new pool and sequences.

    Raises:
        TypeError: if rows does not hold integers.
        ValueError: if it does not have one entry per slot.
    """
    num_sequences = sequences.lengths.shape[0]
    return _reorder(pool, sequences, blocks.as_int32("rows", rows, (num_sequences,)))


@jax.jit
def _reorder(pool: BlockPool, sequences: Sequences, rows: jax.Array) -> tuple[BlockPool, Sequences]:
    taken, is_bad = reorder_rows(rows)
    faults = record_masks(pool.faults, {FaultKind.BAD_ID: is_bad}, rows, step=pool.step)
    rows = taken
    return _take_rows(dataclasses.replace(pool, faults=faults), sequences, rows)


def reorder_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What each slot takes in a reorder, int32[S] with -1 for nothing, and bool[S] bad entries."""
    own = jnp.arange(rows.shape[0], dtype=jnp.int32)
    is_bad = (rows < -1) | (rows >= rows.shape[0])
    return jnp.where(is_bad, own, rows), is_bad


def _layout(
    pool: BlockPool,
    sequences: Sequences,
    block_size: int,
    max_new_tokens: int | None,
    total_tokens: int | None,
    resident_blocks: int | None,
    window: int | None,
    keep_first: int,
) -> _Layout:
    """Checks the static numbers of a step."""
    num_sequences, columns = sequences.block_tables.shape
    if max_new_tokens is None:
        max_new_tokens = 1 if total_tokens is None else total_tokens
    numbers = {
        "block_size": block_size,
        "total_tokens": total_tokens,
        "max_new_tokens": max_new_tokens,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if total_tokens is not None:
        max_new_tokens = min(max_new_tokens, total_tokens)
    limits = {
        "num_blocks * block_size": pool.num_blocks * block_size,
        "max_blocks_per_sequence * block_size": columns * block_size,
        "max_sequences * tokens of a step": num_sequences * ((total_tokens or max_new_tokens) + 1),
    }
    for name, value in limits.items():
        if value > jnp.iinfo(jnp.int32).max:
            raise ValueError(f"{name} must fit in int32, got {value}")
    return _Layout(
        num_sequences,
        columns,
        block_size,
        max_new_tokens,
        total_tokens,
        resident_blocks,
        window,
        keep_first,
    )


def _blocks_of(tokens: jax.Array, block_size: int) -> jax.Array:
    """Blocks that hold that many tokens; no overflow near the largest int32."""
    return tokens // block_size + (tokens % block_size > 0)


def _request(
    pool: BlockPool, sequences: Sequences, new_tokens: jax.Array, layout: _Layout
) -> _Request:
    """Works out what each sequence asks for and refuses what no number of blocks can serve."""
    tokens = jnp.maximum(new_tokens, 0)
    is_past = tokens > layout.max_new_tokens
    offsets = jnp.arange(layout.sequences, dtype=jnp.int32) * layout.max_new_tokens
    if layout.total_tokens is not None:
        # Clipped just past N, a sum over all sequences cannot overflow.
        clipped = jnp.minimum(tokens, layout.total_tokens + 1)
        ends = jnp.cumsum(clipped, dtype=jnp.int32)
        is_past |= (tokens > 0) & (ends > layout.total_tokens)
        offsets = jnp.minimum(ends - clipped, layout.total_tokens)

    first = sequences.lengths // layout.block_size
    filled = sequences.lengths % layout.block_size
    is_full = tokens > layout.columns * layout.block_size - sequences.lengths
    row = jnp.arange(layout.sequences, dtype=jnp.int32)
    column = jnp.where((filled > 0) & (tokens > 0), first, layout.columns)
    tail = sequences.block_tables.at[row, column].get(mode="fill", fill_value=-1)
    is_lost = (column < layout.columns) & ((tail < 0) | (tail >= pool.num_blocks))

    refusal = jnp.zeros((layout.sequences,), jnp.int32)
    if layout.resident_blocks is not None:
        is_stored = (column < layout.columns) & (tail <= -2)
        is_lost &= ~is_stored
        is_over = (tokens > 0) & over_resident_limit(sequences, layout.resident_blocks)
        refusal = jnp.where(is_over | is_stored, Refusal.EXHAUSTED, refusal)
    refusal = jnp.where(is_lost | (new_tokens < 0), Refusal.BAD_ID, refusal)
    refusal = jnp.where(is_full, Refusal.FULL, refusal)
    refusal = jnp.where(is_past, Refusal.PAST_CAPACITY, refusal)
    wants = (tokens > 0) & (refusal == Refusal.NONE)
    tokens = jnp.where(wants, tokens, 0)
    return _Request(
        tokens=tokens,
        offsets=offsets,
        wants=wants,
        refusal=refusal,
        first=first,
        columns=jnp.where(wants, _blocks_of(filled + tokens, layout.block_size), 0),
        tail=jnp.where(wants, tail, -1),
    )


def over_resident_limit(sequences: Sequences, resident_blocks: int) -> jax.Array:
    """bool[S], sequences that hold more blocks than this."""
    return jnp.sum(sequences.block_tables >= 0, axis=1, dtype=jnp.int32) > resident_blocks


def _grant(request: _Request, held: jax.Array, num_free: jax.Array) -> _Grant:
    """Decides in slot order who gets blocks; `held` counts the holders of each tail."""
    appends = request.tail >= 0
    earlier = blocks.occurrence_rank(request.tail)
    copies = appends & (held - earlier > 1)
    need = request.columns - (appends & ~copies)
    # With blocks for all, nobody's answer depends on an earlier refusal.
    granted, copies = jax.lax.cond(
        jnp.sum(need, dtype=jnp.int32) <= num_free,
        lambda: (request.wants, copies),
        lambda: _grant_in_order(request, held, num_free),
    )
    kept = (appends & ~copies).astype(jnp.int32)
    need = jnp.where(granted, request.columns - kept, 0)
    ends = jnp.cumsum(need, dtype=jnp.int32)
    return _Grant(granted=granted, copies=copies, kept=kept, need=need, base=ends - need)


def _grant_in_order(
    request: _Request, held: jax.Array, num_free: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same one sequence at a time: a refused one neither takes blocks nor leaves its tail."""

    def visit(carry, slot):
        left, departed = carry
        tail = request.tail[slot]
        copies = (tail >= 0) & (held[slot] - departed[slot] > 1)
        need = request.columns[slot] - ((tail >= 0) & ~copies)
        granted = request.wants[slot] & (need <= left)
        copies &= granted
        departed += (request.tail == tail) & copies
        return (left - jnp.where(granted, need, 0), departed), (granted, copies)

    slots = jnp.arange(request.tokens.shape[0], dtype=jnp.int32)
    _, (granted, copies) = jax.lax.scan(visit, (num_free, jnp.zeros_like(held)), slots)
    return granted, copies


def _hand_out(
    pool: BlockPool,
    tables: jax.Array,
    request: _Request,
    grant: _Grant,
    layout: _Layout,
) -> tuple[jax.Array, jax.Array]:
    """Reads the popped blocks in stack order and enters them in the tables.

    Returns:
        int32[F] popped blocks, -1 where there is none, and the new tables.
    """
    if layout.total_tokens is None:
        size = layout.sequences * layout.touched_columns
        row, index = jnp.divmod(jnp.arange(size, dtype=jnp.int32), layout.touched_columns)
        index -= grant.kept[row]
        order = grant.base[row] + index
        is_popped = (index >= 0) & (index < grant.need[row])
    else:
        # Few sequences of a packed step touch many columns, so the pops are laid out flat.
        busy = min(layout.sequences, layout.total_tokens)
        size = 2 * busy + layout.total_tokens // layout.block_size
        order = jnp.arange(size, dtype=jnp.int32)
        ends = grant.base + grant.need
        row = blocks.search(ends, order, side="right")
        is_popped = row < layout.sequences
        row = jnp.minimum(row, layout.sequences - 1)
        index = order - grant.base[row]
    popped = blocks.peek(pool, order, is_popped)
    column = jnp.where(is_popped, request.first[row] + grant.kept[row] + index, layout.columns)
    return popped, tables.at[row, column].set(popped, mode="drop")


def _take(
    pool: BlockPool,
    request: _Request,
    grant: _Grant,
    held: jax.Array,
    popped: jax.Array,
    step: jax.Array,
) -> BlockPool:
    """Takes the popped blocks off the stack, and one holder from each tail that was copied."""
    left = jnp.where(grant.copies, request.tail, -1)
    trace = pool.trace
    if trace is not None:
        trace = blocks.trace_events(trace, popped, blocks.ALLOCATE, 1, step)
        after = held - 1 - blocks.occurrence_rank(left)
        trace = blocks.trace_events(trace, left, blocks.COPY, after, step)
    counts = blocks.add_counts(pool.counts, popped, 1)
    return dataclasses.replace(
        pool,
        num_free=pool.num_free - jnp.sum(grant.need, dtype=jnp.int32),
        counts=blocks.add_counts(counts, left, -1),
        trace=trace,
    )


def _compact(
    mask: jax.Array, source: jax.Array, destination: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Moves the selected pairs to the front, -1 behind them, and counts them."""
    size = mask.shape[0]
    rank = jnp.cumsum(mask, dtype=jnp.int32)
    place = jnp.where(mask, rank - 1, size)
    pairs = jnp.stack([source, destination], axis=-1)
    pairs = jnp.full((size, 2), -1, jnp.int32).at[place].set(pairs, mode="drop")
    return pairs[:, 0], pairs[:, 1], rank[-1]


def _place_tokens(
    tables: jax.Array,
    starts: jax.Array,
    tokens: jax.Array,
    offsets: jax.Array,
    layout: _Layout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slot, position and sequence of each token of the step."""
    if layout.total_tokens is None:
        shape = (layout.sequences, layout.max_new_tokens)
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    else:
        token = jnp.arange(layout.total_tokens, dtype=jnp.int32)
        # The last sequence that begins at or before a token; those of no tokens share an offset.
        row = blocks.search(offsets, token, side="right") - 1
        index = token - offsets[row]
    is_stored = index < tokens[row]
    positions = jnp.where(is_stored, starts[row] + index, 0)
    block = tables[row, positions // layout.block_size]
    slots = block * layout.block_size + positions % layout.block_size
    return (
        jnp.where(is_stored, slots, -1),
        positions,
        jnp.where(is_stored, row, -1),
    )


def _extents(tables: jax.Array) -> jax.Array:
    """int32[S], one past the last column of each row that is not -1."""
    columns = jnp.arange(1, tables.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tables != -1, columns, 0), axis=1)


def _walk[State](
    first: jax.Array,
    last: jax.Array,
    chunk: int,
    visit: Callable[[State, jax.Array, jax.Array], State],
    state: State,
) -> State:
    """Visits columns first[s] .. last[s] - 1 of each row s, rows ascending, from the last one down.

    Args:
        first: int32[S].
        last: int32[S].
        chunk: columns per visit.
        visit: takes the state, a row, and int32[chunk] columns of it, -1 where there are fewer;
            returns the new state.
        state: the first state.

    Returns:
        The last state. No column at all costs no visit.
    """
    chunks = _blocks_of(jnp.maximum(last - first, 0), chunk)
    ends = jnp.cumsum(chunks, dtype=jnp.int32)

    def body(turn, state):
        row = blocks.search(ends, turn, side="right")
        skipped = (turn - ends[row] + chunks[row]) * chunk
        columns = last[row] - 1 - skipped - jnp.arange(chunk, dtype=jnp.int32)
        return visit(state, row, jnp.where(columns >= first[row], columns, -1))

    return jax.lax.fori_loop(0, ends[-1], body, state)


def _entries(tables: jax.Array, row: jax.Array, columns: jax.Array) -> jax.Array:
    """The entries at some columns of a row, -1 where the column is negative."""
    return jnp.where(columns >= 0, tables[row, columns], -1)


def _drop_columns(
    pool: BlockPool, tables: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """Releases the blocks in columns first[s] to last[s] - 1, and empties those columns."""
    width = tables.shape[1]

    def visit(state, row, columns):
        pool, tables = state
        pool = blocks.release(pool, _entries(tables, row, columns))
        place = jnp.where(columns >= 0, columns, width)
        return pool, tables.at[row, place].set(-1, mode="drop")

    return _walk(first, last, min(_CHUNK, width), visit, (pool, tables))


def _drop_unseen(
    pool: BlockPool, tables: jax.Array, lengths: jax.Array, layout: _Layout
) -> tuple[BlockPool, jax.Array]:
    """Releases the blocks that no query from position lengths[s] on sees, and empties them."""
    assert layout.window is not None
    width = tables.shape[1]
    kept = -(-layout.keep_first // layout.block_size)
    last = jnp.maximum(lengths - layout.window + 1, 0) // layout.block_size
    column = jnp.arange(width, dtype=jnp.int32)
    # What earlier steps dropped is not walked again.
    is_left = (tables != -1) & (column >= kept)
    first = jnp.min(jnp.where(is_left, column, width), axis=1)
    return _drop_columns(pool, tables, first, last)


def _sees_dropped(tables: jax.Array, lengths: jax.Array, block_size: int, window: int) -> jax.Array:
    """bool[S], whether a sequence cut to lengths[s] misses a block that its next query needs."""
    column = jnp.arange(tables.shape[1], dtype=jnp.int32)
    # The partly filled block is written to, even where the window is too short to see it.
    lowest = jnp.minimum(jnp.maximum(lengths - window + 1, 0), lengths - lengths % block_size)
    is_needed = column >= (lowest // block_size)[:, None]
    is_needed &= column < _blocks_of(lengths, block_size)[:, None]
    return jnp.any(is_needed & (tables == -1), axis=1)


def _take_rows(
    pool: BlockPool, sequences: Sequences, rows: jax.Array
) -> tuple[BlockPool, Sequences]:
    """Slot s takes row rows[s], -1 for an empty one: retains everything first, then releases."""
    old = sequences.block_tables
    is_moved = rows != jnp.arange(rows.shape[0], dtype=jnp.int32)
    is_empty = rows < 0
    row = jnp.where(is_empty, 0, rows)
    new = jnp.where(is_empty[:, None], -1, old[row])
    zeros, chunk = jnp.zeros_like(rows), min(_CHUNK, old.shape[1])

    def retain(pool, row, columns):
        return blocks.retain(pool, _entries(new, row, columns))

    def release(pool, row, columns):
        return blocks.release(pool, _entries(old, row, columns))

    pool = _walk(zeros, jnp.where(is_moved, _extents(new), 0), chunk, retain, pool)
    pool = _walk(zeros, jnp.where(is_moved, _extents(old), 0), chunk, release, pool)
    lengths = jnp.where(is_empty, 0, sequences.lengths[row])
    return pool, Sequences(block_tables=new, lengths=lengths)
