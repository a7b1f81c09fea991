"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge_partials(
    parts: Sequence[tuple[jax.Array, jax.Array]],
    sinks: jax.Array | None = None,
    shift: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over disjoint sets of keys, in f32.

    Args:
      parts: (out [..., heads, dim], lse [..., heads]) each, f32, out normalised over its keys;
        lse -inf where there were none, and out finite there.
      sinks: f32 [heads], logits that join the denominator of rows that see any key.
      shift: f32 [..., heads], what the scores of all keys of a row lack; any value where there are
        no keys.

    Returns:
      (out, lse) over all keys, sinks included; 0 and -inf where no part has a key.
    """
    outs, lses = zip(*parts)
    if shift is not None:
        lses = tuple(jnp.where(lse == -jnp.inf, lse, lse + shift) for lse in lses)
    if len(parts) == 1 and sinks is None:
        return outs[0], lses[0]
    top = functools.reduce(jnp.maximum, lses)
    empty = top == -jnp.inf
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    # Sinks may be -inf, and then an empty row would subtract infinities.
    base = jnp.where(empty, 0, top)
    shares = [jnp.exp(lse - base) for lse in lses]
    total = sum(shares[1:], shares[0])
    if sinks is not None:
        total = total + jnp.exp(sinks - base)
    total = jnp.where(empty, 1, total)
    out = sum((s / total)[..., None] * o for s, o in zip(shares, outs))
    assert isinstance(out, jax.Array)
    return jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, base + jnp.log(total))
