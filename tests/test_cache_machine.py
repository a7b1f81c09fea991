"""Thousands of random steps against a plain model: every sequence's stored contents, and no leaks.

Which sequences a step grants is checked exactly in test_sequences_machine.py; here the plan's own
word is taken, and what the pages then hold is compared byte for byte.
"""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import run_machine
from marks import fast_only

import jaxkv
from jaxkv import codecs

S, T, N, M, BLOCKS, BLOCK = 4, 5, 9, 4, 11, 8
NUM_IDS = 251


def config_of(name):
    return jaxkv.CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_sequences=S,
        max_blocks_per_sequence=M,
        format=name,
    )


def rows_of_ids():
    """One distinct (K, V) row pair per token id."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((2, NUM_IDS, 1, 16)).astype(np.float32)


ROWS = rows_of_ids()


@functools.partial(jax.jit, static_argnames="packed", donate_argnames="cache")
def append(cache, ids, new_tokens, packed):
    how = {"total_tokens": N} if packed else {"max_new_tokens": T}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    k, v = jnp.asarray(ROWS)[:, ids]
    return jaxkv.write(cache, 0, k, v, plan), plan


VERBS = {
    "fork": jax.jit(jaxkv.fork),
    "trim": jax.jit(jaxkv.trim),
    "reorder": jax.jit(jaxkv.reorder),
    "release": jax.jit(jaxkv.release),
}


@functools.cache
def expected_rows(name):
    """Both sides of every id as the pages must hold them, decoded."""
    spec = config_of(name).layer(0)
    out = []
    for side, x in zip((spec.k, spec.v), ROWS):
        rows, _ = codecs.encode_rows(jnp.asarray(x), side)
        out.append(np.asarray(codecs.decode_rows(rows.data, rows.scales, side)))
    return out


@functools.partial(jax.jit, static_argnames="spec")
def decode_all(pages, spec):
    return codecs.decode_pages(pages.k, spec.k), codecs.decode_pages(pages.v, spec.v)


class CacheMachine(RuleBasedStateMachine):
    name = "int8k_turbo3v"

    @initialize()
    def start(self):
        # Unused slots hold NaN or whatever 0xFF means to the format.
        cache = jaxkv.init(config_of(self.name))
        poison = jax.tree.map(
            lambda a: jax.lax.bitcast_convert_type(
                jnp.full(a.shape, 0x7F7F7F7F, jnp.uint32).astype(f"uint{8 * a.dtype.itemsize}"),
                a.dtype,
            ),
            cache.layers,
        )
        self.cache = dataclasses.replace(cache, layers=poison)
        self.contents = [[] for _ in range(S)]
        self.next_id = 0

    def fresh(self, count):
        ids = (self.next_id + np.arange(count)) % NUM_IDS
        self.next_id = int((self.next_id + count) % NUM_IDS)
        return ids

    @rule(new=st.lists(st.integers(-1, T + 1), min_size=S, max_size=S))
    def append_padded(self, new):
        ids = self.fresh(S * T).reshape(S, T)
        self.cache, plan = append(self.cache, ids, jnp.asarray(new), packed=False)
        for s in range(S):
            if plan.granted[s]:
                self.contents[s] = self.contents[s] + ids[s, : max(new[s], 0)].tolist()

    @rule(new=st.lists(st.integers(-1, N), min_size=S, max_size=S))
    def append_packed(self, new):
        ids = self.fresh(N)
        self.cache, plan = append(self.cache, ids, jnp.asarray(new), packed=True)
        offsets = np.concatenate([[0], np.cumsum(np.maximum(new, 0))])
        for s in range(S):
            if plan.granted[s]:
                took = ids[offsets[s] : offsets[s] + max(new[s], 0)]
                self.contents[s] = self.contents[s] + took.tolist()

    @rule(pairs=st.permutations(range(S)), sources=st.lists(st.integers(0, S - 1), max_size=2))
    def fork(self, pairs, sources):
        source = np.full(2, -1)
        source[: len(sources)] = sources
        destination = np.where(source < 0, -1, pairs[:2])
        self.cache = VERBS["fork"](self.cache, jnp.asarray(source), jnp.asarray(destination))
        before = list(self.contents)
        for s, d in zip(source, destination):
            if s >= 0:
                self.contents[d] = before[s]

    @rule(data=st.data())
    def trim(self, data):
        new = [data.draw(st.integers(-1, len(c))) for c in self.contents]
        self.cache = VERBS["trim"](self.cache, jnp.asarray(new))
        self.contents = [c if n < 0 else c[:n] for c, n in zip(self.contents, new)]

    @rule(rows=st.lists(st.integers(-1, S - 1), min_size=S, max_size=S))
    def reorder(self, rows):
        self.cache = VERBS["reorder"](self.cache, jnp.asarray(rows))
        self.contents = [[] if r < 0 else self.contents[r] for r in rows]

    @rule(mask=st.lists(st.booleans(), min_size=S, max_size=S))
    def release(self, mask):
        self.cache = VERBS["release"](self.cache, jnp.asarray(mask))
        self.contents = [[] if m else c for m, c in zip(mask, self.contents)]

    @invariant()
    def contents_are_what_was_appended(self):
        tables, lengths = np.asarray(self.cache.block_tables), np.asarray(self.cache.lengths)
        assert lengths.tolist() == [len(c) for c in self.contents]
        spec = self.cache.config.layer(0)
        sides = decode_all(self.cache.layers[0], spec)
        for pages, want in zip(map(np.asarray, sides), expected_rows(self.name)):
            for s, ids in enumerate(self.contents):
                where = np.arange(len(ids))
                got = pages[tables[s, where // BLOCK], :, where % BLOCK]
                np.testing.assert_array_equal(got, want[ids])

    @invariant()
    def every_block_is_free_or_counted(self):
        tables = np.asarray(self.cache.block_tables)
        holders = np.bincount(tables[tables >= 0], minlength=BLOCKS)
        np.testing.assert_array_equal(np.asarray(self.cache.pool.counts), holders)
        free = int(self.cache.num_free_blocks)
        stack = np.asarray(self.cache.pool.free_blocks)[:free]
        assert sorted(stack.tolist()) == np.flatnonzero(holders == 0).tolist()


def run(name, examples, steps):
    run_machine(CacheMachine, examples, steps, name=name)


@pytest.mark.slow
def test_a_few_hundred_random_steps():
    run("int8k_turbo3v", examples=8, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", fast_only(["bf16", "fp8k_turbo4v", "turbo8k_nvfp4v"], [], ["fp8k_turbo4v"])
)
def test_thousands_of_random_steps(name):
    run(name, examples=40, steps=50)
