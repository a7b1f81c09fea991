import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import IN_PLACE, whole_array_operations

from jaxkv import blocks, sequences
from jaxkv.blocks import BlockPool
from jaxkv.faults import FaultKind
from jaxkv.sequences import Refusal, Sequences

S, M, BLOCK = 4, 4, 4
T, N = 8, 9
# A prime, so that no other array of these programs has this length.
POOL_SIZE = 99991


def new_state(num_blocks=10, **kwargs):
    """Ten blocks for most tests, so that each verb compiles once."""
    return BlockPool.create(num_blocks, **kwargs), Sequences.create(S, M)


def with_free(pool, num_free):
    """Leaves the next `num_free` blocks free and holds all below them: the pool and those held."""
    held, left = np.split(np.array(free_stack(pool)), [int(pool.num_free) - num_free])
    stack = np.concatenate([left, np.zeros(pool.num_blocks - num_free, int)])
    pool = dataclasses.replace(
        pool,
        free_blocks=jnp.asarray(stack, jnp.int32),
        num_free=jnp.int32(num_free),
        counts=pool.counts.at[held].add(1),
    )
    return pool, held.tolist()


def reserve(pool, seqs, new_tokens):
    return sequences.reserve(pool, seqs, new_tokens, block_size=BLOCK, max_new_tokens=T)


def reserve_packed(pool, seqs, new_tokens):
    return sequences.reserve(pool, seqs, new_tokens, block_size=BLOCK, total_tokens=N)


def trim(pool, seqs, new_lengths):
    return sequences.trim(pool, seqs, new_lengths, block_size=BLOCK)


def fill(pool, seqs, lengths):
    """Appends tokens, any number of them, and checks that all were granted."""
    left = np.array(lengths)
    while left.any():
        pool, seqs, plan = reserve(pool, seqs, np.minimum(left, T))
        assert np.all(plan.granted)
        left -= np.minimum(left, T)
    return pool, seqs


def started(lengths, **kwargs):
    return fill(*new_state(**kwargs), lengths)


def fork(pool, seqs, source, destination):
    skipped = [-1] * (6 - len(source))
    return sequences.fork(pool, seqs, source + skipped, destination + skipped)


def rows(seqs):
    return [[int(b) for b in row if b != -1] for row in np.asarray(seqs.block_tables)]


def lengths(seqs):
    return np.asarray(seqs.lengths).tolist()


def free_stack(pool):
    return np.asarray(pool.free_blocks)[: int(pool.num_free)].tolist()


def copies(plan):
    count = int(plan.num_copies)
    pairs = np.stack([plan.copy_from, plan.copy_to], axis=-1)
    assert np.all(pairs[count:] == -1)
    return pairs[:count].tolist()


def faults(pool):
    return {
        kind.name.lower(): int(pool.faults.counts[kind])
        for kind in FaultKind
        if int(pool.faults.counts[kind])
    }


def first(pool, kind):
    return np.asarray(pool.faults.first)[kind].tolist()


def assert_sound(pool, seqs, other_holders=()):
    """Free and held blocks add up to all, and each count is the number of holders."""
    counts = np.asarray(pool.counts)
    held = [block for row in rows(seqs) for block in row if block >= 0] + list(other_holders)
    np.testing.assert_array_equal(np.bincount(held, minlength=pool.num_blocks), counts)
    assert sorted(free_stack(pool)) == np.flatnonzero(counts == 0).tolist()


def assert_untouched(after, before, slots):
    for slot in slots:
        np.testing.assert_array_equal(after.block_tables[slot], before.block_tables[slot])
        assert after.lengths[slot] == before.lengths[slot]


def test_a_padded_step_hands_out_blocks_by_slot_and_column():
    pool, seqs, plan = reserve(*new_state(), [5, 3, 0, 8])
    assert rows(seqs) == [[0, 1], [2], [], [3, 4]]
    assert lengths(seqs) == [5, 3, 0, 8]
    np.testing.assert_array_equal(
        plan.slots,
        [
            [0, 1, 2, 3, 4, -1, -1, -1],
            [8, 9, 10, -1, -1, -1, -1, -1],
            [-1] * 8,
            [12, 13, 14, 15, 16, 17, 18, 19],
        ],
    )
    np.testing.assert_array_equal(
        plan.positions,
        [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0], [0] * 8, range(8)],
    )
    np.testing.assert_array_equal(plan.rows, np.where(plan.slots >= 0, np.arange(S)[:, None], -1))
    np.testing.assert_array_equal(plan.offsets, [0, 8, 16, 24])
    np.testing.assert_array_equal(plan.granted, [True] * 4)
    np.testing.assert_array_equal(plan.refusal, [0] * 4)
    assert copies(plan) == []
    assert free_stack(pool) == [9, 8, 7, 6, 5]
    assert_sound(pool, seqs)


def test_a_later_step_continues_where_the_sequences_end():
    pool, seqs, plan = reserve(*started([5, 3, 0, 8]), [4, 1, 2, 1])
    assert rows(seqs) == [[0, 1, 5], [2], [6], [3, 4, 7]]
    np.testing.assert_array_equal(plan.starts, [5, 3, 0, 8])
    np.testing.assert_array_equal(plan.lengths, [9, 4, 2, 9])
    np.testing.assert_array_equal(plan.new_tokens, [4, 1, 2, 1])
    np.testing.assert_array_equal(
        plan.slots[:, :4],
        [[5, 6, 7, 20], [11, -1, -1, -1], [24, 25, -1, -1], [28, -1, -1, -1]],
    )
    np.testing.assert_array_equal(plan.positions[0, :4], [5, 6, 7, 8])
    np.testing.assert_array_equal(plan.positions[:, 0], [5, 3, 0, 8])
    chex.assert_trees_all_equal(plan.block_tables, seqs.block_tables)
    assert_sound(pool, seqs)


def test_a_packed_step_lays_tokens_out_sequence_after_sequence():
    pool, seqs, plan = reserve_packed(*started([3, 0, 4, 0]), [3, 0, 1, 4])
    assert rows(seqs) == [[0, 2], [], [1, 3], [4]]
    np.testing.assert_array_equal(plan.offsets, [0, 3, 3, 4])
    np.testing.assert_array_equal(plan.slots, [3, 8, 9, 12, 16, 17, 18, 19, -1])
    np.testing.assert_array_equal(plan.positions, [3, 4, 5, 4, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(plan.rows, [0, 0, 0, 2, 3, 3, 3, 3, -1])
    assert_sound(pool, seqs)


def test_a_plan_knows_its_layout():
    _, _, padded = reserve(*new_state(), [1, 0, 0, 0])
    _, _, packed = reserve_packed(*new_state(), [1, 0, 0, 0])
    assert (padded.is_packed, padded.token_shape, padded.total_tokens) == (False, (S, T), None)
    assert (packed.is_packed, packed.token_shape, packed.max_new_tokens) == (True, (N,), N)
    _, _, decode = sequences.reserve(*new_state(), [1, 0, 0, 2], block_size=BLOCK)
    assert decode.token_shape == (S, 1)
    np.testing.assert_array_equal(decode.refusal, [0, 0, 0, Refusal.PAST_CAPACITY])


@pytest.mark.parametrize("plan_step", [reserve, reserve_packed])
def test_no_tokens_leave_a_sequence_alone_and_are_granted(plan_step):
    pool, seqs = started([16, 3, 0, 0])
    after, same, plan = plan_step(pool, seqs, [0, 0, 0, 0])
    chex.assert_trees_all_equal(same, seqs)
    np.testing.assert_array_equal(plan.granted, [True] * 4)
    assert np.all(plan.slots == -1)
    chex.assert_trees_all_equal(dataclasses.replace(after, step=pool.step), pool)


def test_each_reserve_is_a_step_and_faults_name_theirs():
    pool, seqs = new_state()
    assert int(pool.step) == 0
    for expected in (1, 2, 3):
        pool, seqs, plan = reserve(pool, seqs, [0, 0, -1, 0])
        assert int(pool.step) == int(plan.step) == expected
    assert first(pool, FaultKind.BAD_ID) == [1, -1, 2]
    assert faults(pool) == {"bad_id": 3}


@pytest.mark.parametrize("plan_step", [reserve, reserve_packed])
def test_negative_counts_are_bad_ids_and_take_no_room(plan_step):
    before = started([5, 0, 2, 0])
    pool, seqs, plan = plan_step(*before, [-1, 2, -(2**31), 3])
    np.testing.assert_array_equal(plan.granted, [False, True, False, True])
    np.testing.assert_array_equal(plan.refusal, [4, 0, 4, 0])
    assert faults(pool) == {"bad_id": 2}
    assert first(pool, FaultKind.BAD_ID)[1:] == [-1, 0]
    assert_untouched(seqs, before[1], [0, 2])
    if plan.is_packed:
        np.testing.assert_array_equal(plan.offsets, [0, 0, 2, 2])
        np.testing.assert_array_equal(plan.rows, [1, 1, 3, 3, 3, -1, -1, -1, -1])
    assert_sound(pool, seqs)


def test_more_tokens_than_a_padded_row_are_refused():
    pool, seqs, plan = reserve(*new_state(), [9, 8, 2**31 - 1, 1])
    np.testing.assert_array_equal(plan.refusal, [3, 0, 3, 0])
    assert rows(seqs) == [[], [0, 1], [], [2]]
    assert faults(pool) == {"past_capacity": 2}
    assert first(pool, FaultKind.PAST_CAPACITY) == [1, -1, 0]


def test_tokens_past_a_packed_step_are_refused_and_those_before_keep_their_places():
    pool, seqs, plan = reserve_packed(*new_state(), [4, 6, 0, 1])
    np.testing.assert_array_equal(plan.granted, [True, False, True, False])
    np.testing.assert_array_equal(plan.refusal, [0, 3, 0, 3])
    np.testing.assert_array_equal(plan.rows, [0, 0, 0, 0, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(plan.offsets, [0, 4, 9, 9])
    assert faults(pool) == {"past_capacity": 2}
    assert rows(seqs) == [[0], [], [], []]


def test_the_last_token_of_a_packed_step_is_within_it():
    _, _, plan = reserve_packed(*new_state(), [4, 0, 5, 0])
    np.testing.assert_array_equal(plan.granted, [True] * 4)
    np.testing.assert_array_equal(plan.rows, [0] * 4 + [2] * 5)


def test_huge_counts_do_not_wrap_around_in_packed_offsets():
    _, seqs, plan = reserve_packed(*new_state(), [1, 2**31 - 1, 2**31 - 1, 1])
    np.testing.assert_array_equal(plan.refusal, [0, 3, 3, 3])
    np.testing.assert_array_equal(plan.offsets, [0, 1, 9, 9])
    assert lengths(seqs) == [1, 0, 0, 0]


def test_a_packed_step_can_bound_the_tokens_of_one_sequence():
    _, seqs, plan = sequences.reserve(
        *new_state(), [3, 1, 2, 2], block_size=BLOCK, total_tokens=N, max_new_tokens=2
    )
    assert plan.max_new_tokens == 2
    np.testing.assert_array_equal(plan.refusal, [3, 0, 0, 0])
    np.testing.assert_array_equal(plan.rows, [-1, -1, -1, 1, 2, 2, 3, 3, -1])
    assert rows(seqs) == [[], [0], [1], [2]]


def test_a_refused_sequence_keeps_its_rows_in_a_packed_step():
    state = started([16, 0, 0, 0])
    _, _, plan = reserve_packed(*state, [2, 3, 0, 2])
    np.testing.assert_array_equal(plan.refusal, [2, 0, 0, 0])
    np.testing.assert_array_equal(plan.rows, [-1, -1, 1, 1, 1, 3, 3, -1, -1])
    np.testing.assert_array_equal(plan.new_tokens, [0, 3, 0, 2])


@pytest.mark.parametrize(("length", "tokens", "refusal"), [(12, 4, 0), (12, 5, 2), (16, 1, 2)])
def test_a_table_can_be_filled_to_its_last_token_and_no_further(length, tokens, refusal):
    before = started([length, 5, 0, 0])
    pool, seqs, plan = reserve(*before, [tokens, 1, 0, 0])
    np.testing.assert_array_equal(plan.refusal, [refusal, 0, 0, 0])
    assert lengths(seqs) == [length + tokens * (not refusal), 6, 0, 0]
    assert faults(pool) == ({"full": 1} if refusal else {})
    if refusal:
        assert first(pool, FaultKind.FULL)[1:] == [-1, 0]
        assert_untouched(seqs, before[1], [0])
    assert_sound(pool, seqs)


@pytest.mark.parametrize("plan_step", [reserve, reserve_packed])
def test_a_sequence_that_lacks_one_block_takes_none_and_later_ones_still_get_theirs(plan_step):
    pool, seqs = started([4, 3, 0, 3])
    pool, others = with_free(pool, 2)
    before = pool, seqs
    pool, seqs, plan = plan_step(*before, [1, 0, 5, 2])
    np.testing.assert_array_equal(plan.refusal, [0, 0, 1, 0])
    assert rows(seqs) == [[0, 3], [1], [], [2, 4]]
    assert faults(pool) == {"exhausted": 1}
    assert first(pool, FaultKind.EXHAUSTED)[1:] == [-1, 2]
    assert_untouched(seqs, before[1], [1, 2])
    assert_sound(pool, seqs, others)


def test_an_exhausted_pool_still_lets_sequences_fill_the_blocks_they_have():
    before = started([16, 16, 5, 0])
    assert int(before[0].num_free) == 0
    pool, seqs, plan = reserve(*before, [0, 1, 3, 1])
    np.testing.assert_array_equal(plan.refusal, [0, 2, 0, 1])
    assert lengths(seqs) == [16, 16, 8, 0]
    assert faults(pool) == {"exhausted": 1, "full": 1}
    assert_sound(pool, seqs)


def shared(*slots, length=6):
    """Slot 0 with `length` tokens, shared by the given slots."""
    pool, seqs = started([length, 0, 0, 0])
    return fork(pool, seqs, [0] * len(slots), list(slots))


@pytest.mark.parametrize("plan_step", [reserve, reserve_packed])
def test_all_but_the_last_holder_of_a_tail_get_a_block_of_their_own(plan_step):
    pool, seqs, plan = plan_step(*shared(1, 3), [1, 1, 0, 1])
    assert rows(seqs) == [[0, 2], [0, 3], [], [0, 1]]
    assert copies(plan) == [[1, 2], [1, 3]]
    np.testing.assert_array_equal(pool.counts[:4], [3, 1, 1, 1])
    np.testing.assert_array_equal(
        plan.slots[plan.slots >= 0], [2 * BLOCK + 2, 3 * BLOCK + 2, 1 * BLOCK + 2]
    )
    assert_sound(pool, seqs)


def test_a_tail_that_another_sequence_goes_on_holding_is_copied():
    pool, seqs, plan = reserve(*shared(1, 3), [0, 1, 0, 1])
    assert rows(seqs) == [[0, 1], [0, 2], [], [0, 3]]
    assert copies(plan) == [[1, 2], [1, 3]]
    assert_sound(pool, seqs)


def test_a_tail_that_somebody_outside_the_sequences_holds_is_copied_by_all():
    pool, seqs = shared(1)
    pool = blocks.retain(pool, [1])
    pool, seqs, plan = reserve(pool, seqs, [1, 1, 0, 0])
    assert copies(plan) == [[1, 2], [1, 3]]
    np.testing.assert_array_equal(pool.counts[:4], [2, 1, 1, 1])
    assert_sound(pool, seqs, other_holders=[1])


def test_within_a_sequence_the_copy_is_popped_before_new_blocks():
    pool, seqs, plan = reserve(*shared(1), [8, 3, 0, 0])
    assert rows(seqs) == [[0, 2, 3, 4], [0, 1, 5]] + [[], []]
    assert copies(plan) == [[1, 2]]
    np.testing.assert_array_equal(plan.slots[0], [10, 11, 12, 13, 14, 15, 16, 17])
    np.testing.assert_array_equal(plan.slots[1, :3], [6, 7, 20])
    assert_sound(pool, seqs)


def test_a_full_shared_block_needs_no_copy():
    pool, seqs, plan = reserve(*shared(1, length=8), [1, 1, 0, 0])
    assert rows(seqs)[:2] == [[0, 1, 2], [0, 1, 3]]
    assert copies(plan) == []
    np.testing.assert_array_equal(pool.counts[:4], [2, 2, 1, 1])


def test_the_last_holder_needs_no_free_block():
    pool, seqs = shared(1)
    pool, others = with_free(pool, 1)
    pool, seqs, plan = reserve(pool, seqs, [1, 1, 0, 0])
    np.testing.assert_array_equal(plan.granted, [True] * 4)
    assert rows(seqs)[:2] == [[0, 2], [0, 1]]
    assert int(pool.num_free) == 0
    assert_sound(pool, seqs, others)


def test_without_a_block_for_the_copy_both_holders_are_refused():
    pool, before = shared(1)
    pool, others = with_free(pool, 0)
    pool, seqs, plan = reserve(pool, before, [1, 1, 0, 0])
    np.testing.assert_array_equal(plan.refusal, [1, 1, 0, 0])
    chex.assert_trees_all_equal(seqs, before)
    np.testing.assert_array_equal(pool.counts[:2], [2, 2])
    assert_sound(pool, seqs, others)
    assert copies(plan) == []
    assert faults(pool) == {"exhausted": 2}


def test_a_refused_holder_still_counts_as_one():
    _, seqs, plan = reserve(*shared(1), [9, 1, 0, 0])
    np.testing.assert_array_equal(plan.refusal, [3, 0, 0, 0])
    assert copies(plan) == [[1, 2]]
    assert rows(seqs)[:2] == [[0, 1], [0, 2]]


def test_a_holder_refused_for_want_of_blocks_leaves_the_copy_to_the_next():
    # Slot 0 wants a copy and one more block; slot 1 only the copy, and there is one block.
    pool, seqs = shared(1)
    pool, others = with_free(pool, 1)
    pool, seqs, plan = reserve(pool, seqs, [3, 1, 0, 0])
    np.testing.assert_array_equal(plan.refusal, [1, 0, 0, 0])
    assert rows(seqs)[:2] == [[0, 1], [0, 2]]
    assert copies(plan) == [[1, 2]]
    assert_sound(pool, seqs, others)


def test_trim_pushes_tail_first_and_slots_ascending():
    pool, seqs = started([12, 4, 0, 8])
    assert rows(seqs) == [[0, 1, 5], [2], [], [3, 4]]
    pool, seqs = trim(pool, seqs, [4, 0, -1, 0])
    assert free_stack(pool) == [9, 8, 7, 6, 5, 1, 2, 4, 3]
    assert rows(seqs) == [[0], [], [], []]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8])
def test_trim_undoes_an_append_entirely(start, tokens):
    pool, seqs = started([start, 2, 0, 0])
    appended, longer, _ = reserve(pool, seqs, [tokens, 0, 0, 0])
    trimmed, shorter = trim(appended, longer, [start, -1, -1, -1])
    chex.assert_trees_all_equal(shorter, seqs)
    assert free_stack(trimmed) == free_stack(pool)
    np.testing.assert_array_equal(trimmed.counts, pool.counts)
    again, same, plan = reserve(trimmed, shorter, [tokens, 0, 0, 0])
    chex.assert_trees_all_equal(same, longer)
    assert np.all(plan.granted)
    assert free_stack(again) == free_stack(appended)


def test_trim_to_the_length_or_beyond_it_changes_nothing():
    before = started([6, 3, 0, 8])
    pool, seqs = trim(*before, [6, 4, 2**31 - 1, -7])
    chex.assert_trees_all_equal(seqs, before[1])
    assert faults(pool) == {"past_capacity": 2}
    assert first(pool, FaultKind.PAST_CAPACITY)[1:] == [-1, 1]
    assert free_stack(pool) == free_stack(before[0])


def test_a_trimmed_sequence_leaves_shared_blocks_to_their_other_holders():
    pool, seqs = trim(*shared(1), [-1, 1, -1, -1])
    assert rows(seqs)[:2] == [[0, 1], [0]]
    np.testing.assert_array_equal(pool.counts[:2], [2, 1])
    pool, seqs, plan = reserve(pool, seqs, [1, 1, 0, 0])
    assert copies(plan) == [[0, 2]]
    assert rows(seqs)[:2] == [[0, 1], [2]]
    assert_sound(pool, seqs)


def test_release_empties_slots_and_pushes_tail_first_by_slot():
    pool, seqs = started([9, 2, 0, 6])
    assert rows(seqs) == [[0, 1, 5], [2], [], [3, 4]]
    pool, seqs = sequences.release(pool, seqs, [True, False, True, True])
    assert rows(seqs) == [[], [2], [], []]
    assert lengths(seqs) == [0, 2, 0, 0]
    assert free_stack(pool) == [9, 8, 7, 6, 5, 1, 0, 4, 3]
    assert faults(pool) == {}
    assert_sound(pool, seqs)


def test_a_shared_block_is_freed_by_its_last_holder():
    pool, seqs = shared(1, 2)
    pool, seqs = sequences.release(pool, seqs, [True, False, True, False])
    assert free_stack(pool) == [9, 8, 7, 6, 5, 4, 3, 2]
    pool, seqs = sequences.release(pool, seqs, [False, True, False, False])
    assert free_stack(pool) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_releasing_twice_is_harmless():
    pool, seqs = sequences.release(*started([9, 2, 0, 6]), [True] * 4)
    again, same = sequences.release(pool, seqs, [True] * 4)
    chex.assert_trees_all_equal((again, same), (pool, seqs))


def test_a_fork_shares_all_blocks_and_releases_what_the_destination_had():
    pool, seqs = started([6, 9, 0, 3])
    assert rows(seqs) == [[0, 1], [2, 3, 5], [], [4]]
    pool, seqs = fork(pool, seqs, [0, 0], [3, 1])
    assert rows(seqs) == [[0, 1], [0, 1], [], [0, 1]]
    assert lengths(seqs) == [6, 6, 0, 6]
    np.testing.assert_array_equal(pool.counts[:6], [3, 3, 0, 0, 0, 0])
    assert free_stack(pool) == [9, 8, 7, 6, 5, 3, 2, 4]
    assert faults(pool) == {}
    assert_sound(pool, seqs)


def test_a_swap_moves_rows_and_frees_nothing():
    before = started([6, 9, 0, 3])
    pool, seqs = fork(*before, [0, 1], [1, 0])
    assert rows(seqs) == [[2, 3, 5], [0, 1], [], [4]]
    assert lengths(seqs) == [9, 6, 0, 3]
    np.testing.assert_array_equal(pool.counts, before[0].counts)
    assert free_stack(pool) == free_stack(before[0])


def test_a_chain_of_forks_reads_all_sources_first():
    pool, seqs = fork(*started([6, 9, 0, 3]), [0, 1], [1, 3])
    assert rows(seqs) == [[0, 1], [0, 1], [], [2, 3, 5]]
    assert_sound(pool, seqs)


def test_a_slot_forked_to_itself_and_skipped_pairs_change_nothing():
    before = started([6, 9, 0, 3])
    after = fork(*before, [1, -1, 0, -5], [1, 2, -1, -5])
    chex.assert_trees_all_equal(after, before)


def test_a_fork_of_an_empty_slot_empties_the_destination():
    pool, seqs = fork(*started([6, 9, 0, 3]), [2], [0])
    assert rows(seqs) == [[], [2, 3, 5], [], [4]]
    assert lengths(seqs) == [0, 9, 0, 3]
    assert_sound(pool, seqs)


def test_bad_slots_and_repeated_destinations_of_a_fork_are_skipped_and_counted():
    pool, seqs = started([6, 9, 0, 3])
    pool, seqs = fork(pool, seqs, [0, 7, 1, 1, 4, 9], [2, 0, 4, 2, 5, -1])
    assert rows(seqs) == [[0, 1], [2, 3, 5], [0, 1], [4]]
    assert faults(pool) == {"bad_id": 6}
    assert first(pool, FaultKind.BAD_ID)[1:] == [-1, 7]
    assert_sound(pool, seqs)


def test_reorder_moves_shares_and_empties():
    pool, seqs = started([6, 9, 0, 3])
    pool, seqs = sequences.reorder(pool, seqs, [3, 0, 0, -1])
    assert rows(seqs) == [[4], [0, 1], [0, 1], []]
    assert lengths(seqs) == [3, 6, 6, 0]
    np.testing.assert_array_equal(pool.counts[:6], [2, 2, 0, 0, 1, 0])
    assert free_stack(pool) == [9, 8, 7, 6, 5, 3, 2]
    assert faults(pool) == {}
    assert_sound(pool, seqs)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]])
def test_a_permutation_keeps_counts_and_free_blocks(order):
    before = started([6, 9, 0, 3])
    pool, seqs = sequences.reorder(*before, order)
    np.testing.assert_array_equal(seqs.block_tables, before[1].block_tables[np.array(order)])
    np.testing.assert_array_equal(seqs.lengths, before[1].lengths[np.array(order)])
    np.testing.assert_array_equal(pool.counts, before[0].counts)
    assert free_stack(pool) == free_stack(before[0])


def test_bad_entries_of_a_reorder_leave_their_slot_as_it_was():
    pool, seqs = started([6, 9, 0, 3])
    pool, seqs = sequences.reorder(pool, seqs, [4, -2, 3, 1])
    assert rows(seqs) == [[0, 1], [2, 3, 5], [4], [2, 3, 5]]
    assert faults(pool) == {"bad_id": 2}
    assert first(pool, FaultKind.BAD_ID)[1:] == [-1, 4]
    assert_sound(pool, seqs)


def with_marks(marks):
    """Slot 0 with nine tokens, some of whose blocks live elsewhere."""
    pool, seqs = started([9, 2, 0, 0])
    table = np.array(seqs.block_tables)
    moved = [table[0, column] for column in marks]
    for column, mark in marks.items():
        table[0, column] = mark
    pool = blocks.release(pool, np.array(moved, np.int32))
    return pool, dataclasses.replace(seqs, block_tables=jnp.asarray(table))


def test_columns_stay_absolute_where_blocks_live_elsewhere():
    pool, seqs = with_marks({0: -1, 1: -5})
    pool, seqs, plan = reserve(pool, seqs, [4, 0, 0, 0])
    np.testing.assert_array_equal(seqs.block_tables[0], [-1, -5, 3, 1])
    np.testing.assert_array_equal(plan.slots[0, :4], [13, 14, 15, 4])
    np.testing.assert_array_equal(plan.positions[0, :4], [9, 10, 11, 12])
    assert_sound(pool, seqs)


def test_entries_that_are_no_blocks_are_copied_by_a_fork_but_never_counted():
    pool, seqs = with_marks({0: -1, 1: -5})
    pool, seqs = fork(pool, seqs, [0], [3])
    np.testing.assert_array_equal(seqs.block_tables[3], [-1, -5, 3, -1])
    np.testing.assert_array_equal(pool.counts[:4], [0, 0, 1, 2])
    pool, seqs = sequences.release(pool, seqs, [True, False, False, True])
    np.testing.assert_array_equal(seqs.block_tables[0], [-1] * 4)
    assert faults(pool) == {}
    assert_sound(pool, seqs)


def test_trim_past_entries_that_are_no_blocks_clears_them():
    pool, seqs = trim(*with_marks({1: -5}), [3, -1, -1, -1])
    np.testing.assert_array_equal(seqs.block_tables[0], [0, -1, -1, -1])
    assert faults(pool) == {}
    assert_sound(pool, seqs)


def test_a_sequence_whose_tail_is_no_block_cannot_grow():
    pool, seqs = trim(*with_marks({1: -5}), [6, -1, -1, -1])
    before = pool, seqs
    pool, seqs, plan = reserve(pool, seqs, [1, 1, 0, 0])
    np.testing.assert_array_equal(plan.refusal, [4, 0, 0, 0])
    assert faults(pool) == {"bad_id": 1}
    assert_untouched(seqs, before[1], [0])


@pytest.mark.slow
def test_moves_go_through_tables_of_many_chunks(monkeypatch):
    monkeypatch.setattr(sequences, "_CHUNK", 2)
    pool, seqs = BlockPool.create(23), Sequences.create(3, 7)
    pool, seqs, _ = sequences.reserve(pool, seqs, [6, 1, 5], block_size=1, max_new_tokens=7)
    pool, seqs = fork(pool, seqs, [0], [1])
    assert rows(seqs) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
    pool, seqs = sequences.trim(pool, seqs, [1, 4, 0], block_size=1)
    assert rows(seqs) == [[0], [0, 1, 2, 3], []]
    assert free_stack(pool)[-8:] == [6, 5, 4, 11, 10, 9, 8, 7]
    pool, seqs = sequences.reorder(pool, seqs, [-1, 0, 1])
    assert rows(seqs) == [[], [0], [0, 1, 2, 3]]
    np.testing.assert_array_equal(pool.counts[:5], [2, 1, 1, 1, 0])


@pytest.mark.slow
def test_a_trace_shows_allocations_and_copies_of_a_step():
    pool, seqs = started([6, 0, 0, 0], trace_events=8)
    pool, seqs = fork(pool, seqs, [0, 0], [1, 2])
    pool, seqs, plan = reserve(pool, seqs, [1, 1, 1, 0])
    assert copies(plan) == [[1, 2], [1, 3]]
    assert blocks.read_trace(pool, 1) == [
        ("allocate", 1, 1),
        ("retain", 2, 1),
        ("retain", 3, 1),
        ("copy", 2, 2),
        ("copy", 1, 2),
    ]
    assert blocks.read_trace(pool, 3) == [("allocate", 1, 2)]


def test_a_plan_made_outside_a_program_shares_no_buffer_with_the_state():
    pool, seqs, plan = reserve(*new_state(), [5, 3, 0, 8])
    state = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((pool, seqs))}
    assert not state & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(plan)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: reserve(*s, [1, 2]), ValueError, r"new_tokens must have shape \[4\], got \[2\]"),
        (lambda s: reserve(*s, np.ones(4)), TypeError, "new_tokens must hold integers, .*float"),
        (
            lambda s: sequences.reserve(*s, [0] * 4, block_size=4, max_new_tokens=0),
            ValueError,
            "max_new_tokens must be at least 1, got 0",
        ),
        (
            lambda s: sequences.reserve(*s, [0] * 4, block_size=4, total_tokens=0),
            ValueError,
            "total_tokens must be at least 1, got 0",
        ),
        (
            lambda s: sequences.reserve(*s, [0] * 4, block_size=2**28),
            ValueError,
            r"num_blocks \* block_size must fit in int32, got 2684354560",
        ),
        (lambda s: trim(*s, [1]), ValueError, r"new_lengths must have shape \[4\], got \[1\]"),
        (lambda s: sequences.release(*s, [1] * 4), TypeError, "mask must be boolean, got .*int"),
        (lambda s: sequences.release(*s, [True]), ValueError, r"mask must have shape \[4\], .*1"),
        (lambda s: sequences.fork(*s, [0], [1, 2]), ValueError, r"destination .*\[1\], got \[2\]"),
        (lambda s: sequences.reorder(*s, [0.0] * 4), TypeError, "rows must hold integers"),
    ],
)
def test_static_trouble_raises_and_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(new_state())


def vector(*values):
    return jnp.array(values, jnp.int32)


VERBS = {
    "decode": lambda s, x: sequences.reserve(*s, x, block_size=BLOCK)[:2],
    "padded": lambda s, x: reserve(*s, x)[:2],
    "packed": lambda s, x: reserve_packed(*s, x)[:2],
    "window": lambda s, x: sequences.reserve(
        *s, x, block_size=BLOCK, window=BLOCK + 1, keep_first=1
    )[:2],
    "resident": lambda s, x: sequences.reserve(*s, x, block_size=BLOCK, resident_blocks=2)[:2],
    "release": lambda s, x: sequences.release(*s, x > 0),
    "trim": lambda s, x: trim(*s, x),
    "fork": lambda s, x: sequences.fork(*s, x[:2], x[2:]),
    "reorder": lambda s, x: sequences.reorder(*s, x),
}


def every_verb_traced_or_not():
    """Those that a decoding loop calls come first; the rest compile in the slow part."""
    for verb in VERBS:
        for events in (0, 2):
            is_fast = verb in ("decode", "release") and not events
            yield pytest.param(verb, events, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.as_shipped
@pytest.mark.parametrize(("verb", "trace_events"), list(every_verb_traced_or_not()))
def test_no_verb_touches_the_whole_pool(verb, trace_events):
    def loop(state, x):
        return jax.lax.fori_loop(0, 3, lambda i, state: VERBS[verb](state, x), state)

    state = new_state(POOL_SIZE, trace_events=trace_events)
    assert whole_array_operations(loop, POOL_SIZE, state, vector(0, 1, 2, 3)) <= IN_PLACE


def programs():
    """How often each verb was traced so far."""
    verbs = ("_reserve", "_release", "_trim", "_fork", "_reorder")
    return {name: getattr(sequences, name)._cache_size() for name in verbs}


def test_each_verb_is_traced_once_for_all_values():
    def run(state, values):
        state = reserve_packed(*reserve(*state, values)[:2], values[::-1])[:2]
        state = fork(*state, values[:2], values[2:])
        state = sequences.reorder(*trim(*state, values), values)
        return sequences.release(*state, np.array(values) > 1)

    state = run(new_state(), [1, 0, 2, 0])
    before = programs()
    for values in ([5, 0, 8, 0], [0, -1, 9, 99], [3, 2, 1, 0], [-1, -1, -1, -1]):
        state = run(state, values)
    assert programs() == before


def test_a_jitted_step_is_traced_once_for_all_values():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(VERBS["padded"], n=1))
    state = new_state()
    for values in ([5, 0, 8, 0], [0, -1, 9, 99], [3, 2, 1, 0]):
        state = step(state, vector(*values))
    np.testing.assert_array_equal(state[1].lengths, [8, 2, 9, 0])


def test_no_leaf_is_weakly_typed():
    pool, seqs, plan = reserve(*new_state(), [1, -1, 9, 2])
    pool, seqs = fork(pool, seqs, [0], [1])
    pool, seqs = trim(pool, seqs, [0, 1, 2, 3])
    pool, seqs = sequences.reorder(pool, seqs, [0, 1, 2, 3])
    pool, seqs = sequences.release(pool, seqs, [True, False, False, False])
    for leaf in jax.tree.leaves((pool, seqs, plan)):
        assert not leaf.weak_type
        assert leaf.dtype in (jnp.int32, jnp.uint32, jnp.bool_)
