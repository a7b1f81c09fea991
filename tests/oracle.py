"""The oracle of attention: decode what is stored in f32, then attend plainly in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxkv.codecs import Pages, decode_pages, unrotate
from jaxkv.formats import SideSpec
from jaxkv.sequences import StepPlan


def stored_rows(pages: Pages, spec: SideSpec, layer_scale=None) -> np.ndarray:
    """What the pages hold, rotation undone: [blocks, heads, block_size, head_dim]."""
    return np.asarray(_decode(pages, layer_scale, spec), np.float64)


@functools.partial(jax.jit, static_argnames="spec")
def _decode(pages, layer_scale, spec):
    return unrotate(decode_pages(pages, spec, layer_scale), spec)


def attend(
    q,
    k_rows: np.ndarray,
    v_rows: np.ndarray,
    plan: StepPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks=None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a step's queries, one sequence and one query at a time.

    Args:
      q: as `jaxkv.attention.attend_pages` takes it.
      k_rows: from `stored_rows`.
      v_rows: likewise.
      plan: the plan.
      scale: factor of the scores, by default 1 / sqrt(head_dim).
      window: keys p - window + 1 to p.
      soft_cap: the cap.
      sinks: [q_heads].

    Returns:
      (out, lse) in float64, shaped as `attend_pages` shapes them.
    """
    q = np.asarray(q).astype(np.float64)
    lead = q.shape[:-2]
    q = q.reshape(-1, *q.shape[-2:])
    heads, block_size = k_rows.shape[1:3]
    group = q.shape[1] // heads
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((*q.shape[:2], v_rows.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    starts, counts, offsets = map(np.asarray, (plan.starts, plan.new_tokens, plan.offsets))
    for row, table in enumerate(np.asarray(plan.block_tables)):
        length = starts[row] + counts[row]
        blocks = table[: -(-length // block_size)]
        k, v = (
            x[blocks].swapaxes(1, 2).reshape(-1, heads, x.shape[-1])[:length].repeat(group, 1)
            for x in (k_rows, v_rows)
        )
        for token in range(counts[row]):
            position = starts[row] + token
            low = 0 if window is None else max(0, position - window + 1)
            seen = slice(low, position + 1)
            query = q[offsets[row] + token]
            scores = scale * np.einsum("hd,khd->hk", query, k[seen])
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            logits = scores
            if sinks is not None:
                logits = np.concatenate([scores, np.asarray(sinks, np.float64)[:, None]], 1)
            top = logits.max(1, keepdims=True)
            total = np.exp(logits - top).sum(1)
            weights = np.exp(scores - top) / total[:, None]
            out[offsets[row] + token] = np.einsum("hk,khd->hd", weights, v[seen])
            lse[offsets[row] + token] = top[:, 0] + np.log(total)
    return out.reshape(*lead, *out.shape[1:]), lse.reshape(*lead, -1)
