"""Feeding tokens to a model through a cache, outside jit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.cache import PagedCache, reserve
from jaxkv.sequences import StepPlan


def feed(
    model: Any, cache: PagedCache, tokens: ArrayLike, counts: ArrayLike
) -> tuple[jax.Array, PagedCache, StepPlan]:
    """Appends a chunk of every sequence. The cache is donated.

    Args:
      model: as `jaxkv.generate.generate` takes it.
      cache: the cache.
      tokens: int32 [S, T].
      counts: int32 [S], how many of each row are there.

    Returns:
      What the model's output layer reads, [S, T, features], where the model has `hidden`, else its
      logits; the cache; the step's plan.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    cache, plan = _reserve(cache, jnp.asarray(counts, jnp.int32), tokens.shape[1])
    # One program for all layers alike compiles many times faster.
    if hasattr(model, "hidden_by_layer"):
        out, cache = model.hidden_by_layer(tokens, cache, plan)
    else:
        out, cache = _program(model, tokens, cache, plan)
    return out, cache, plan


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _reserve(cache: PagedCache, counts: jax.Array, width: int) -> tuple[PagedCache, StepPlan]:
    return reserve(cache, counts, max_new_tokens=width)


@functools.partial(jax.jit, donate_argnames="cache")
def _program(model: Any, tokens: jax.Array, cache: PagedCache, plan: StepPlan) -> Any:
    if hasattr(model, "hidden"):
        return model.hidden(tokens, cache, plan)
    return model(tokens, cache, plan)
