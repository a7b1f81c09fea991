"""Merging attention over parts of a context, in f32 (Flash-Decoding's second step)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def merge_parts(
    outputs: jax.Array, maxima: jax.Array, sums: jax.Array, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merges unnormalized outputs of parts by their log-sum-exp.

    Args:
      outputs: f32 [..., splits, D, rows]; anything where a part's sum is 0.
      maxima: f32 [..., splits, rows], largest score of a part in base 2.
      sums: f32 [..., splits, rows], sum of 2^(score - maximum).
      sinks: f32, natural log, broadcastable to [..., rows]: one more logit in the denominator.

    Returns:
      Outputs f32 [..., rows, D], 0 where nothing was attended, and their log-sum-exp
      f32 [..., rows] (natural, sinks included), -inf where there is nothing.
    """
    top = maxima.max(axis=-2)
    if sinks is not None:
        sink = sinks.astype(jnp.float32) * np.float32(1 / np.log(2))
        top = jnp.maximum(top, sink)
    weight = jnp.exp2(maxima - top[..., None, :])
    # An empty part's output was never written.
    weighted = jnp.where((sums != 0)[..., None, :], outputs * weight[..., None, :], 0)
    seen = (sums * weight).sum(axis=-2)
    total = seen if sinks is None else seen + jnp.exp2(sink - top)
    is_empty = seen == 0
    out = weighted.sum(axis=-3) / jnp.where(is_empty, 1, total)[..., None, :]
    lse = (top + jnp.log2(total)) * np.float32(np.log(2))
    return out.swapaxes(-1, -2), jnp.where(is_empty, -jnp.inf, lse)
