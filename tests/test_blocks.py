import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import IN_PLACE, whole_array_operations
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import blocks
from jaxkv.blocks import BlockPool
from jaxkv.faults import FaultKind

# A prime, so that no other array of these programs has this length.
POOL_SIZE = 99991


def new_pool(**kwargs):
    """Six blocks; one size for most tests, so that each verb compiles once."""
    return BlockPool.create(6, **kwargs)


def ints(*values):
    """Eight ids, likewise: those not given are skipped."""
    return jnp.array(values + (-1,) * (8 - len(values)), jnp.int32)


def take(pool, n):
    pool, ids = blocks.allocate(pool, np.arange(8) < n)
    return pool, ids[:n]


def free_stack(pool):
    return np.asarray(pool.free_blocks)[: int(pool.num_free)].tolist()


def assert_sound(pool):
    """Every block is free exactly once or held."""
    stack, counts = free_stack(pool), np.asarray(pool.counts)
    assert sorted(stack) == np.flatnonzero(counts == 0).tolist()
    assert counts.min() >= 0


def first(pool, kind):
    return np.asarray(pool.faults.first)[kind].tolist()


def test_a_fresh_pool_hands_out_blocks_in_order():
    pool, ids = take(new_pool(), 3)
    np.testing.assert_array_equal(ids, [0, 1, 2])
    np.testing.assert_array_equal(pool.counts, [1, 1, 1, 0, 0, 0])
    assert free_stack(pool) == [5, 4, 3]
    assert pool.num_blocks == 6


def test_the_block_released_last_is_allocated_first():
    pool, _ = take(new_pool(), 4)
    pool = blocks.release(pool, ints(2, 0, 3))
    pool, ids = take(pool, 4)
    np.testing.assert_array_equal(ids, [3, 0, 2, 4])


def test_only_wanted_entries_get_blocks():
    wanted = np.array([0, 1, 0, 1, 1, 0, 0, 0], bool)
    pool, ids = blocks.allocate(new_pool(), wanted)
    np.testing.assert_array_equal(ids, [-1, 0, -1, 1, 2, -1, -1, -1])
    assert int(pool.faults.exhausted) == 0


def test_entries_beyond_the_last_free_block_get_none_and_are_counted():
    pool, _ = take(new_pool(), 4)
    pool, ids = blocks.allocate(pool, np.array([1, 0, 1, 0, 1, 1, 0, 0], bool))
    np.testing.assert_array_equal(ids, [4, -1, 5, -1, -1, -1, -1, -1])
    assert int(pool.num_free) == 0
    assert int(pool.faults.exhausted) == 2
    assert first(pool, FaultKind.EXHAUSTED) == [0, -1, 4]
    assert_sound(pool)


def test_holders_add_up_and_only_the_last_release_frees():
    pool, _ = take(new_pool(), 5)
    pool = blocks.retain(pool, ints(1, 0, 1))
    np.testing.assert_array_equal(pool.counts, [2, 3, 1, 1, 1, 0])
    pool = blocks.release(pool, ints(1, 0, 1))
    np.testing.assert_array_equal(pool.counts, [1, 1, 1, 1, 1, 0])
    assert free_stack(pool) == [5]
    pool = blocks.release(pool, ints(1))
    assert free_stack(pool) == [5, 1]
    assert int(pool.faults.counts.sum()) == 0


def test_a_release_at_zero_frees_nothing_and_is_counted():
    pool, _ = take(new_pool(), 5)
    pool = blocks.release(pool, ints(1))
    again = blocks.release(pool, ints(1))
    assert int(again.faults.release_at_zero) == 1
    assert first(again, FaultKind.RELEASE_AT_ZERO) == [0, -1, 1]
    chex.assert_trees_all_equal(dataclasses.replace(again, faults=pool.faults), pool)
    _, ids = take(again, 3)
    np.testing.assert_array_equal(ids, [1, 5, -1])


def test_a_block_released_too_often_in_one_call_is_freed_once_where_its_last_holder_left():
    pool, _ = take(new_pool(), 6)
    pool = blocks.retain(pool, ints(2))
    pool = blocks.release(pool, ints(2, 0, 2, 3, 2, 0))
    assert free_stack(pool) == [0, 2, 3]
    assert int(pool.faults.release_at_zero) == 2
    assert first(pool, FaultKind.RELEASE_AT_ZERO) == [0, -1, 2]
    assert_sound(pool)


@pytest.mark.parametrize("verb", [blocks.retain, blocks.release])
def test_negative_ids_are_skipped_and_ids_past_the_pool_are_counted(verb):
    pool, _ = take(new_pool(), 2)
    after = verb(pool, ints(-1, 7, -(2**31), 6, 2**31 - 1))
    assert int(after.faults.bad_id) == 3
    assert first(after, FaultKind.BAD_ID) == [0, -1, 7]
    chex.assert_trees_all_equal(dataclasses.replace(after, faults=pool.faults), pool)


def test_a_free_block_cannot_be_retained():
    pool, _ = take(new_pool(), 1)
    after = blocks.retain(pool, ints(2, 0, 2))
    np.testing.assert_array_equal(after.counts, [2, 0, 0, 0, 0, 0])
    assert int(after.faults.bad_id) == 2
    assert first(after, FaultKind.BAD_ID) == [0, -1, 2]
    assert_sound(after)


def test_ids_beyond_int32_are_out_of_range_rather_than_wrapped():
    pool, _ = take(new_pool(), 6)
    ids = np.full(8, -(2**33), np.int64)
    ids[:2] = 2**32, 2**32 + 1
    pool = blocks.release(pool, ids)
    pool = blocks.release(pool, np.full(8, 2**32 - 1, np.uint32))
    assert int(pool.faults.bad_id) == 2 + 8
    np.testing.assert_array_equal(pool.counts, np.ones(6))


def test_no_ids_at_all_change_nothing():
    pool, _ = take(new_pool(), 1)
    same, ids = blocks.allocate(pool, jnp.zeros(0, bool))
    assert ids.shape == (0,)
    empty = jnp.zeros(0, jnp.int32)
    chex.assert_trees_all_equal(same, pool)
    chex.assert_trees_all_equal(blocks.release(blocks.retain(pool, empty), empty), pool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: blocks.allocate(p, ints(1)), TypeError, "wanted must be boolean, got .*int32"),
        (lambda p: blocks.allocate(p, True), ValueError, r"wanted must have one axis, got .*\(\)"),
        (lambda p: blocks.retain(p, [0.5]), TypeError, "blocks must hold integers, got .*float"),
        (lambda p: blocks.release(p, [[1]]), ValueError, r"blocks must have shape \[n\], .*1, 1"),
        (lambda p: BlockPool.create(0), ValueError, "num_blocks must be at least 1, got 0"),
        (lambda p: BlockPool.create(1, -1), ValueError, "trace_events must be at least 0, got -1"),
    ],
)
def test_static_trouble_raises_and_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(new_pool())


def test_every_leaf_has_a_buffer_of_its_own():
    leaves = jax.tree.leaves(BlockPool.create(8, trace_events=2))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


operations = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "retain", "release"]),
        st.lists(st.integers(-2, 7), min_size=8, max_size=8),
    ),
    max_size=6,
)


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(operations)
def test_a_bulk_call_equals_its_entries_one_at_a_time(calls):
    bulk = single = new_pool(trace_events=3)
    for verb, entries in calls:
        for entry in entries:
            if verb == "allocate":
                single, _ = take(single, entry % 2)
            else:
                single = getattr(blocks, verb)(single, ints(entry))
        if verb == "allocate":
            bulk, _ = blocks.allocate(bulk, np.array(entries) % 2 == 1)
        else:
            bulk = getattr(blocks, verb)(bulk, ints(*entries))
        assert free_stack(bulk) == free_stack(single)
        np.testing.assert_array_equal(bulk.counts, single.counts)
        np.testing.assert_array_equal(bulk.faults.counts, single.faults.counts)
        kinds = [FaultKind.BAD_ID, FaultKind.RELEASE_AT_ZERO]
        np.testing.assert_array_equal(
            np.asarray(bulk.faults.first)[kinds], np.asarray(single.faults.first)[kinds]
        )
        chex.assert_trees_all_equal(bulk.trace, single.trace)
        assert_sound(bulk)


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_occurrence_rank_counts_equal_entries_before_each(n):
    ids = np.random.default_rng(n).integers(-2, max(1, n // 4), n)
    expected = [int(np.sum(ids[:i] == ids[i])) for i in range(n)]
    np.testing.assert_array_equal(blocks.occurrence_rank(jnp.asarray(ids, jnp.int32)), expected)


def test_a_trace_lists_what_happened_to_a_block():
    pool, _ = take(new_pool(trace_events=8), 2)
    pool = blocks.retain(dataclasses.replace(pool, step=jnp.int32(4)), ints(1, 1))
    pool = blocks.release(dataclasses.replace(pool, step=jnp.int32(5)), ints(1, 1, 1, 1))
    assert blocks.read_trace(pool, 1) == [
        ("allocate", 1, 0),
        ("retain", 2, 4),
        ("retain", 3, 4),
        ("release", 2, 5),
        ("release", 1, 5),
        ("release", 0, 5),
        ("release at zero", 0, 5),
    ]
    assert blocks.read_trace(pool, 0) == [("allocate", 1, 0)]
    assert blocks.read_trace(pool, 2) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_trace_keeps_the_last_events_however_many_come_in_one_call(count):
    pool, _ = take(new_pool(trace_events=3), 1)
    pool = blocks.retain(pool, ints(*[0] * count))
    expected = [("allocate", 1, 0)] + [("retain", i + 2, 0) for i in range(count)]
    assert blocks.read_trace(pool, 0) == expected[-3:]


def test_a_trace_can_only_be_read_of_a_block_that_keeps_one():
    assert BlockPool.create(2).trace is None
    with pytest.raises(ValueError, match="trace_events"):
        blocks.read_trace(BlockPool.create(2), 0)
    for block in (-1, 2):
        with pytest.raises(ValueError, match=rf"\[0, 2\), got {block}"):
            blocks.read_trace(BlockPool.create(2, trace_events=1), block)


VERBS = {
    "allocate": lambda pool, ids: blocks.allocate(pool, ids > 0)[0],
    "retain": blocks.retain,
    "release": blocks.release,
}


@pytest.mark.as_shipped
@pytest.mark.parametrize("trace_events", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_touches_the_whole_pool(verb, trace_events):
    pool = BlockPool.create(POOL_SIZE, trace_events)
    step, ids = VERBS[verb], ints(3, 1, 1)

    def loop(pool, ids):
        return jax.lax.fori_loop(0, 3, lambda i, pool: step(pool, ids), pool)

    assert whole_array_operations(loop, POOL_SIZE, pool, ids) <= IN_PLACE


@pytest.mark.as_shipped
def test_a_program_that_copies_the_pool_would_be_noticed():
    pool, ids = BlockPool.create(POOL_SIZE), ints(3, 1)
    every = jnp.arange(POOL_SIZE)

    def careless(pool, ids):
        return dataclasses.replace(pool, counts=pool.counts + (every == ids[0]))

    def keeps_the_old(pool, ids):
        return pool.counts, blocks.retain(pool, ids)

    assert not whole_array_operations(careless, POOL_SIZE, pool, ids) <= IN_PLACE
    assert not whole_array_operations(keeps_the_old, POOL_SIZE, pool, ids) <= IN_PLACE


@pytest.mark.parametrize("verb", VERBS)
def test_a_donated_pool_is_updated_in_place(verb):
    pool = new_pool()
    before = pool.counts.unsafe_buffer_pointer(), pool.free_blocks.unsafe_buffer_pointer()
    pool = jax.jit(VERBS[verb], donate_argnums=0)(pool, ints(0, 1))
    assert before == (pool.counts.unsafe_buffer_pointer(), pool.free_blocks.unsafe_buffer_pointer())


def test_each_verb_is_traced_once_for_all_ids():
    def programs():
        verbs = (blocks._allocate, blocks._retain, blocks._release)
        return [verb._cache_size() for verb in verbs]

    def run(pool, ids):
        pool, _ = blocks.allocate(pool, ids > 1)
        return blocks.release(blocks.retain(pool, ids), ids)

    pool = run(new_pool(), ints(1))
    before = programs()
    for i in range(4):
        pool = run(pool, ints(i, 9, i, -1))
    assert programs() == before


@pytest.mark.as_shipped
def test_off_a_trace_leaves_no_mark_on_the_program():
    def program(trace_events):
        pool = BlockPool.create(8, trace_events)
        return jax.jit(blocks.release).lower(pool, ints(1, 2)).as_text()

    assert "8x2x3" in program(2)
    assert len(program(0)) < len(program(2))
    assert len(jax.tree.leaves(BlockPool.create(8))) == 6
