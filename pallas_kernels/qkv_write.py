"""The fused layer entry on a GPU: split, RMSNorm, RoPE, encode and write in one kernel.

A program takes a tile of tokens of one query, key or value head out of the fused projection.
Queries come back normalised and rotated; keys go on to be encoded without leaving f32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.codecs import Audit, Pages
from jaxkv.formats import GROUP_SIZE, SideSpec
from pallas_kernels._compat import plgpu, store
from pallas_kernels.paged_write import (
    WriteTuning,
    check_slots,
    compiler_params,
    default_tuning,
    freeze_pages,
    layer_scale,
    make_sides,
    padded_tokens,
    split_refs,
    write_unsupported_reasons,
)
from pallas_kernels.write import tiles
from pallas_kernels.write.prologue import Prologue, RopeStyle
from pallas_kernels.write.rotation import PADDED_GROUP
from pallas_kernels.write.side import Side, own_scratch, scratch_types, unpack_audit
from pallas_kernels.write.tiles import GROUPS_PER_WORD

_WORD = GROUP_SIZE * GROUPS_PER_WORD


def qkv_unsupported_reasons(
    k_spec: SideSpec,
    v_spec: SideSpec,
    *,
    block_size: int,
    dtype: Any = jnp.bfloat16,
    rope_style: RopeStyle = "none",
    rotary_dim: int = 0,
) -> list[str]:
    """Why the fused kernel cannot serve; empty where it can.

    Args:
      k_spec: the keys' side.
      v_spec: the values' side.
      block_size: tokens of a block.
      dtype: of the projection.
      rope_style: how dims are paired.
      rotary_dim: how many of a head's dims are rotated.
    """
    reasons = write_unsupported_reasons(k_spec, v_spec, block_size=block_size, dtype=dtype)
    if rope_style == "half" and rotary_dim % (2 * GROUP_SIZE):
        reasons.append(
            f"rotary_dim: got {rotary_dim}, the kernel takes multiples of {2 * GROUP_SIZE} "
            "with rope_style 'half'"
        )
    return reasons


def paged_qkv_write(
    qkv: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    slots: jax.Array,
    *,
    num_q_heads: int,
    k_spec: SideSpec,
    v_spec: SideSpec,
    rope_style: RopeStyle = "none",
    angles: tuple[jax.Array, jax.Array] | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tuning: WriteTuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, Pages, Pages, tuple[Audit, Audit]]:
    """Splits a fused projection, normalises and rotates, and writes keys and values.

    Args:
      qkv: [N, q_heads * head_dim + heads * (head_dim + v_head_dim)] rows [q | k | v], bf16, f16 or
        f32.
      k_pages: the keys' pages.
      v_pages: the values' pages.
      slots: int32 [N], block * block_size + offset; -1 skips the token.
      num_q_heads: query heads.
      k_spec: the keys' side.
      v_spec: the values' side.
      rope_style: "half" pairs dim i with i + rotary_dim / 2, "interleaved" 2 i with 2 i + 1.
      angles: (cos, sin), f32 [N, rotary_dim / 2], the rows of each token's position. They are the
        same for all layers, so gathering them is done once a step, outside.
      q_norm: [head_dim], weight of an RMSNorm of every query head, or None.
      k_norm: likewise for keys.
      eps: epsilon of the norms.
      k_scale: f32 scalar, fp8 keys only; None means 1.
      v_scale: f32 scalar, fp8 values only; None means 1.
      tuning: how to compile; None follows the GPU.
      interpret: `InterpretGPUParams` to run on a CPU, or None.

    Returns:
      q [N, q_heads, head_dim] in qkv's dtype, the pages, and each side's `Audit`, int32 [N, heads].

    Raises:
      NotImplementedError: what `qkv_unsupported_reasons` lists.
      TypeError: slots of another dtype.
      ValueError: shapes that do not belong together.
    """
    rotary_dim = 0 if angles is None else 2 * angles[0].shape[-1]
    reasons = qkv_unsupported_reasons(
        k_spec,
        v_spec,
        block_size=k_pages.block_size,
        dtype=qkv.dtype,
        rope_style=rope_style,
        rotary_dim=rotary_dim,
    )
    if reasons:
        raise NotImplementedError("paged_qkv_write: " + "; ".join(reasons))
    check_slots(slots)
    heads = k_pages.data[0].shape[1]
    width = (num_q_heads + heads) * k_spec.head_dim + heads * v_spec.head_dim
    if qkv.shape != (slots.shape[0], width):
        raise ValueError(f"qkv: got shape {qkv.shape}, expected {(slots.shape[0], width)}")
    if (angles is None) != (rope_style == "none"):
        raise ValueError(f"angles: expected (cos, sin) unless rope_style is 'none'; {rope_style=}")
    q, (k_pages, v_pages), audits = _write_qkv(
        qkv,
        (k_pages, v_pages),
        slots,
        angles,
        (q_norm, k_norm),
        (layer_scale(k_scale), layer_scale(v_scale)),
        specs=(k_spec, v_spec),
        num_q_heads=num_q_heads,
        rope_style=rope_style,
        eps=eps,
        tuning=tuning or default_tuning(interpret),
        interpret=interpret,
    )
    return q, k_pages, v_pages, audits


@functools.partial(
    jax.jit,
    static_argnames=("specs", "num_q_heads", "rope_style", "eps", "tuning", "interpret"),
)
def _write_qkv(
    qkv: jax.Array,
    pages: tuple[Pages, Pages],
    slots: jax.Array,
    angles: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array | None, jax.Array | None],
    scales: tuple[jax.Array, jax.Array],
    *,
    specs: tuple[SideSpec, SideSpec],
    num_q_heads: int,
    rope_style: RopeStyle,
    eps: float,
    tuning: WriteTuning,
    interpret: Any,
) -> tuple[jax.Array, tuple[Pages, ...], tuple[Audit, ...]]:
    k_side, v_side = sides = make_sides(specs, pages, tuning, interpret)
    count, heads = qkv.shape[0], pages[0].data[0].shape[1]
    padded = padded_tokens(count, sides)
    rotary_dim = 0 if angles is None else 2 * angles[0].shape[-1]
    prologue = Prologue(k_side.tile, rope_style, rotary_dim, eps)
    refs = [[jax.new_ref(a) for a in side.view(p)] for side, p in zip(sides, pages)]
    weights = [w.reshape(k_side.tile.shape[1:]) for w in norms if w is not None]
    tables = []
    if angles is not None:
        # Dims that are not rotated turn by an angle of zero.
        tables = [_as_angles(a, prologue, padded, rest) for a, rest in zip(angles, (1.0, 0.0))]
    k_words, v_words = k_side.tile.words, v_side.tile.words
    k_tiles, v_tiles = (padded // side.tile.tokens for side in sides)

    def body(*args: Any, **scratch: Any) -> None:
        qkv_ref, slots_ref, weight_refs, angle_refs, scale_refs, page_refs, outputs = split_refs(
            args, (None, None, len(weights), len(tables), 2), refs
        )
        q_ref, *audits = outputs
        q_weight, k_weight = (weight_refs.pop(0) if w is not None else None for w in norms)
        index, head = lax.axis_index("tile"), lax.axis_index("head")

        def load(side: Side, first_word: Any, layout: Any) -> jax.Array:
            tile = side.tile
            at = (pl.ds(index * tile.tokens, tile.tokens), pl.ds(first_word, tile.words))
            return tiles.load(qkv_ref.at[at], layout).astype(jnp.float32)

        def normed(x_head: Any, weight: Any) -> jax.Array:
            x = load(k_side, x_head * k_words, prologue.layout)
            if weight is not None:
                x = prologue.norm(x, weight)
            if angle_refs:
                tokens = pl.ds(index * k_side.tile.tokens, k_side.tile.tokens)
                x = prologue.rope(x, *(a.at[tokens] for a in angle_refs))
            return x

        def write_side(which: int, values: jax.Array, side_head: Any) -> None:
            sides[which].write(
                values,
                index * sides[which].tile.tokens,
                side_head,
                slots_ref,
                scale_refs[which],
                page_refs[which],
                audits[which],
                own_scratch("kv"[which], scratch),
            )

        @pl.when((head < num_q_heads) & (index < k_tiles))
        def _() -> None:
            at = (pl.ds(index * k_side.tile.tokens, k_side.tile.tokens), head)
            store(q_ref.at[at], normed(head, q_weight).astype(q_ref.dtype))

        @pl.when((head >= num_q_heads) & (head < num_q_heads + heads) & (index < k_tiles))
        def _() -> None:
            values = normed(head, k_weight)
            exchange = scratch.get("prologue")
            values = prologue.relayout(values, k_side.input_layout, exchange, k_side.sync)
            write_side(0, values, head - num_q_heads)

        @pl.when((head >= num_q_heads + heads) & (index < v_tiles))
        def _() -> None:
            side_head = head - (num_q_heads + heads)
            first_word = (num_q_heads + heads) * k_words + side_head * v_words
            write_side(1, load(v_side, first_word, v_side.input_layout), side_head)

    scratch = scratch_types({"k": k_side, "v": v_side})
    if prologue.layout != k_side.input_layout:
        scratch["prologue"] = plgpu.SMEM((*k_side.tile.shape[:3], PADDED_GROUP), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((padded, num_q_heads, *k_side.tile.shape[1:]), qkv.dtype),
            *[jax.ShapeDtypeStruct((heads, padded), jnp.int32)] * 2,
        ],
        grid=(max(k_tiles, v_tiles), num_q_heads + 2 * heads),
        grid_names=("tile", "head"),
        scratch_types=scratch,
        compiler_params=compiler_params(tuning),
        **({} if interpret is None else {"interpret": interpret}),
    )
    rows = jnp.pad(qkv, ((0, padded - count), (0, 0)))
    rows = rows.reshape(padded, -1, GROUPS_PER_WORD, GROUP_SIZE)
    slots = jnp.pad(slots, (0, padded - count), constant_values=-1)
    q, *words = kernel(rows, slots, *weights, *tables, *scales, *refs[0], *refs[1])
    audits = tuple(unpack_audit(word[:, :count]) for word in words)
    q = q[:count].reshape(count, num_q_heads, -1)
    return q, freeze_pages(sides, refs, pages), audits


def _as_angles(table: jax.Array, prologue: Prologue, padded: int, rest: float) -> jax.Array:
    """Rows [N, rotary_dim / 2] of cosines or sines, as the kernel loads them."""
    count, width = table.shape
    table = table.astype(jnp.float32)
    if prologue.rope_style == "interleaved":
        missing = prologue.tile.head_dim // 2 - width
        table = jnp.pad(table, ((0, 0), (0, missing)), constant_values=rest)
    table = jnp.pad(table, ((0, padded - count), (0, 0)))
    return table.reshape(padded, *prologue.angle_shape())
