"""`ExactTokens`: the first and the newest tokens of each sequence in 16 bits, beside the pages.

Low-bit pages lose most where attention looks most: at the first token (Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", 2023) and at the newest ones (Liu et al., "KIVI",
2024). Pages hold every token, so sharing and moving blocks is untouched; these rows are read in
place of them. Rows belong to slots, and each slot knows which of its tokens its rows hold, so a
token that never passed through them (a prefix attached, a trim too far) is read from its page.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv.attention_exact import ExactLayer
from jaxkv.config import CacheConfig
from jaxkv.sequences import StepPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactRows:
    """Both sides of one layer, not rotated: bf16 [S, exact_first + ring_tokens, heads, dim].

    Token j < exact_first is row j; token j of the ring is row exact_first + j % ring_tokens.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactTokens:
    """The rows of every layer, and which tokens they hold. Every leaf has a leading slot axis.

    Attributes:
      layers: rows of each layer.
      first_from: int32 [S]; of a slot's first tokens, those from here on are held.
      recent_from: int32 [S]; the ring holds tokens from here to `end` without a gap.
      end: int32 [S], the length up to which all this is known; a slot that is longer got tokens
        that these rows never saw.
    """

    layers: tuple[ExactRows, ...]
    first_from: jax.Array
    recent_from: jax.Array
    end: jax.Array

    def layer(self, index: int, config: CacheConfig) -> ExactLayer:
        """One layer as attention takes it."""
        rows = self.layers[index]
        return ExactLayer(
            k=rows.k,
            v=rows.v,
            first_from=self.first_from,
            recent_from=self.recent_from,
            first=config.exact_first,
            recent=config.exact_recent,
        )


def create(config: CacheConfig) -> ExactTokens | None:
    """Rows that hold nothing yet; None where the config keeps no exact tokens."""
    if not config.has_exact_tokens:
        return None
    layers = []
    for index in range(config.num_layers):
        spec = config.layer(index)
        lead = (config.max_sequences, config.exact_rows, spec.num_kv_heads)
        layers.append(
            ExactRows(
                *(jnp.zeros((*lead, d), jnp.bfloat16) for d in (spec.head_dim, spec.v_head_dim))
            )
        )
    return ExactTokens(
        tuple(layers), *(jnp.zeros((config.max_sequences,), jnp.int32) for _ in range(3))
    )


def advance(exact: ExactTokens, plan: StepPlan, config: CacheConfig) -> ExactTokens:
    """What the rows hold once the step of `plan` is written."""
    has_gap = exact.end < plan.starts

    def begin(old: jax.Array) -> jax.Array:
        return jnp.where(has_gap, plan.starts, jnp.minimum(old, plan.starts))

    # Never past the length: a trim lowers all three.
    oldest = plan.lengths - config.ring_tokens
    return dataclasses.replace(
        exact,
        first_from=begin(exact.first_from),
        recent_from=jnp.maximum(begin(exact.recent_from), oldest),
        end=plan.lengths,
    )


def shorten(exact: ExactTokens, lengths: jax.Array) -> ExactTokens:
    """What the rows still hold of sequences that may have become shorter."""
    first_from, recent_from, end = (
        jnp.minimum(x, lengths) for x in (exact.first_from, exact.recent_from, exact.end)
    )
    return dataclasses.replace(exact, first_from=first_from, recent_from=recent_from, end=end)


@jax.jit
def take_slots(exact: ExactTokens, rows: jax.Array) -> ExactTokens:
    """Slot s takes what slot rows[s] held; a negative one holds nothing."""
    taken = jax.tree.map(lambda leaf: leaf[jnp.maximum(rows, 0)], exact)
    return shorten(taken, jnp.where(rows < 0, 0, taken.end))


@jax.jit
def copy_slots(exact: ExactTokens, source: jax.Array, destination: jax.Array) -> ExactTokens:
    """Slot destination[i] takes what slot source[i] held; a destination of S or more is skipped."""
    return jax.tree.map(lambda leaf: leaf.at[destination].set(leaf[source], mode="drop"), exact)


def store(
    exact: ExactTokens, layer: int, k: jax.Array, v: jax.Array, plan: StepPlan, config: CacheConfig
) -> ExactTokens:
    """Stores a step's tokens of one layer.

    Args:
      exact: the rows, after `advance`.
      layer: which layer.
      k: keys of the plan's token shape, as the pages get them before rotation, any float dtype.
      v: values.
      plan: the step's plan.
      config: the cache's config.
    """
    rows = _store(exact.layers[layer], k, v, plan, config.exact_first, config.ring_tokens)
    layers = (*exact.layers[:layer], rows, *exact.layers[layer + 1 :])
    return dataclasses.replace(exact, layers=layers)


# One inner jit: layers of equal geometry are traced and lowered once, however many there are.
@functools.partial(jax.jit, static_argnames=("first", "ring"))
def _store(
    rows: ExactRows, k: jax.Array, v: jax.Array, plan: StepPlan, first: int, ring: int
) -> ExactRows:
    slots = rows.k.shape[0]
    slot, position = plan.rows.reshape(-1), plan.positions.reshape(-1)
    slot = jnp.where(slot < 0, slots, slot)

    def put(leaf: jax.Array, x: jax.Array) -> jax.Array:
        # Infinities become NaN, as in pages: a key of -inf would pass unseen.
        x = x.reshape(-1, *x.shape[-2:])
        x = jnp.where(jnp.isfinite(x), x, jnp.nan).astype(leaf.dtype)
        if ring:
            leaf = leaf.at[slot, first + position % ring].set(x, mode="drop")
        if first:
            place = jnp.where(position < first, slot, slots)
            leaf = leaf.at[place, jnp.minimum(position, first - 1)].set(x, mode="drop")
        return leaf

    return ExactRows(put(rows.k, k), put(rows.v, v))
