"""Attention over the exact tokens of a layer in plain XLA, to be merged with that over its pages.

A tile of queries of one sequence reads a static number of rows: the newest `recent` tokens before
its first query, its own tokens, and the first ones. Steps of few tokens run all sequences at once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv.attention_xla import Queries

# Most tokens of a tile.
_TILE_TOKENS = 64
# Up to so many tokens a sequence, all sequences of a padded step run at once.
_FEW_TOKENS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactLayer:
    """The exact tokens of one layer.

    Attributes:
      k: bf16 [S, first + ring, heads, head_dim]; token j is row j where j < first, and row
        first + j % ring.
      v: likewise.
      first_from: int32 [S]; first tokens before this one are not held.
      recent_from: int32 [S]; likewise for the ring.
      first: tokens j < first are exact.
      recent: the query of position p sees tokens j > p - recent exactly.
    """

    k: jax.Array
    v: jax.Array
    first_from: jax.Array
    recent_from: jax.Array
    first: int = dataclasses.field(metadata=dict(static=True))
    recent: int = dataclasses.field(metadata=dict(static=True))

    @property
    def ring(self) -> int:
        """Tokens that the ring has room for."""
        return self.k.shape[1] - self.first


def exact_attention(
    q: jax.Array,
    exact: ExactLayer,
    queries: Queries,
    *,
    scale: jax.Array,
    soft_cap: jax.Array | None = None,
    shift: jax.Array | None = None,
    window: int | None = None,
    keep_first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys that are exact for each query and held.

    Args:
      q: [N, q_heads, head_dim] in flat order, not rotated, any float dtype.
      exact: the layer's exact tokens, this step's included.
      queries: where the queries lie.
      scale: f32 scalar, factor of the scores.
      soft_cap: f32 scalar; scores become cap * tanh(score / cap).
      shift: f32 [N, q_heads], added to all scores of a query before the cap; None for 0.
      window: only keys p - window + 1 and later.
      keep_first: keys before this one are seen whatever the window.

    Returns:
      (out, lse): f32 [N, q_heads, v_head_dim] normalised over these keys and f32 [N, q_heads];
      0 and -inf where a query sees none of them.
    """
    sequences, tokens = queries.counts.shape[0], queries.max_tokens

    def tile(slot: jax.Array, begin: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        count = jnp.minimum(queries.counts[slot] - begin, size)
        index = queries.offsets[slot] + begin + jnp.arange(size, dtype=jnp.int32)
        rows = q.at[index].get(mode="clip").astype(jnp.float32)
        own = None if shift is None else shift.at[index].get(mode="clip")
        position = queries.starts[slot] + begin
        keys = _keys(exact, slot, position, count, size, window, keep_first)
        return _tile(rows, exact, slot, keys, scale, soft_cap, own)

    if tokens == 1 or (tokens <= _FEW_TOKENS and queries.is_padded):
        every = jnp.arange(sequences, dtype=jnp.int32)
        out, lse = jax.vmap(lambda slot: tile(slot, jnp.int32(0), tokens))(every)
        if queries.is_padded:
            return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[2])
        place = jnp.where(queries.counts > 0, queries.offsets, q.shape[0])
        return _scatter(_nothing(q, exact), (out[:, 0], lse[:, 0]), place)

    size = min(tokens, _TILE_TOKENS)
    per_sequence = -(-queries.counts // size)
    ends = jnp.cumsum(per_sequence)

    def body(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot = jnp.sum(ends <= i, dtype=jnp.int32)
        begin = (i - ends[slot] + per_sequence[slot]) * size
        index = begin + jnp.arange(size, dtype=jnp.int32)
        index = jnp.where(index < queries.counts[slot], queries.offsets[slot] + index, q.shape[0])

        def one() -> tuple[jax.Array, jax.Array]:
            return jax.tree.map(
                lambda x: jnp.pad(x, ((0, size - 1), *((0, 0),) * (x.ndim - 1))),
                tile(slot, begin, 1),
            )

        # A sequence that decodes among others that prefill pays for one query.
        is_one = queries.counts[slot] - begin <= 1
        rows = jax.lax.cond(is_one, one, lambda: tile(slot, begin, size))
        return _scatter(results, rows, index)

    return jax.lax.fori_loop(0, ends[-1], body, _nothing(q, exact))


def _nothing(q: jax.Array, exact: ExactLayer) -> tuple[jax.Array, jax.Array]:
    """The results of queries that see no key."""
    shape = (*q.shape[:2], exact.v.shape[-1])
    return jnp.zeros(shape, jnp.float32), jnp.full(shape[:2], -jnp.inf, jnp.float32)


def _scatter(
    results: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, jax.Array], index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    out, lse = (x.at[index].set(row, mode="drop") for x, row in zip(results, rows))
    return out, lse


def _keys(
    exact: ExactLayer,
    slot: jax.Array,
    position: jax.Array,
    count: jax.Array,
    size: int,
    window: int | None,
    keep_first: int,
) -> tuple[jax.Array, jax.Array]:
    """The rows that a tile reads, int32 [n], and whether each query sees them, bool [size, n]."""
    first_from, recent_from = exact.first_from[slot], exact.recent_from[slot]
    query = position + jnp.arange(size, dtype=jnp.int32)
    token = jnp.arange(exact.first, dtype=jnp.int32)
    row, held = token, token >= first_from
    is_near = jnp.zeros(token.shape, bool)
    if exact.recent:
        reach = exact.recent
        if window is not None and keep_first == 0:
            reach = min(reach, window)
        recent = position - reach + 1 + jnp.arange(reach + size - 1, dtype=jnp.int32)
        row = jnp.concatenate([row, exact.first + recent % exact.ring])
        held = jnp.concatenate([held, recent >= recent_from])
        is_near = jnp.concatenate([is_near, jnp.ones(recent.shape, bool)])
        token = jnp.concatenate([token, recent])
    distance = query[:, None] - token
    # Each token once: a first one that the ring serves too is read there.
    in_ring = (distance < exact.recent) & (token >= recent_from)
    visible = held & (distance >= 0) & (in_ring == is_near)
    if window is not None:
        visible &= (distance < window) | (token < keep_first)
    return row, visible & (jnp.arange(size) < count)[:, None]


def _tile(
    q: jax.Array,
    exact: ExactLayer,
    slot: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    scale: jax.Array,
    soft_cap: jax.Array | None,
    shift: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Queries q [size, q_heads, dim] of one slot over the rows that `_keys` chose."""
    size, q_heads, _ = q.shape
    heads = exact.k.shape[2]
    row, visible = keys
    k, v = (side[slot, row].astype(jnp.float32) for side in (exact.k, exact.v))
    product = functools.partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    rows = q.reshape(size, heads, q_heads // heads, -1)
    scores = product("thgd,khd->htgk", rows, k) * scale
    if shift is not None:
        scores = scores + shift.reshape(size, heads, -1).swapaxes(0, 1)[..., None]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = visible[None, :, None, :]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    base = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - base)
    total = weights.sum(-1)
    # Rows that nobody wrote may hold NaN: only queries that see one may notice.
    bad = ~jnp.isfinite(v).all(-1)
    v = jnp.where(bad[..., None], 0, v)
    weights = jnp.where(bad.T[:, None, None, :] & seen, jnp.nan, weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = product("htgk,khd->thgd", weights / total[..., None], v)
    lse = jnp.where(empty, -jnp.inf, base[..., 0] + jnp.log(total))
    return out.reshape(size, q_heads, -1), lse.swapaxes(0, 1).reshape(size, q_heads)
