"""Random runs of the block pool and sequences against a plain Python model.

The model handles one block and one token at a time with lists and dictionaries. Contents are
abstract: every appended token has a number of its own, a store of blocks is written through the
plan alone, and each sequence is read back through its block table.
"""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import run_machine

from jaxkv import blocks, sequences
from jaxkv.blocks import BlockPool
from jaxkv.faults import FaultKind
from jaxkv.sequences import Sequences

POISON = "never written"


@dataclasses.dataclass(frozen=True)
class Geometry:
    slots: int
    columns: int
    block_size: int
    num_blocks: int
    padded: int
    packed: int
    trace_events: int


class Model:
    """What the library promises, in the words of its documentation."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.stack = list(reversed(range(geometry.num_blocks)))
        self.counts = [0] * geometry.num_blocks
        self.events = [[] for _ in range(geometry.num_blocks)]
        self.tables = [[] for _ in range(geometry.slots)]
        self.tokens = [[] for _ in range(geometry.slots)]
        self.outside = []
        self.faults = dict.fromkeys(FaultKind, 0)
        self.first = {}
        self.step = 0
        self.next_token = 0

    def fault(self, kind, place):
        self.faults[kind] += 1
        self.first.setdefault(kind, [self.step, -1, place])

    def event(self, block, what):
        self.events[block].append((what, self.counts[block], self.step))

    def pop(self):
        block = self.stack.pop()
        self.counts[block] = 1
        self.event(block, "allocate")
        return block

    def retain(self, block):
        self.counts[block] += 1
        self.event(block, "retain")

    def release(self, block, what="release"):
        self.counts[block] -= 1
        self.event(block, what)
        if self.counts[block] == 0:
            self.stack.append(block)

    def reserve(self, new_tokens, packed):
        """Returns, for each slot, the refusal and the token numbers it stores."""
        self.step += 1
        offset, answers, copies = 0, [], []
        for slot, count in enumerate(new_tokens):
            if packed:
                fits = offset + count <= self.geometry.packed
                offset += max(count, 0)
            else:
                fits = count <= self.geometry.padded
            refusal = self.append(slot, count, fits, copies)
            stored = 0 if refusal else count
            answers.append((refusal, self.tokens[slot][len(self.tokens[slot]) - stored :]))
        return answers, copies

    def append(self, slot, count, fits, copies):
        size = self.geometry.block_size
        tokens, table = self.tokens[slot], self.tables[slot]
        if count < 0:
            self.fault(FaultKind.BAD_ID, slot)
            return 4
        if count == 0:
            return 0
        if not fits:
            self.fault(FaultKind.PAST_CAPACITY, slot)
            return 3
        length = len(tokens) + count
        if length > self.geometry.columns * size:
            self.fault(FaultKind.FULL, slot)
            return 2
        shares_tail = len(tokens) % size != 0 and self.counts[table[-1]] > 1
        missing = -(-length // size) - len(table)
        if missing + shares_tail > len(self.stack):
            self.fault(FaultKind.EXHAUSTED, slot)
            return 1
        if shares_tail:
            old, table[-1] = table[-1], self.pop()
            self.release(old, "copy")
            copies.append((old, table[-1]))
        table.extend(self.pop() for _ in range(missing))
        tokens.extend(range(self.next_token, self.next_token + count))
        self.next_token += count
        return 0

    def cut(self, slot, length):
        keep = -(-length // self.geometry.block_size)
        while len(self.tables[slot]) > keep:
            self.release(self.tables[slot].pop())
        del self.tokens[slot][length:]

    def trim(self, lengths):
        for slot, length in enumerate(lengths):
            if length > len(self.tokens[slot]):
                self.fault(FaultKind.PAST_CAPACITY, slot)
            elif length >= 0:
                self.cut(slot, length)

    def move(self, sources):
        """Slot s takes what slot sources[s] had, None for nothing."""
        old = [(list(table), list(tokens)) for table, tokens in zip(self.tables, self.tokens)]
        taken = [source for _, source in sorted(sources.items()) if source is not None]
        for source in taken:
            for block in old[source][0]:
                self.retain(block)
        for slot in sorted(sources):
            self.cut(slot, 0)
        for slot, source in sources.items():
            if source is not None:
                self.tables[slot], self.tokens[slot] = list(old[source][0]), list(old[source][1])

    def fork(self, pairs):
        sources, slots = {}, self.geometry.slots
        for source, destination in pairs:
            for slot in (source, destination):
                if slot >= slots:
                    self.fault(FaultKind.BAD_ID, slot)
            if not (0 <= source < slots and 0 <= destination < slots):
                continue
            if destination in sources:
                self.fault(FaultKind.BAD_ID, destination)
            else:
                sources[destination] = source
        self.move({slot: source for slot, source in sources.items() if slot != source})

    def reorder(self, rows):
        sources = {}
        for slot, source in enumerate(rows):
            if source < -1 or source >= self.geometry.slots:
                self.fault(FaultKind.BAD_ID, source)
            elif source != slot:
                sources[slot] = None if source == -1 else source
        self.move(sources)

    def retain_outside(self, ids):
        held = [block < len(self.counts) and self.counts[block] > 0 for block in ids]
        for block, is_held in zip(ids, held):
            if block < 0:
                continue
            if is_held:
                self.retain(block)
                self.outside.append(block)
            else:
                self.fault(FaultKind.BAD_ID, block)

    def release_outside(self, ids):
        for block in ids:
            if block < 0:
                continue
            if block >= len(self.counts):
                self.fault(FaultKind.BAD_ID, block)
            elif self.counts[block] == 0:
                self.fault(FaultKind.RELEASE_AT_ZERO, block)
                self.event(block, "release at zero")
            else:
                self.release(block)
                self.outside.remove(block)

    def allocate_outside(self, wanted):
        for index, is_wanted in enumerate(wanted):
            if is_wanted and self.stack:
                self.outside.append(self.pop())
            elif is_wanted:
                self.fault(FaultKind.EXHAUSTED, index)


class SequencesMachine(RuleBasedStateMachine):
    geometry: ClassVar[Geometry]

    @initialize()
    def start(self):
        g = self.geometry
        self.model = Model(g)
        self.pool = BlockPool.create(g.num_blocks, g.trace_events)
        self.sequences = Sequences.create(g.slots, g.columns)
        self.store = np.full((g.num_blocks * g.block_size,), POISON, object)

    def write(self, plan, answers, copies):
        """Copies and stores what the plan says, as a layer of a model would."""
        size = self.geometry.block_size
        count = int(plan.num_copies)
        pairs = np.stack([plan.copy_from, plan.copy_to], axis=-1)
        assert pairs[:count].tolist() == [list(pair) for pair in copies]
        assert np.all(pairs[count:] == -1)
        store = self.store.reshape(-1, size)
        # Blocks that were just handed out may hold anything.
        held = np.asarray(self.pool.counts) > 0
        store[~held] = POISON
        for source, destination in pairs[:count]:
            store[destination] = store[source]
        slots, rows = np.asarray(plan.slots), np.asarray(plan.rows)
        positions, offsets = np.asarray(plan.positions).ravel(), np.asarray(plan.offsets)
        stored = np.zeros(slots.size, bool)
        for slot, (_, tokens) in enumerate(answers):
            for index, token in enumerate(tokens):
                place = offsets[slot] + index
                stored[place] = True
                assert rows.flat[place] == slot
                assert positions[place] == int(plan.starts[slot]) + index
                self.store[slots.flat[place]] = token
        for array, skipped in ((slots, -1), (rows, -1), (positions, 0)):
            assert np.all(array.ravel()[~stored] == skipped)

    def reserve(self, new_tokens, packed):
        g = self.geometry
        before = [len(tokens) for tokens in self.model.tokens]
        answers, copies = self.model.reserve(new_tokens, packed)
        kwargs = {"total_tokens": g.packed} if packed else {"max_new_tokens": g.padded}
        self.pool, self.sequences, plan = sequences.reserve(
            self.pool,
            self.sequences,
            np.array(new_tokens, np.int32),
            block_size=g.block_size,
            **kwargs,
        )
        refusals = [refusal for refusal, _ in answers]
        assert plan.refusal.tolist() == refusals
        assert plan.granted.tolist() == [refusal == 0 for refusal in refusals]
        assert plan.starts.tolist() == before
        assert plan.lengths.tolist() == self.sequences.lengths.tolist()
        assert plan.new_tokens.tolist() == [len(tokens) for _, tokens in answers]
        assert np.array_equal(plan.block_tables, self.sequences.block_tables)
        assert int(plan.step) == self.model.step
        if packed:
            ends = np.cumsum(np.maximum(new_tokens, 0), dtype=np.int64)
            starts = ends - np.maximum(new_tokens, 0)
            assert plan.offsets.tolist() == np.minimum(starts, g.packed).tolist()
        self.write(plan, answers, copies)

    def fork_pairs(self, source, destination):
        self.model.fork(list(zip(source, destination, strict=True)))
        self.pool, self.sequences = sequences.fork(self.pool, self.sequences, source, destination)

    def draw_vector(self, data, elements, length=None):
        length = self.geometry.slots if length is None else length
        return data.draw(st.lists(elements, min_size=length, max_size=length))

    def draw_tokens(self, data, limit):
        usual = st.integers(0, limit)
        odd = st.sampled_from([-1, -(2**31), limit + 1, 2**31 - 1])
        return self.draw_vector(data, st.one_of(usual, usual, usual, st.just(0), odd))

    @rule(data=st.data())
    def reserve_padded(self, data):
        self.reserve(self.draw_tokens(data, self.geometry.padded), packed=False)

    @rule(data=st.data())
    def reserve_packed(self, data):
        self.reserve(self.draw_tokens(data, self.geometry.packed // 2), packed=True)

    @rule()
    def decode(self):
        self.reserve([1] * self.geometry.slots, packed=False)

    @rule(data=st.data())
    def fork(self, data):
        g = self.geometry
        usual = st.integers(0, g.slots - 1)
        slot = st.one_of(usual, usual, usual, usual, st.sampled_from([-1, -9, g.slots, 2**31 - 1]))
        source, destination = (self.draw_vector(data, slot, g.slots - 1) for _ in range(2))
        self.fork_pairs(source, destination)

    @rule(data=st.data())
    def trim(self, data):
        longest = self.geometry.columns * self.geometry.block_size
        lengths = [
            data.draw(
                st.one_of(
                    st.just(-1),
                    st.integers(max(0, len(tokens) - 2), len(tokens)),
                    st.integers(-2, longest + 1),
                )
            )
            for tokens in self.model.tokens
        ]
        self.model.trim(lengths)
        self.pool, self.sequences = sequences.trim(
            self.pool, self.sequences, lengths, block_size=self.geometry.block_size
        )

    @rule(data=st.data())
    def reorder(self, data):
        slots = self.geometry.slots
        usual = st.integers(-1, slots - 1)
        rows = self.draw_vector(data, st.one_of(usual, usual, usual, st.integers(-3, slots + 1)))
        self.model.reorder(rows)
        self.pool, self.sequences = sequences.reorder(self.pool, self.sequences, rows)

    @rule(data=st.data())
    def release(self, data):
        mask = self.draw_vector(data, st.booleans())
        for slot in np.flatnonzero(mask):
            self.model.cut(slot, 0)
        self.pool, self.sequences = sequences.release(self.pool, self.sequences, mask)

    @rule(data=st.data())
    def hold_outside(self, data):
        ids = self.draw_vector(data, st.integers(-2, self.geometry.num_blocks + 1), 3)
        self.model.retain_outside(ids)
        self.pool = blocks.retain(self.pool, np.array(ids, np.int32))

    @rule(data=st.data())
    def allocate_outside(self, data):
        wanted = self.draw_vector(data, st.booleans(), 3)
        self.model.allocate_outside(wanted)
        self.pool, _ = blocks.allocate(self.pool, np.array(wanted))

    @rule(data=st.data(), spare=st.integers(0, 2))
    def append_to_shared_blocks_with_little_room(self, data, spare):
        slots = self.geometry.slots
        source = data.draw(st.integers(0, slots - 1))
        others = [slot for slot in range(slots) if slot != source]
        self.fork_pairs([source] * (slots - 1), others)
        wanted = np.arange(self.geometry.num_blocks) < len(self.model.stack) - spare
        self.model.allocate_outside(wanted)
        self.pool, _ = blocks.allocate(self.pool, wanted)
        self.reserve(self.draw_vector(data, st.integers(0, 2)), packed=False)

    @precondition(lambda self: self.model.outside)
    @rule(data=st.data())
    def let_go_outside(self, data):
        """Releases what is held outside the sequences, and blocks that nobody holds."""
        free = [block for block, count in enumerate(self.model.counts) if count == 0]
        held = data.draw(st.permutations(self.model.outside))[:4]
        odd = st.sampled_from([*free, -1, self.geometry.num_blocks])
        ids = held + self.draw_vector(data, odd, 2) + [-1] * (4 - len(held))
        self.model.release_outside(ids)
        self.pool = blocks.release(self.pool, np.array(ids, np.int32))

    @invariant()
    def tables_and_lengths_agree(self):
        columns = self.geometry.columns
        expected = [table + [-1] * (columns - len(table)) for table in self.model.tables]
        assert self.sequences.block_tables.tolist() == expected
        assert self.sequences.lengths.tolist() == [len(tokens) for tokens in self.model.tokens]

    @invariant()
    def free_stack_and_counts_agree(self):
        stack = self.pool.free_blocks.tolist()[: int(self.pool.num_free)]
        assert stack == self.model.stack
        assert self.pool.counts.tolist() == self.model.counts

    @invariant()
    def every_block_is_free_once_or_held(self):
        counts = np.asarray(self.pool.counts)
        held = [block for table in self.model.tables for block in table] + self.model.outside
        assert np.bincount(held, minlength=len(counts)).tolist() == counts.tolist()
        stack = self.pool.free_blocks.tolist()[: int(self.pool.num_free)]
        assert sorted(stack) == np.flatnonzero(counts == 0).tolist()

    @invariant()
    def contents_agree(self):
        size = self.geometry.block_size
        tables = np.asarray(self.sequences.block_tables)
        for table, tokens in zip(tables, self.model.tokens, strict=True):
            read = [
                self.store[table[position // size] * size + position % size]
                for position in range(len(tokens))
            ]
            assert read == tokens

    @invariant()
    def faults_agree(self):
        assert self.pool.faults.counts.tolist() == list(self.model.faults.values())
        none = [-1, -1, -1]
        expected = [self.model.first.get(kind, none) for kind in FaultKind]
        assert self.pool.faults.first.tolist() == expected
        assert int(self.pool.step) == self.model.step

    def teardown(self):
        if not self.geometry.trace_events or not hasattr(self, "pool"):
            return
        for block, events in enumerate(self.model.events):
            expected = events[-self.geometry.trace_events :]
            assert blocks.read_trace(self.pool, block) == expected


GEOMETRIES = {
    "blocks of four": Geometry(
        slots=4, columns=5, block_size=4, num_blocks=11, padded=6, packed=11, trace_events=0
    ),
    "blocks of one, traced": Geometry(
        slots=3, columns=7, block_size=1, num_blocks=12, padded=3, packed=5, trace_events=3
    ),
    "short tables": Geometry(
        slots=5, columns=2, block_size=3, num_blocks=7, padded=7, packed=9, trace_events=0
    ),
}


def run(name, monkeypatch, examples, steps):
    # Small, so that moves take several turns.
    monkeypatch.setattr(sequences, "_CHUNK", 2)
    run_machine(SequencesMachine, examples, steps, geometry=GEOMETRIES[name])


@pytest.mark.slow
def test_a_short_run_agrees_with_the_model(monkeypatch):
    run("blocks of four", monkeypatch, examples=6, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_thousands_of_steps_agree_with_the_model(name, monkeypatch):
    run(name, monkeypatch, examples=24, steps=50)
