import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.faults import (
    BACKPRESSURE,
    CORRUPTION,
    CacheError,
    FaultKind,
    Faults,
    explain,
    record,
    record_masks,
)


def test_a_fresh_record_counts_nothing_and_has_no_places():
    faults = Faults.create()
    np.testing.assert_array_equal(faults.counts, np.zeros(8, np.uint32))
    np.testing.assert_array_equal(faults.first, np.full((8, 3), -1))
    assert faults.counts.dtype == jnp.uint32
    assert faults.first.dtype == jnp.int32
    assert explain(faults) == []


@pytest.mark.parametrize("kind", FaultKind)
def test_each_kind_has_a_counter_of_its_own_and_a_name(kind):
    faults = record(Faults.create(), kind, 3, step=5, layer=2, where=7)
    assert [int(getattr(faults, k.name.lower())) for k in FaultKind] == [
        3 if k == kind else 0 for k in FaultKind
    ]
    np.testing.assert_array_equal(faults.first[kind], [5, 2, 7])
    assert np.all(np.delete(np.asarray(faults.first), kind, axis=0) == -1)


def test_counts_add_up_and_the_first_place_stays():
    faults = record(Faults.create(), FaultKind.FULL, 1, step=3, where=4)
    faults = record(faults, FaultKind.FULL, 2, step=9, layer=1, where=0)
    assert int(faults.full) == 3
    np.testing.assert_array_equal(faults.first[FaultKind.FULL], [3, -1, 4])


def test_a_count_of_zero_changes_nothing():
    faults = record(Faults.create(), FaultKind.BAD_ID, 1, step=0, where=0)
    chex.assert_trees_all_equal(record(faults, FaultKind.BAD_ID, 0, step=8, where=8), faults)
    chex.assert_trees_all_equal(record(faults, FaultKind.FULL, 0, step=8, where=8), faults)


def test_a_counter_stops_at_its_largest_value_and_keeps_the_first_place():
    faults = record(Faults.create(), FaultKind.SATURATED, 2**31 - 1, step=1, layer=0)
    for step in (2, 3, 4):
        faults = record(faults, FaultKind.SATURATED, 2**31 - 1, step=step, layer=0)
    assert int(faults.saturated) == 2**32 - 1
    np.testing.assert_array_equal(faults.first[FaultKind.SATURATED], [1, 0, -1])


def test_masks_count_every_entry_and_name_the_first():
    masks = {
        FaultKind.BAD_ID: jnp.array([False, True, True]),
        FaultKind.RELEASE_AT_ZERO: jnp.array([False, False, True]),
        FaultKind.FULL: jnp.zeros(3, bool),
    }
    faults = record_masks(Faults.create(), masks, jnp.array([10, 20, 30]), step=6, layer=1)
    assert (int(faults.bad_id), int(faults.release_at_zero), int(faults.full)) == (2, 1, 0)
    np.testing.assert_array_equal(faults.first[FaultKind.BAD_ID], [6, 1, 20])
    np.testing.assert_array_equal(faults.first[FaultKind.RELEASE_AT_ZERO], [6, 1, 30])
    np.testing.assert_array_equal(faults.first[FaultKind.FULL], [-1, -1, -1])


def test_no_entries_at_all_record_nothing():
    empty = jnp.zeros(0, jnp.int32)
    faults = record_masks(Faults.create(), {FaultKind.FULL: empty > 0}, empty, step=1)
    chex.assert_trees_all_equal(faults, Faults.create())


def test_recording_is_traced_once_for_all_counts_and_places():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def add(faults, count, step, layer, where):
        return record(faults, FaultKind.FLUSHED, count, step=step, layer=layer, where=where)

    faults = Faults.create()
    for i in range(4):
        faults = add(faults, jnp.int32(i), jnp.int32(i), jnp.int32(i), jnp.int32(i))
    assert int(faults.flushed) == 6
    np.testing.assert_array_equal(faults.first[FaultKind.FLUSHED], [1, 1, 1])


def test_every_kind_is_either_corruption_or_backpressure():
    assert set(FaultKind) == CORRUPTION | BACKPRESSURE
    assert not CORRUPTION & BACKPRESSURE
    assert {kind.name for kind in BACKPRESSURE} == {"EXHAUSTED", "FULL", "SATURATED", "FLUSHED"}
    assert issubclass(CacheError, RuntimeError)


@pytest.mark.parametrize("kind", FaultKind)
def test_an_explanation_says_what_how_often_where_and_what_to_do(kind):
    (line,) = explain(record(Faults.create(), kind, 12, step=5, layer=2, where=7))
    assert kind.name.lower().replace("_", " ") in line.replace("-", " ")
    assert "12 times" in line
    assert "step 5, layer 2, " in line
    assert ("block 7" in line) == (kind in (FaultKind.RELEASE_AT_ZERO, FaultKind.BAD_ID))
    assert line.count(": ") >= 2


def test_an_explanation_leaves_out_places_that_do_not_apply():
    (line,) = explain(record(Faults.create(), FaultKind.FULL, 1, step=3, where=0))
    assert "step 3, slot 0" in line
    assert "layer" not in line
    assert "1 time;" in line


def test_an_explanation_can_be_limited_to_some_kinds():
    faults = record(Faults.create(), FaultKind.FULL, 1, step=0)
    faults = record(faults, FaultKind.NON_FINITE, 1, step=0)
    assert [line.split(":")[0] for line in explain(faults, CORRUPTION)] == ["non-finite"]
    assert [line.split(":")[0] for line in explain(faults)] == ["full", "non-finite"]
