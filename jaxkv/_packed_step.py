"""The one compiled step of a `Scheduler`: what the host asks for, and what comes back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import PagedCache, reserve

_NEVER = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a step has to do, from the host.

    Attributes:
      tokens: int32 [S, C], the tokens of each slot that the host knows.
      counts: int32 [S], tokens of each slot in this step.
      starts: int32 [S], the lengths that the host predicts; a slot of another one is skipped.
      is_drawn: bool [S], the slot's one token is the one it drew last, not yet on the host.
      expected: int32 [S, C], tokens that once were drawn at these places, -1 elsewhere.
      logits: f32 [S, C], the logits they had.
    """

    tokens: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    is_drawn: np.ndarray
    expected: np.ndarray
    logits: np.ndarray

    @classmethod
    def empty(cls, slots: int, chunk: int) -> Work:
        """Nothing to do."""
        return cls(
            tokens=np.zeros((slots, chunk), np.int32),
            counts=np.zeros(slots, np.int32),
            starts=np.zeros(slots, np.int32),
            is_drawn=np.zeros(slots, bool),
            expected=np.full((slots, chunk), _NEVER, np.int32),
            logits=np.zeros((slots, chunk), np.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What a step tells the host.

    Attributes:
      is_done: bool [S], slots whose tokens were stored.
      refusal: int32 [S], a `Refusal`, why not.
      tokens: int32 [S], the likeliest next token of each.
      logits: f32 [S], its logit.
      gaps: f32 [S], how far the second is below it.
      num_free: int32, free blocks after the step.
      flips: int32, expected tokens that were not the likeliest.
      largest_flip: f32, by how much at most.
      rounding: f32, largest change of an expected token's logit.
    """

    is_done: jax.Array
    refusal: jax.Array
    tokens: jax.Array
    logits: jax.Array
    gaps: jax.Array
    num_free: jax.Array
    flips: jax.Array
    largest_flip: jax.Array
    rounding: jax.Array


@functools.partial(
    jax.jit, static_argnames=("chunk", "total_tokens"), donate_argnames=("cache", "last")
)
def packed_step(
    model: Any,
    cache: PagedCache,
    last: jax.Array,
    work: Work,
    *,
    chunk: int,
    total_tokens: int,
) -> tuple[PagedCache, jax.Array, Report]:
    """One packed step of at most `total_tokens` tokens, at most `chunk` of each slot."""
    counts = jnp.where(cache.lengths == work.starts, work.counts, 0)
    cache, plan = reserve(cache, counts, max_new_tokens=chunk, total_tokens=total_tokens)
    row = jnp.maximum(plan.rows, 0)
    column = jnp.maximum(plan.positions - plan.starts[row], 0)
    tokens = jnp.where(work.is_drawn[row], last[row], work.tokens[row, column])
    if hasattr(model, "hidden"):
        hidden, cache = model.hidden(tokens, cache, plan)
        logits_of = model.logits
    else:
        hidden, cache = model(tokens, cache, plan)
        logits_of = functools.partial(jnp.asarray, dtype=jnp.float32)
    logits = logits_of(hidden[plan.offsets + jnp.maximum(plan.new_tokens - 1, 0)])
    drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = logits.max(axis=-1)
    is_top = jnp.arange(logits.shape[1]) == drawn[:, None]
    is_done = plan.granted & (plan.new_tokens > 0)
    flips, largest_flip, rounding = _compare(
        hidden,
        logits_of,
        jnp.where(plan.rows >= 0, work.expected[row, column], _NEVER),
        work.logits[row, column],
    )
    report = Report(
        is_done=is_done,
        refusal=plan.refusal,
        tokens=drawn,
        logits=top,
        gaps=top - jnp.where(is_top, -jnp.inf, logits).max(axis=-1),
        num_free=cache.num_free_blocks,
        flips=flips,
        largest_flip=largest_flip,
        rounding=rounding,
    )
    return cache, jnp.where(is_done, drawn, last), report


def _compare(
    hidden: jax.Array, logits_of: Any, expected: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Flips, the largest one and the rounding of recomputed tokens, int32 [N]; -1 for others.

    Costs nothing in a step that recomputes none.
    """

    def compare() -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = logits_of(hidden)
        again = jnp.take_along_axis(logits, jnp.maximum(expected, 0)[:, None], axis=1)[:, 0]
        is_expected = expected >= 0
        is_flip = is_expected & (jnp.argmax(logits, axis=1) != expected)
        return (
            is_flip.sum(dtype=jnp.int32),
            jnp.where(is_flip, logits.max(axis=1) - again, 0).max(),
            jnp.where(is_expected, jnp.abs(again - before), 0).max(),
        )

    nothing = (jnp.int32(0), jnp.float32(0), jnp.float32(0))
    return jax.lax.cond((expected >= 0).any(), compare, lambda: nothing)
