"""Random operations on everything that shares, swaps and stores blocks, with faults injected.

A plain model knows which tokens every sequence holds. After each operation all references are
counted; contents are compared byte for byte, on the device and in the store. Faults: the pool dry,
the store full, a disk write that fails, the process killed between write and rename, and a restart
that loses the device.
"""

import contextlib
import functools
import os
import random

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from machines import run_machine
from stores import Killed

import jaxkv
from jaxkv import codecs

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

S, T, COLUMNS, BLOCKS, BLOCK, RESIDENT, WINDOW = 3, 20, 6, 13, 8, 2, 19
LAYERS = 2
NUM_IDS = 23


def config_of(**options):
    return jaxkv.CacheConfig(
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=16,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_sequences=S,
        max_blocks_per_sequence=COLUMNS,
        format="int8",
        layer_formats=("bf16",),
        **options,
    )


CONFIGS = {
    "resident": config_of(resident_blocks_per_sequence=RESIDENT),
    "window": config_of(window=WINDOW, keep_first=3),
    "plain": config_of(),
}
# What a token stores depends on its id alone, so that equal prompts have equal blocks.
ROWS = np.random.default_rng(7).standard_normal((2, NUM_IDS, 1, 16)).astype(np.float32)


@functools.partial(jax.jit, donate_argnames="cache")
def append(cache, ids, new_tokens):
    cache, plan = jaxkv.reserve(cache, new_tokens, max_new_tokens=T)
    k, v = jnp.asarray(ROWS)[:, ids]
    for layer in range(LAYERS):
        cache = jaxkv.write(cache, layer, k, v, plan)
    return cache, plan.granted, plan.refusal


VERBS = {verb.__name__: jax.jit(verb) for verb in (jaxkv.fork, jaxkv.trim, jaxkv.reorder)}


@functools.cache
def expected_rows():
    """Per layer, each leaf's row of every id: what `LayerPages` must hold for that token."""
    layers = []
    for layer in range(LAYERS):
        spec, leaves = CONFIGS["plain"].layer(layer), []
        for side, x in zip((spec.k, spec.v), ROWS):
            rows, _ = codecs.encode_rows(jnp.asarray(x), side)
            leaves += jax.tree.leaves((rows.data, rows.scales))
        layers.append([np.asarray(leaf) for leaf in leaves])
    return layers


class Sharing:
    """The system and its model. `draw(low, high)` gives the arguments of every operation."""

    def __init__(self, kind, path, draw):
        self.config, self.path, self.draw = CONFIGS[kind], path, draw
        self.store = jaxkv.BlockStore(path)
        self.swapped = {}
        self.next_key = 0
        self.prompts = [[1] * 30]
        self.faults_seen = dict.fromkeys(["dry", "full", "disk", "killed", "restart"], 0)
        self.start()

    def start(self):
        self.cache = jaxkv.init(self.config)
        self.prefix = jaxkv.PrefixCache(self.config)
        self.contents = [[] for _ in range(S)]

    def close(self):
        self.store.close()

    # Operations

    def append(self):
        counts = [self.draw(0, T) if self.draw(0, 2) else 0 for _ in range(S)]
        ids = np.zeros((S, T), np.int32)
        for s, count in enumerate(counts):
            # Few distinct runs, so that prompts meet again in the prefix tree.
            first = self.draw(0, 3)
            ids[s, :count] = (first + np.arange(len(self.contents[s]), T + len(self.contents[s])))[
                :count
            ] % NUM_IDS
        tables, free = np.asarray(self.cache.block_tables), int(self.cache.num_free_blocks)
        self.cache, granted, refusal = append(self.cache, ids, jnp.asarray(counts))
        granted, refusal = np.asarray(granted), np.asarray(refusal)
        for s, count in enumerate(counts):
            used, rest = divmod(len(self.contents[s]), BLOCK)
            stuck = self.limit is not None and (
                (tables[s] >= 0).sum() > self.limit or (rest > 0 and tables[s, used] <= -2)
            )
            fits = len(self.contents[s]) + count <= COLUMNS * BLOCK
            if granted[s]:
                assert count == 0 or (fits and not stuck)
                self.contents[s] = self.contents[s] + ids[s, :count].tolist()
            else:
                assert int(refusal[s]) == (1 if fits else 2)
                needs = sum(-(-c // BLOCK) + 1 for c in counts if c)
                assert not fits or stuck or free < needs
                self.faults_seen["dry"] += fits and not stuck

    @property
    def limit(self):
        return self.config.resident_blocks_per_sequence

    def fork(self):
        source, destination = self.draw(0, S - 1), self.draw(0, S - 1)
        pair = [jnp.asarray([x], jnp.int32) for x in (source, destination)]
        self.cache = VERBS["fork"](self.cache, *pair)
        self.contents[destination] = self.contents[source]

    def reorder(self):
        rows = [self.draw(-1, S - 1) for _ in range(S)]
        self.cache = VERBS["reorder"](self.cache, jnp.asarray(rows))
        self.contents = [[] if r < 0 else self.contents[r] for r in rows]

    def trim(self):
        new = [self.draw(-1, len(c)) for c in self.contents]
        before = int(np.asarray(self.cache.faults.counts)[jaxkv.FaultKind.PAST_CAPACITY])
        self.cache = VERBS["trim"](self.cache, jnp.asarray(new))
        got = np.asarray(self.cache.lengths).tolist()
        ignored = sum(n >= 0 and n != g for n, g in zip(new, got))
        after = int(np.asarray(self.cache.faults.counts)[jaxkv.FaultKind.PAST_CAPACITY])
        assert after - before == ignored
        assert self.config.window is not None or ignored == 0
        assert all(g in (n, len(c)) for n, g, c in zip(new, got, self.contents))
        self.contents = [c[:g] for c, g in zip(self.contents, got)]
        if ignored:
            self.cache = jaxkv.clear_faults(self.cache)

    def release(self):
        mask = [self.draw(0, 1) == 1 for _ in range(S)]
        self.cache = jaxkv.release(self.cache, jnp.asarray(mask))
        self.contents = [[] if m else c for m, c in zip(mask, self.contents)]

    def attach(self):
        slot, prompt = self.draw(0, S - 1), self.prompts[self.draw(0, len(self.prompts) - 1)]
        if self.contents[slot]:
            with pytest.raises(ValueError, match="expected none"):
                self.prefix.attach(self.cache, slot, prompt)
            return
        self.cache, matched = self.prefix.attach(self.cache, slot, prompt)
        assert matched < len(prompt)
        self.contents[slot] = list(prompt[:matched])

    def insert(self):
        slot = self.draw(0, S - 1)
        if self.contents[slot]:
            self.cache = self.prefix.insert(self.cache, slot, self.contents[slot])
            self.prompts = [*self.prompts[-4:], self.contents[slot]]

    def make_room(self):
        wanted = self.draw(0, BLOCKS)
        held = {node.block for node in self.prefix._nodes.values()}
        counts = np.asarray(self.cache.pool.counts)
        free, alone = int(self.cache.num_free_blocks), int((counts[list(held)] == 1).sum())
        self.cache = self.prefix.make_room(self.cache, wanted)
        now = int(self.cache.num_free_blocks)
        assert now == max(free, min(wanted, free + alone))

    def clear(self):
        if self.draw(0, 3) == 0:
            self.cache = self.prefix.clear(self.cache)

    def swap_out(self):
        slot = self.draw(0, S - 1)
        if not self.contents[slot]:
            return
        before = self.cache
        with self.fault() as failed:
            self.cache = jaxkv.swap_out(self.cache, slot, self.store, key=self.next_key)
        if failed:
            self.cache = before
            assert self.next_key not in self.store
            return
        self.swapped[self.next_key] = self.contents[slot]
        self.contents[slot] = []
        self.next_key += 1

    def swap_in(self):
        if not self.swapped:
            return
        slot = self.draw(0, S - 1)
        key = sorted(self.swapped)[self.draw(0, len(self.swapped) - 1)]
        if self.contents[slot]:
            with pytest.raises(ValueError, match="expected none"):
                jaxkv.swap_in(self.cache, slot, self.store, key=key)
            return
        columns = self.store.sequence(key)["columns"]
        if sum(c >= 0 for c in columns) > int(self.cache.num_free_blocks):
            self.faults_seen["dry"] += 1
            with pytest.raises(jaxkv.CacheError, match="free blocks"):
                jaxkv.swap_in(self.cache, slot, self.store, key=key)
            assert key in self.store
            return
        self.cache = jaxkv.swap_in(self.cache, slot, self.store, key=key)
        self.contents[slot] = self.swapped.pop(key)
        self.check_contents(slot)

    def forget(self):
        if len(self.swapped) > 4:
            key = sorted(self.swapped)[self.draw(0, len(self.swapped) - 1)]
            del self.swapped[key]
            self.store.delete(key)

    def offload(self):
        if self.limit is None:
            return
        before = self.cache
        with self.fault() as failed:
            self.cache = jaxkv.offload(self.cache, self.store)
        if failed:
            self.cache = before
            return
        tables = np.asarray(self.cache.block_tables)
        assert self.store.handles() == self.named(tables)
        for s, ids in enumerate(self.contents):
            used = -(-len(ids) // BLOCK)
            assert (tables[s, : max(0, used - self.limit)] <= -2).all()
            newest = tables[s, max(0, used - self.limit) : used]
            assert (newest >= 0).all() or int(self.cache.num_free_blocks) == 0

    def restart(self):
        """Another process: the device's contents are gone, swapped sequences are not."""
        if self.draw(0, 9) == 0:
            self.faults_seen["restart"] += 1
            self.reopen()
            self.start()

    def reopen(self):
        self.store.close()
        self.store = jaxkv.BlockStore(self.path)
        assert set(self.store.keys) == set(self.swapped)
        assert not list(self.path.glob("*.tmp"))

    @contextlib.contextmanager
    def fault(self):
        """Runs what is inside with one of the store's faults, mostly none; says if it struck."""
        struck = []
        kind = self.draw(0, 8)
        patch = pytest.MonkeyPatch()
        if kind == 0:
            self.store.max_bytes = self.store.nbytes + self.draw(0, 3000)
        elif kind == 1:
            patch.setattr(os, "fsync", self.failing(OSError("no space"), self.draw(0, 1)))
        elif kind == 2:
            patch.setattr(os, "replace", self.failing(Killed(), self.draw(0, 1)))
        files = sorted(self.path.glob("*.jaxkv")) if kind == 1 else None
        try:
            yield struck
        except jaxkv.CacheError as error:
            assert kind in (0, 1) and ("full" if kind == 0 else "no space") in str(error)
            struck.append(True)
            self.faults_seen["full" if kind == 0 else "disk"] += 1
        except Killed:
            struck.append(True)
            self.faults_seen["killed"] += 1
        finally:
            patch.undo()
            self.store.max_bytes = None
        if struck and kind == 1:
            left = sorted(self.path.glob("*.jaxkv"))
            assert set(left) <= set(files) and not list(self.path.glob("*.tmp"))
        if struck and kind == 2:
            self.reopen()

    @staticmethod
    def failing(error, calls):
        """An os function that works some times, then fails once."""
        left = [calls]
        real = {OSError: os.fsync, Killed: os.replace}[type(error)]

        def call(*arguments):
            left[0] -= 1
            if left[0] == -1:
                raise error
            return real(*arguments)

        return call

    # Invariants

    def named(self, tables):
        handles = set((-2 - tables[tables <= -2]).tolist())
        return handles | self.store.handles_of_sequences()

    def check_references(self):
        tables, lengths = np.asarray(self.cache.block_tables), np.asarray(self.cache.lengths)
        assert lengths.tolist() == [len(c) for c in self.contents]
        holders = np.bincount(tables[tables >= 0], minlength=BLOCKS)
        for node in self.prefix._nodes.values():
            holders[node.block] += 1
        np.testing.assert_array_equal(np.asarray(self.cache.pool.counts), holders)
        free = int(self.cache.num_free_blocks)
        stack = np.asarray(self.cache.pool.free_blocks)[:free].tolist()
        assert sorted(stack) == np.flatnonzero(holders == 0).tolist()
        assert set(self.store.keys) == set(self.swapped)
        assert self.named(tables) <= self.store.handles()
        for row, length in zip(tables, lengths.tolist()):
            used = -(-length // BLOCK)
            assert (row[used:] == -1).all()
            lowest = 0
            if self.config.window is not None:
                lowest = max(0, length - self.config.window + 1) // BLOCK
                assert used == 0 or row[0] >= 0  # keep_first
            assert (row[lowest:used] != -1).all()

    def check_contents(self, slot):
        ids = np.asarray(self.contents[slot], np.int64)
        row = np.asarray(self.cache.block_tables)[slot]
        for layer, expected in enumerate(expected_rows()):
            pool = [np.asarray(leaf) for leaf in jax.tree.leaves(self.cache.layers[layer])]
            for column in range(-(-len(ids) // BLOCK)):
                tokens = ids[column * BLOCK : (column + 1) * BLOCK]
                if row[column] == -1:
                    continue
                if row[column] >= 0:
                    block = [leaf[row[column]] for leaf in pool]
                else:
                    block = self.stored_block(-2 - int(row[column]), layer, pool)
                for got, want in zip(block, expected, strict=True):
                    got = got[:, : len(tokens)].swapaxes(0, 1)
                    assert got.tobytes() == want[tokens].tobytes()

    def stored_block(self, handle, layer, pool):
        data, begin, block = self.store.read_block(handle, layer), 0, []
        for leaf in pool:
            block.append(
                np.frombuffer(data, leaf.dtype, leaf[0].size, begin).reshape(leaf[0].shape)
            )
            begin += block[-1].nbytes
        assert begin == len(data)
        return block

    def finish(self):
        """Everything can be given back: no block and no byte is left behind."""
        for slot in range(S):
            self.check_contents(slot)
        self.cache = jaxkv.release(self.cache, jnp.ones(S, bool))
        self.contents = [[] for _ in range(S)]
        self.cache = self.prefix.clear(self.cache)
        for key in sorted(self.swapped):
            self.cache = jaxkv.swap_in(self.cache, 0, self.store, key=key)
            self.contents[0] = self.swapped.pop(key)
            self.check_contents(0)
            self.cache = jaxkv.release(self.cache, jnp.ones(S, bool))
            self.contents[0] = []
        self.check_references()
        assert int(self.cache.num_free_blocks) == BLOCKS
        if self.limit is not None:
            self.cache = jaxkv.offload(self.cache, self.store)
        assert self.store.nbytes == 0 and not list(self.path.glob("*.jaxkv"))
        jaxkv.check(self.cache)
        self.close()


# How often each operation is tried.
OPERATIONS = {
    "append": 6,
    "offload": 4,
    "fork": 1,
    "reorder": 1,
    "trim": 2,
    "release": 1,
    "attach": 3,
    "insert": 2,
    "make_room": 2,
    "clear": 1,
    "swap_out": 3,
    "swap_in": 4,
    "forget": 1,
    "restart": 1,
}


class SharingMachine(RuleBasedStateMachine):
    kind = "resident"
    directories = None

    @initialize()
    def start(self):
        self.path = next(self.directories)
        self.system = Sharing(self.kind, self.path, None)

    @rule(
        name=st.sampled_from([n for n, weight in OPERATIONS.items() for _ in range(weight)]),
        data=st.data(),
    )
    def operate(self, name, data):
        self.system.draw = lambda low, high: data.draw(st.integers(low, high))
        getattr(self.system, name)()
        self.system.check_references()
        for slot in range(S):
            self.system.check_contents(slot)

    def teardown(self):
        if hasattr(self, "system"):
            self.system.finish()


def run(kind, tmp_path, examples, steps):
    directories = (tmp_path / str(i) for i in range(10**9))
    run_machine(SharingMachine, examples, steps, kind=kind, directories=directories)


def drive(kind, path, operations, seed):
    """Random operations without hypothesis's overhead: contents are compared now and then."""
    rng = random.Random(seed)
    system = Sharing(kind, path, rng.randint)
    names, weights = list(OPERATIONS), list(OPERATIONS.values())
    for i in range(operations):
        getattr(system, rng.choices(names, weights)[0])()
        system.check_references()
        if i % 20 == 0:
            system.check_contents(rng.randrange(S))
    seen = system.faults_seen
    system.finish()
    return seen


def test_hundreds_of_random_operations(tmp_path):
    run("resident", tmp_path, examples=3, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_thousands_of_random_operations(kind, tmp_path):
    seen = drive(kind, tmp_path / "kv", 1500, seed=1)
    assert all(seen[fault] for fault in ("dry", "full", "disk", "killed", "restart"))


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, operations", [("resident", 60_000), ("window", 20_000), ("plain", 20_000)]
)
def test_a_hundred_thousand_random_operations_leak_nothing(kind, operations, tmp_path):
    seen = drive(kind, tmp_path / "kv", operations, seed=2)
    assert all(seen[fault] > 10 for fault in seen)
