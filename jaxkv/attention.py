"""The attention op: checks its arguments, picks an implementation, merges partial results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv import attention_stored, attention_xla
from jaxkv._xla.merge import merge_partials
from jaxkv.attention_exact import ExactLayer, exact_attention
from jaxkv.attention_stored import PageSource
from jaxkv.attention_xla import KeyRange, Queries
from jaxkv.codecs import Pages, pages_shapes, rotate, unrotate
from jaxkv.formats import SideSpec
from jaxkv.sequences import StepPlan


def attend_pages(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    plan: StepPlan,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    k_mean: jax.Array | None = None,
    exact: ExactLayer | None = None,
    scale: ArrayLike | None = None,
    window: int | None = None,
    soft_cap: ArrayLike | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    stored: PageSource | None = None,
    layer: int = 0,
    keep_first: int = 0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of a step's queries over the pages of one layer.

    The query of position p sees keys 0 to p of its sequence, this step's included. Accumulation
    and softmax are f32; the rotation of a rotated side is applied to q and taken off the output.

    Args:
      q: [S, T, q_heads, head_dim] (padded plan) or [N, q_heads, head_dim] (packed), any float
        dtype; q_heads is a multiple of the pages' KV heads.
      k_pages: the layer's keys, written already.
      v_pages: its values, in the same blocks; their head_dim may differ.
      plan: the step's plan.
      k_spec: the K side.
      v_spec: the V side.
      k_scale: f32 scalar, the layer's scale of fp8 keys; other formats ignore it. None means 1.
      v_scale: likewise for values.
      k_mean: f32 [kv_heads, head_dim], what was taken off every stored key; None for nothing. The
        softmax does not see it; the log-sum-exp, sinks and a soft cap do.
      exact: tokens that are read from there in place of their pages.
      scale: scalar factor of the scores; None means 1 / sqrt(head_dim).
      window: static int W >= 1: only keys p - W + 1 to p, at the cost of the window. None: all.
      soft_cap: positive scalar; scores become cap * tanh(score * scale / cap) before the mask
        (Gemma 2, 2024).
      sinks: f32 [q_heads], one logit per head that joins the denominator only (gpt-oss, 2025;
        Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).
      return_lse: whether to return the log-sum-exp too.
      implementation: "xla", "pallas_gpu", or None for "xla".
      stored: where the blocks are that table entries below -1 name; None where there are none.
        Only "xla" reads them.
      layer: which layer of a stored block to read.
      keep_first: keys 0 to keep_first - 1 are seen whatever the window. Only "xla" sees them.

    Returns:
      out, as q with v_head_dim last, in q's dtype: 0 for queries that the plan does not hold.
      With `return_lse` also f32 [..., q_heads], natural log, sinks included, -inf there.

    Raises:
      TypeError: an argument of a wrong kind or dtype.
      ValueError: a wrong shape, an option out of range, or an unknown implementation.
      NotImplementedError: the named implementation cannot serve this.
    """
    _check_queries(q, k_pages, plan, k_spec)
    _check_pages("k_pages", k_pages, k_pages, k_spec)
    _check_pages("v_pages", v_pages, k_pages, v_spec)
    _check_options(window, sinks, q.shape[-2])
    q = _refuse_gradients(q)
    k_scale, v_scale = _layer_scale(k_scale, k_spec), _layer_scale(v_scale, v_spec)
    factor = _scalar("scale", k_spec.head_dim**-0.5 if scale is None else scale)
    cap = None if soft_cap is None else _scalar("soft_cap", soft_cap)
    shift = None
    if k_mean is not None and (return_lse or sinks is not None or cap is not None):
        shift = _score_shift(q, k_mean, factor)
    if _chosen(implementation) == "pallas_gpu":
        if stored is not None or keep_first:
            raise NotImplementedError(
                "implementation: 'pallas_gpu' reads neither stored blocks nor keep_first tokens "
                "behind the window; pass 'xla' or None"
            )
        out, lse = _attend_pallas_gpu(
            q,
            k_pages,
            v_pages,
            plan,
            exact,
            k_spec=k_spec,
            v_spec=v_spec,
            k_scale=k_scale,
            v_scale=v_scale,
            scale=k_spec.head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            shift=shift,
        )
        return (out, lse) if return_lse else out
    queries = _queries(plan)
    if stored is not None:
        first = attention_stored.first_resident_keys(plan.block_tables, k_pages.block_size)
        reach = (first, jnp.full_like(first, jnp.iinfo(jnp.int32).max))
        queries = dataclasses.replace(queries, reach=reach)
    keys = _key_ranges(window, keep_first)
    if exact is not None:
        left_out = dict(exact_first=exact.first, exact_recent=exact.recent)
        keys = tuple(dataclasses.replace(some, **left_out) for some in keys)
        queries = dataclasses.replace(
            queries, first_from=exact.first_from, recent_from=exact.recent_from
        )
    out, lse = _attend_xla(
        q,
        k_pages,
        v_pages,
        queries,
        exact,
        k_scale,
        v_scale,
        factor,
        cap,
        sinks,
        shift,
        None if stored is None else jnp.int32(layer),
        k_spec=k_spec,
        v_spec=v_spec,
        keys=keys,
        stored=stored,
        keep_first=keep_first,
    )
    return (out, lse) if return_lse else out


def _queries(plan: StepPlan) -> Queries:
    return Queries(
        tables=plan.block_tables,
        starts=plan.starts,
        counts=plan.new_tokens,
        offsets=plan.offsets,
        max_tokens=plan.max_new_tokens,
        is_padded=not plan.is_packed,
    )


def _score_shift(q: jax.Array, k_mean: jax.Array, scale: jax.Array) -> jax.Array:
    """What centering took off each query's scores: f32 [..., q_heads]."""
    rows = q.astype(jnp.float32).reshape(*q.shape[:-2], k_mean.shape[0], -1, q.shape[-1])
    product = jnp.einsum("...hgd,hd->...hg", rows, k_mean, precision=jax.lax.Precision.HIGHEST)
    return scale * product.reshape(q.shape[:-1])


def _key_ranges(window: int | None, keep_first: int) -> tuple[KeyRange, ...]:
    """Disjoint ranges of keys that a query sees, the first kept ones behind its window last."""
    inside = KeyRange(window=window)
    if window is None or keep_first == 0:
        return (inside,)
    return inside, KeyRange(distance=window, end=keep_first)


@jax.custom_jvp
def _refuse_gradients(q: jax.Array) -> jax.Array:
    """q, where nobody differentiates."""
    return q


@_refuse_gradients.defjvp
def _raise_on_gradients(primals: object, tangents: object) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError(
        "attend: gradients are not supported, a cache is for inference; train with plain attention"
    )


@functools.partial(jax.jit, static_argnames=("k_spec", "v_spec", "keys", "stored", "keep_first"))
def _attend_xla(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    queries: Queries,
    exact: ExactLayer | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    scale: jax.Array,
    soft_cap: jax.Array | None,
    sinks: jax.Array | None,
    shift: jax.Array | None,
    layer: jax.Array | None,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    keys: tuple[KeyRange, ...],
    stored: PageSource | None,
    keep_first: int,
) -> tuple[jax.Array, jax.Array]:
    """The XLA implementation; jitted so that all equal layers share one trace."""
    if shift is not None:
        shift = shift.reshape(-1, shift.shape[-1])
    flat = q.reshape(-1, *q.shape[-2:])
    common: dict[str, Any] = dict(
        k_spec=k_spec,
        v_spec=v_spec,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        soft_cap=soft_cap,
        shift=shift if soft_cap is not None else None,
    )
    parts = [
        attention_xla.partial_attention(flat, k_pages, v_pages, queries, keys=some, **common)
        for some in keys
    ]
    if stored is not None:
        assert layer is not None
        common |= dict(kv_heads=k_pages.data[0].shape[1], block_size=k_pages.block_size)
        parts += [
            attention_stored.partial_attention(flat, stored, layer, queries, keys=some, **common)
            for some in keys
        ]
    if exact is not None:
        parts.append(
            exact_attention(
                flat,
                exact,
                queries,
                scale=scale,
                soft_cap=soft_cap,
                shift=common["shift"],
                window=keys[0].window,
                keep_first=keep_first,
            )
        )
    # A soft cap bends shifted scores; without one the shift comes out of the sum.
    outside = None if soft_cap is not None else shift
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    out, lse = merge_partials(parts, sinks, outside)
    lead = q.shape[:-1]
    return out.astype(q.dtype).reshape(*lead, v_spec.head_dim), lse.reshape(lead)


def _attend_pallas_gpu(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    plan: StepPlan,
    exact: ExactLayer | None,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    scale: ArrayLike,
    window: int | None,
    soft_cap: ArrayLike | None,
    sinks: jax.Array | None,
    shift: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The GPU kernel, between the two rotations; exact tokens are merged by XLA."""
    import pallas_kernels

    rows, factor = rotate(q, k_spec), jnp.float32(scale)
    if not isinstance(scale, (int, float)):
        # The kernel's own factor is static; one that is an array goes into the queries.
        rows, scale = rows * scale, 1.0
    if soft_cap is not None and not isinstance(soft_cap, (int, float)):
        raise NotImplementedError("soft_cap: 'pallas_gpu' takes a Python number, got an array")
    if soft_cap is not None and shift is not None:
        raise NotImplementedError(
            "soft_cap: 'pallas_gpu' cannot cap the scores of centered keys; use "
            "implementation='xla', or a calibration without key means"
        )
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    is_whole = shift is None and exact is None
    left_out = None
    if exact is not None:
        # The kernel leaves out all of the first tokens or none.
        holds_first = exact.first_from == 0
        exact = dataclasses.replace(exact, first_from=jnp.where(holds_first, 0, exact.first))
        first = jnp.where(holds_first, exact.first, 0)
        left_out = pallas_kernels.LeftOut(first, exact.recent_from, exact.recent)
    out, lse = pallas_kernels.paged_attention(
        rows,
        k_pages,
        v_pages,
        plan.block_tables,
        plan.starts,
        plan.new_tokens,
        k_spec=k_spec,
        v_spec=v_spec,
        scale=float(scale),
        k_scale=k_scale,
        v_scale=v_scale,
        offsets=plan.offsets if plan.is_packed else None,
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=sinks if is_whole else None,
        left_out=left_out,
    )
    out = unrotate(out, v_spec)
    if not is_whole:
        parts = [(out.astype(jnp.float32), lse)]
        if exact is not None:
            cap = None if soft_cap is None else jnp.float32(soft_cap)
            part = exact_attention(
                q.reshape(-1, *q.shape[-2:]),
                exact,
                _queries(plan),
                scale=factor,
                soft_cap=cap,
                window=window,
            )
            parts.append((part[0].reshape(out.shape), part[1].reshape(lse.shape)))
        out, lse = merge_partials(parts, sinks, shift)
    return out.astype(q.dtype), lse


def _chosen(name: str | None) -> str:
    if name not in (None, "xla", "pallas_gpu"):
        raise ValueError(f"implementation: got {name!r}, expected 'xla', 'pallas_gpu' or None")
    return name or "xla"


def _layer_scale(scale: jax.Array | None, spec: SideSpec) -> jax.Array | None:
    """The layer's scale where the format has one."""
    return scale if spec.format.has_layer_scale else None


def _scalar(name: str, value: ArrayLike) -> jax.Array:
    if isinstance(value, (int, float)) and (value <= 0 or value != value):
        raise ValueError(f"{name}: got {value}, expected a positive number")
    array = jnp.asarray(value)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}, expected a real scalar")
    return array.astype(jnp.float32)


def _check_queries(q: jax.Array, k_pages: Pages, plan: StepPlan, spec: SideSpec) -> None:
    if not hasattr(q, "dtype") or not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"q: got {getattr(q, 'dtype', type(q).__name__)}, expected a float array")
    expected = (*plan.token_shape, "q_heads", spec.head_dim)
    if q.ndim != len(expected) or q.shape[:-2] != plan.token_shape or q.shape[-1] != spec.head_dim:
        layout = "packed" if plan.is_packed else "padded"
        shape = ", ".join(map(str, expected))
        raise ValueError(f"q: got shape {list(q.shape)}, expected [{shape}] for this {layout} plan")
    kv_heads = k_pages.data[0].shape[1]
    if q.shape[-2] == 0 or q.shape[-2] % kv_heads:
        raise ValueError(
            f"q: got {q.shape[-2]} query heads, expected a multiple of the {kv_heads} KV heads"
        )


def _check_pages(name: str, pages: Pages, k_pages: Pages, spec: SideSpec) -> None:
    blocks, heads, block_size = k_pages.data[0].shape[:3]
    expected = pages_shapes(blocks, heads, block_size, spec)
    got = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pages)
    if jax.tree.leaves(got) != jax.tree.leaves(expected):
        raise ValueError(f"{name}: got {got}, expected {expected} for format {spec.format}")


def _check_options(window: Any, sinks: Any, q_heads: int) -> None:
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window: got {window!r}, expected a static int or None")
        if window < 1:
            raise ValueError(f"window: got {window}, expected at least 1")
    if sinks is not None:
        if not hasattr(sinks, "dtype") or not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise TypeError(f"sinks: got {sinks!r}, expected a float array [{q_heads}]")
        if sinks.shape != (q_heads,):
            raise ValueError(f"sinks: got shape {list(sinks.shape)}, expected [{q_heads}]")
