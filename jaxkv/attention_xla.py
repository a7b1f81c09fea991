"""Attention over pages in plain XLA: streamed blocks, online softmax, cost by true length.

A step's queries are cut into tiles, each of one sequence. A tile walks the blocks that its queries
can see, a chunk at a time, with a trip count from the sequence's length, and keeps the running
maximum, sum and output of Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018). What a tile computes depends on its own sequence and on static sizes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._xla import chunks
from jaxkv.codecs import Pages, rotate, unrotate
from jaxkv.formats import SideSpec

# Most elements of one decoded chunk, which stays in cache, and most tokens: a short sequence pays
# for a whole chunk.
_CHUNK_ELEMENTS = 384 * 1024
_CHUNK_TOKENS = 512
# Parts of a long block begin at multiples of this.
_PART_MULTIPLE = 16
# Query rows of one KV head that a tile aims at, and the most tokens of a tile.
_TILE_ROWS = 256
_TILE_TOKENS = 128
# Up to so many rows a transposition of the scores is cheap.
_FEW_ROWS = 16
# A key position beyond all queries.
_NO_KEY = np.int32(2**31 - 1)

_LeftOut = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class KeyRange:
    """Which keys the query of position p sees, beside causality. Static.

    Attributes:
      window: keys p - window + 1 and later; None for all.
      first: keys `first` and later.
      distance: keys p - distance and earlier.
      end: keys before `end`; None for no end.
      exact_first: keys `exact_first` and later, and those before `Queries.first_from`.
      exact_recent: keys p - exact_recent and earlier, and those before `Queries.recent_from`.
    """

    window: int | None = None
    first: int = 0
    distance: int = 0
    end: int | None = None
    exact_first: int = 0
    exact_recent: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Where the queries of a step lie and what they may read.

    Attributes:
      tables: int32 [S, M] block tables; negative entries are not read.
      starts: int32 [S], position of each sequence's first query.
      counts: int32 [S], queries of each sequence.
      offsets: int32 [S], index of its first query in the flat order of all queries.
      max_tokens: no sequence has more queries.
      reach: (low, high), int32 [S] each: only blocks that hold one of the keys low to high - 1 are
        walked. None where every key may be read.
      first_from: int32 [S]; `KeyRange.exact_first` leaves out keys from here on. None for 0.
      recent_from: int32 [S]; likewise for `KeyRange.exact_recent`.
      is_padded: whether every sequence has room for max_tokens queries, offsets multiples of it.
    """

    tables: jax.Array
    starts: jax.Array
    counts: jax.Array
    offsets: jax.Array
    max_tokens: int = dataclasses.field(metadata=dict(static=True))
    reach: tuple[jax.Array, jax.Array] | None = None
    first_from: jax.Array | None = None
    recent_from: jax.Array | None = None
    is_padded: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def left_out_from(self, row: jax.Array) -> _LeftOut:
        """(first_from, recent_from) of one sequence."""
        none = jnp.int32(0)
        return (
            none if self.first_from is None else self.first_from[row],
            none if self.recent_from is None else self.recent_from[row],
        )


def partial_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    queries: Queries,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: jax.Array,
    soft_cap: jax.Array | None = None,
    shift: jax.Array | None = None,
    keys: KeyRange = KeyRange(),
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys in `keys`, to be merged with other keys by log-sum-exp.

    Args:
      q: [N, q_heads, head_dim] in flat order, not rotated, any float dtype.
      k_pages: keys of the layer.
      v_pages: its values.
      queries: where the queries lie.
      k_spec: the K side.
      v_spec: the V side.
      k_scale: f32 scalar of an fp8 K side; None means 1.
      v_scale: likewise for V.
      scale: f32 scalar, factor of the scores.
      soft_cap: f32 scalar; scores become cap * tanh(score / cap).
      shift: f32 [N, q_heads], added to the scores before the soft cap.
      keys: the keys that count.

    Returns:
      (out, lse): f32 [N, q_heads, v_head_dim] normalised over these keys and f32 [N, q_heads];
      0 and -inf where a query sees none of them.
    """
    num_queries, q_heads, _ = q.shape
    q_is_exact = q.dtype == jnp.bfloat16 and k_spec.rotation == "none"
    kernel = _Kernel(
        k_spec=k_spec,
        v_spec=v_spec,
        kv_heads=k_pages.data[0].shape[1],
        q_heads=q_heads,
        block_size=k_pages.block_size,
        columns=queries.tables.shape[1],
        keys=keys,
        q_parts=1 if q_is_exact else 2,
        p_parts=1 if q.dtype == jnp.bfloat16 else 2,
    )
    scale = scale * np.float32(chunks.factor(k_spec))
    if k_scale is not None:
        scale = scale * k_scale
    source = _Source(k_pages, v_pages, scale, soft_cap, shift)
    q = rotate(q, k_spec)
    out = jnp.zeros((num_queries, q_heads, v_spec.head_dim), jnp.float32)
    lse = jnp.full((num_queries, q_heads), -jnp.inf, jnp.float32)
    out, lse = _all_tiles(kernel, source, queries, q, out, lse)
    out = out * (np.float32(chunks.factor(v_spec)) * (1 if v_scale is None else v_scale))
    return unrotate(out, v_spec), lse


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Source:
    """What every tile reads: pages, f32 factor of raw scores, f32 soft cap, shift of scores."""

    k: Pages
    v: Pages
    scale: jax.Array
    soft_cap: jax.Array | None
    shift: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static numbers of the loops."""

    k_spec: SideSpec
    v_spec: SideSpec
    kv_heads: int
    q_heads: int
    block_size: int
    columns: int
    keys: KeyRange
    q_parts: int
    p_parts: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def tile_tokens(self) -> int:
        """Tokens of a full tile."""
        aim = 1 << max(_TILE_ROWS // self.group, 1).bit_length() - 1
        return min(max(aim, 16), _TILE_TOKENS)

    def walk(self, tokens: int) -> _Walk:
        """How a tile of `tokens` queries walks its keys."""
        width = max(self.k_spec.head_dim, self.v_spec.head_dim, tokens * self.group)
        aim = min(_CHUNK_ELEMENTS // (self.kv_heads * width), _CHUNK_TOKENS)
        if self.keys.window is not None:
            aim = min(aim, self.keys.window + tokens + self.block_size - 2)
        if self.keys.end is not None:
            aim = min(aim, self.keys.end + self.block_size - 1)
        if self.block_size >= 2 * aim and self.block_size > _PART_MULTIPLE:
            part = max(aim // _PART_MULTIPLE, 1) * _PART_MULTIPLE
            return _Walk(self.block_size, part, -(-self.block_size // part))
        blocks = max(1, min(round(aim / self.block_size), self.columns))
        return _Walk(self.block_size, blocks * self.block_size, 1)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """How a tile walks its keys: whole blocks a trip, or one of several parts of a long block.

    Attributes:
      block_size: tokens of a block.
      tokens: tokens of a trip.
      parts: parts of a block, 1 where a trip takes whole blocks.
    """

    block_size: int
    tokens: int
    parts: int

    def trips(self, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where keys low to high - 1 begin, and in how many trips they are read."""
        if self.parts == 1:
            first = low // self.block_size
            count = -(-(high - first * self.block_size) // self.tokens)
        else:
            first = self._part(low)
            count = self._part(high - 1) - first + 1
        return first, jnp.where(high > low, count, 0)

    def _part(self, key: jax.Array) -> jax.Array:
        return key // self.block_size * self.parts + key % self.block_size // self.tokens

    def trip(
        self, first: jax.Array, i: jax.Array, table: jax.Array
    ) -> tuple[Callable[[Pages], Pages], jax.Array]:
        """Trip i: how it reads its chunk, and the keys there, int32 [tokens].

        What is not a key of this trip stands at a position beyond all queries.
        """
        token = jnp.arange(self.tokens, dtype=jnp.int32)
        if self.parts == 1:
            blocks = self.tokens // self.block_size
            column = first + i * blocks + jnp.arange(blocks, dtype=jnp.int32)
            # Past the last column the last block is read again, for keys that nobody sees.
            ids = table.at[column].get(mode="clip")
            key = column[0] * self.block_size + token
            key = jnp.where(jnp.repeat(ids >= 0, self.block_size), key, _NO_KEY)
            return lambda pages: chunks.read_blocks(pages, jnp.maximum(ids, 0)), key
        column, part = jnp.divmod(first + i, self.parts)
        block = table.at[column].get(mode="clip")
        # The last part overlaps the one before it.
        offset = jnp.minimum(part * self.tokens, self.block_size - self.tokens)
        is_new = (block >= 0) & (offset + token >= part * self.tokens)
        key = jnp.where(is_new, column * self.block_size + offset + token, _NO_KEY)
        block = jnp.maximum(block, 0)
        return lambda pages: chunks.read_part(pages, block, offset, self.tokens), key


def _all_tiles(
    kernel: _Kernel,
    source: _Source,
    queries: Queries,
    q: jax.Array,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs every tile and stores its rows in `out` and `lse`."""
    size = min(queries.max_tokens, kernel.tile_tokens)
    per_sequence = -(-queries.counts // size)
    ends = jnp.cumsum(per_sequence)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = carry
        row = jnp.sum(ends <= i, dtype=jnp.int32)
        begin = (i - ends[row] + per_sequence[row]) * size
        rows, row_lse = _tile(kernel, source, queries, q, row, begin, size)
        index = begin + jnp.arange(size, dtype=jnp.int32)
        index = jnp.where(index < queries.counts[row], queries.offsets[row] + index, q.shape[0])
        return out.at[index].set(rows, mode="drop"), lse.at[index].set(row_lse, mode="drop")

    return jax.lax.fori_loop(0, ends[-1], body, (out, lse))


def _tile(
    kernel: _Kernel,
    source: _Source,
    queries: Queries,
    q: jax.Array,
    row: jax.Array,
    begin: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Attends queries begin to begin + size of a sequence: rows [size, ..] of out and lse."""
    count = jnp.minimum(queries.counts[row] - begin, size)
    reach = jax.tree.map(lambda keys: keys[row], queries.reach)
    left_out = queries.left_out_from(row)
    args = (source, q, queries.tables[row], reach, left_out, queries.offsets[row] + begin)
    first = queries.starts[row] + begin
    if size == 1:
        return _attend_tile(kernel, *args, first, count, 1)

    def one() -> tuple[jax.Array, jax.Array]:
        rows, row_lse = _attend_tile(kernel, *args, first, count, 1)
        return _grow(rows, size), _grow(row_lse, size)

    def many() -> tuple[jax.Array, jax.Array]:
        return _attend_tile(kernel, *args, first, count, size)

    # A sequence that decodes among others that prefill pays for one query.
    return jax.lax.cond(count <= 1, one, many)


def _grow(rows: jax.Array, size: int) -> jax.Array:
    return jnp.zeros((size, *rows.shape[1:]), rows.dtype).at[:1].set(rows)


def _attend_tile(
    kernel: _Kernel,
    source: _Source,
    q: jax.Array,
    table: jax.Array,
    reach: tuple[jax.Array, jax.Array] | None,
    left_out: _LeftOut,
    offset: jax.Array,
    first: jax.Array,
    count: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """One tile: `count` of at most `size` queries, at position `first` and flat index `offset`."""
    heads, group = kernel.kv_heads, kernel.group
    token = jnp.arange(size, dtype=jnp.int32)
    rows = q.at[offset + token].get(mode="clip").reshape(size, heads, group, -1)
    rows = rows.transpose(1, 0, 2, 3).reshape(heads, size * group, -1)
    shift = source.shift
    if shift is not None:
        shift = shift.at[offset + token].get(mode="clip").reshape(size, heads, group)
        shift = shift.transpose(1, 0, 2).reshape(heads, size * group, 1)
    # A query that is not there stands before every key.
    positions = jnp.repeat(jnp.where(token < count, first + token, -1), group)

    keys = kernel.keys
    low = jnp.int32(keys.first)
    if keys.exact_first:
        low = jnp.maximum(low, jnp.where(left_out[0] == 0, keys.exact_first, 0))
    if keys.window is not None:
        low = jnp.maximum(low, first - keys.window + 1)
    high = first + count - keys.distance
    if keys.exact_recent:
        high = jnp.minimum(high, jnp.maximum(first + count - keys.exact_recent, left_out[1]))
    high = jnp.where(count > 0, high, 0)
    if keys.end is not None:
        high = jnp.minimum(high, keys.end)
    if reach is not None:
        low, high = jnp.maximum(low, reach[0]), jnp.minimum(high, reach[1])
    walk = kernel.walk(size)
    begin, trips = walk.trips(low, high)
    operand = _operand(rows, chunks.value_dtype(kernel.k_spec), kernel.q_parts)

    def body(i: jax.Array, state: _State) -> _State:
        read, key = walk.trip(begin, i, table)
        visible = jax.lax.optimization_barrier(_visible(keys, left_out, positions, key))
        return _absorb(kernel, source, state, operand, read, visible, shift)

    state = jax.lax.fori_loop(0, trips, body, _start(heads, size * group, kernel.v_spec.head_dim))
    return _finish(state, size, heads, group)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Running softmax of rows: maximum and sum f32 [heads, rows], output f32 [heads, rows, dim]."""

    top: jax.Array
    total: jax.Array
    out: jax.Array


def _start(heads: int, rows: int, head_dim: int) -> _State:
    zeros = jnp.zeros((heads, rows, head_dim), jnp.float32)
    return _State(jnp.full((heads, rows), -jnp.inf, jnp.float32), zeros[..., 0], zeros)


def _finish(state: _State, size: int, heads: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(out [size, q_heads, dim], lse [size, q_heads]); rows that saw no key are 0 and -inf."""
    empty = state.total == 0
    out = state.out / jnp.where(empty, 1, state.total)[..., None]
    lse = jnp.where(empty, -jnp.inf, state.top + jnp.log(jnp.where(empty, 1, state.total)))
    out = out.reshape(heads, size, group, -1).transpose(1, 0, 2, 3)
    lse = lse.reshape(heads, size, group).transpose(1, 0, 2)
    return out.reshape(size, heads * group, -1), lse.reshape(size, heads * group)


def _visible(keys: KeyRange, left_out: _LeftOut, positions: jax.Array, key: jax.Array) -> jax.Array:
    """Which of the keys, int32 [tokens], each row sees: bool [rows, tokens]."""
    distance = positions[:, None] - key
    visible = distance >= keys.distance
    if keys.window is not None:
        visible &= distance < keys.window
    if keys.first:
        visible &= key >= keys.first
    if keys.end is not None:
        visible &= key < keys.end
    if keys.exact_first:
        visible &= (key >= keys.exact_first) | (key < left_out[0])
    if keys.exact_recent:
        visible &= (distance >= keys.exact_recent) | (key < left_out[1])
    return visible


def _absorb(
    kernel: _Kernel,
    source: _Source,
    state: _State,
    operand: jax.Array,
    read: Callable[[Pages], Pages],
    visible: jax.Array,
    shift: jax.Array | None,
) -> _State:
    """Adds a chunk to the running softmax."""
    k = chunks.decode(read(source.k), kernel.k_spec, shield=False)
    scores = _scores(operand, k, state.top.shape[1]) * source.scale
    if shift is not None:
        scores = scores + shift
    if source.soft_cap is not None:
        scores = source.soft_cap * jnp.tanh(scores / source.soft_cap)
    # Two readers: without the barrier each would compute the scores.
    scores = jax.lax.optimization_barrier(jnp.where(visible, scores, -jnp.inf))
    top = jnp.maximum(state.top, scores.max(-1))
    base = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - base[..., None])
    keep = jnp.exp(state.top - base)
    v = chunks.decode(read(source.v), kernel.v_spec, shield=True)
    return _State(
        top,
        state.total * keep + weights.sum(-1),
        state.out * keep[..., None] + _weighted_sum(weights, v, visible, kernel.p_parts),
    )


def _scores(operand: jax.Array, k: chunks.Decoded, rows: int) -> jax.Array:
    """Products of query rows, as `_operand` made them, with keys: f32 [heads, rows, tokens]."""
    if operand.shape[1] <= _FEW_ROWS:
        # Keys on the left take half the time, unless XLA folds the transposition into the product.
        scores = jax.lax.optimization_barrier(_product("htd,hrd->htr", k.values, operand))
        scores = scores.swapaxes(1, 2)
    else:
        scores = _product("hrd,htd->hrt", operand, k.values)
    scores = _join(scores, rows)
    return scores if k.token_scale is None else scores * k.token_scale[:, None]


def _weighted_sum(
    weights: jax.Array, v: chunks.Decoded, visible: jax.Array, parts: int
) -> jax.Array:
    """Sum of values by weight: f32 [heads, rows, dim].

    A value that is not finite makes the rows that see it NaN. No other row takes notice of it,
    which takes a select: 0 times NaN is NaN.
    """

    def total(values: jax.Array, bad: jax.Array | None) -> jax.Array:
        shares = weights if v.token_scale is None else weights * v.token_scale[:, None]
        if bad is not None:
            shares = jnp.where(bad[:, None] & visible, jnp.nan, shares)
        operand = _operand(shares, values.dtype, parts)
        return _join(_product("hrt,htd->hrd", operand, values), weights.shape[1])

    def shielded() -> jax.Array:
        bad = (~jnp.isfinite(v.values)).any(-1)
        return total(jnp.where(bad[..., None], 0, v.values), bad)

    if v.bad is not None:
        return total(v.values, v.bad)
    out = total(v.values, None)
    return jax.lax.cond(jnp.isfinite(out.sum()), lambda: out, shielded)


def _operand(rows: jax.Array, dtype: np.dtype, parts: int) -> jax.Array:
    """F32 rows [.., rows, n] as the operand of a product with decoded values."""
    if dtype == jnp.float32:
        return rows
    # XLA has no fast bf16 product for a single row.
    return chunks.split_bf16(rows, 2 if rows.shape[-2] == 1 else parts)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32, precision=precision)


def _join(x: jax.Array, rows: int) -> jax.Array:
    """Sums the parts that `_operand` made: [heads, parts * rows, n] to [heads, rows, n]."""
    # Slices, as XLA fuses a reshape and a sum with the products before them, at a loss.
    out = x[:, :rows]
    for first in range(rows, x.shape[1], rows):
        out = out + x[:, first : first + rows]
    return out
