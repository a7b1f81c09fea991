"""Cutting queries into row blocks and putting results back; how contexts are split."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.merge import merge_parts
from pallas_kernels.row_blocks import LeftOut, RowBlocks
from pallas_kernels.tuning import Tuning, splits_of


def owners(blocks, heads):
    """For each block row, the (sequence, row) it stands for, or None for padding."""
    for b, (sequence, first, count) in enumerate(
        zip(*map(np.asarray, (blocks.sequence, blocks.first_row, blocks.num_rows)))
    ):
        for r in range(blocks.rows):
            yield (b, r), (int(sequence), int(first) + r) if first + r < count else None


@pytest.mark.parametrize(
    ("group", "tokens", "rows"), [(3, 1, 8), (4, 5, 8), (24, 2, 8), (5, 40, 64)]
)
def test_padded_queries_split_and_join(group, tokens, rows):
    new_tokens, heads = [tokens, 0, 1], 2
    blocks = RowBlocks.padded(jnp.asarray(new_tokens), tokens, group, rows)
    q = np.arange(3 * tokens * heads * group, dtype=np.float32)
    q = q.reshape(3, tokens, heads * group, 1)
    tiles = np.asarray(blocks.split_queries(jnp.asarray(q)))
    for (b, r), owner in owners(blocks, heads):
        if owner is not None:
            s, row = owner
            for h in range(heads):
                assert tiles[b, h, r, 0] == q[s, row // group, h * group + row % group, 0]
    np.testing.assert_array_equal(blocks.join(jnp.asarray(tiles), 0), q)


@pytest.mark.parametrize("rows", [8, 64])
def test_packed_queries_split_and_join(rows):
    new_tokens, group, heads, total = [3, 0, 7, 1], 4, 2, 14
    offsets = jnp.asarray([0, 3, 3, 10], jnp.int32)
    blocks = RowBlocks.packed(jnp.asarray(new_tokens), offsets, total, group, rows)
    q = np.arange(total * heads * group, dtype=np.float32).reshape(total, heads * group, 1)
    tiles = np.asarray(blocks.split_queries(jnp.asarray(q)))
    seen = set()
    for (b, r), owner in owners(blocks, heads):
        if owner is not None:
            s, row = owner
            token = int(offsets[s]) + row // group
            seen.add((token, row % group))
            for h in range(heads):
                assert tiles[b, h, r, 0] == q[token, h * group + row % group, 0]
    assert len(seen) == sum(new_tokens) * group
    joined = np.asarray(blocks.join(jnp.asarray(tiles), total))
    np.testing.assert_array_equal(joined[: sum(new_tokens)], q[: sum(new_tokens)])


def test_bounds_follow_positions_and_the_window():
    blocks = RowBlocks.padded(jnp.asarray([3, 0, 1]), 3, 2, 8)
    tiles, limits, _ = blocks.bounds(jnp.asarray([100, 50, 0]), window=40)
    np.testing.assert_array_equal(tiles, [[0, 61, 103, 0], [1, 0, 0, 0], [2, 0, 1, 0]])
    np.testing.assert_array_equal(limits[0], [101, 101, 102, 102, 103, 103, 0, 0])
    np.testing.assert_array_equal(limits[1], np.zeros(8))


def test_bounds_leave_out_what_is_read_from_elsewhere():
    blocks = RowBlocks.padded(jnp.asarray([3, 1]), 3, 2, 8)
    left_out = LeftOut(jnp.asarray([4, 0]), jnp.asarray([0, 48]), distance=10)
    tiles, limits, lows = blocks.bounds(jnp.asarray([100, 50]), 93, left_out)
    # The second sequence's exact tokens begin at 48: from there on ten are left out, here three.
    np.testing.assert_array_equal(tiles, [[0, 8, 93, 0], [1, 0, 48, 0]])
    np.testing.assert_array_equal(limits[0], [91, 91, 92, 92, 93, 93, 0, 0])
    np.testing.assert_array_equal(lows[0, :6], [8, 8, 9, 9, 10, 10])


@pytest.mark.parametrize("table_tokens", [64, 2048, 32768, 131072])
@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("window", [None, 128, 4096])
def test_splits_cover_what_a_query_can_see(table_tokens, heads, window):
    tuning = Tuning()
    splits, tiles = splits_of(tuning, table_tokens, heads, window, is_decode=True)
    reach = table_tokens if window is None else min(table_tokens, window + 63)
    assert splits * tiles * 64 >= reach
    assert (splits - 1) * tiles * 64 < table_tokens


def test_a_window_splits_by_its_own_size_not_the_tables():
    wide = splits_of(Tuning(), 1 << 20, 8, 512, is_decode=True)
    narrow = splits_of(Tuning(), 1 << 13, 8, 512, is_decode=True)
    assert wide == narrow
    assert wide[0] * wide[1] * 64 < 1024


@pytest.mark.parametrize(
    "fields", [dict(rows=7), dict(stages=1), dict(split_tokens=100), dict(path="triton")]
)
def test_tuning_checks_itself(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Tuning(**fields)


def test_merging_parts_equals_one_softmax():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 5, 4)) * 3  # [parts, keys, rows], base 2
    values = rng.standard_normal((3, 5, 6))
    sink = rng.standard_normal(4)
    maxima = scores.max(1)
    weights = 2.0 ** (scores - maxima[:, None])
    outputs = np.einsum("pkr,pkd->pdr", weights, values)
    sums = weights.sum(1)
    # An empty part: nothing summed, output never written.
    maxima = np.concatenate([maxima, np.full((1, 4), -1e19)])
    sums, outputs = (
        np.concatenate([sums, np.zeros((1, 4))]),
        np.concatenate([outputs, np.full((1, 6, 4), np.nan)]),
    )
    args = [jnp.asarray(x, jnp.float32) for x in (outputs, maxima, sums)]
    for sinks in (None, jnp.asarray(sink, jnp.float32)):
        logits = scores.reshape(15, 4) * np.log(2)
        total = np.exp(logits).sum(0) + (0 if sinks is None else np.exp(sink))
        out, lse = merge_parts(*args, sinks)
        expected = np.exp(logits).T @ values.reshape(15, 6) / total[:, None]
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(lse, np.log(total), rtol=1e-5, atol=1e-6)


def test_rows_without_a_key_merge_to_zero_and_minus_infinity():
    out, lse = merge_parts(
        jnp.full((2, 6, 4), jnp.nan), jnp.full((2, 4), -1e19), jnp.zeros((2, 4)), jnp.zeros(4)
    )
    assert (np.asarray(out) == 0).all() and (np.asarray(lse) == -np.inf).all()
