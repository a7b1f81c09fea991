"""Decoded chunks as operands of matrix products.

A chunk is a run of tokens of one sequence, of all KV heads: data planes [heads, tokens, words] and
scales [heads, tokens] or [heads, groups, tokens]. It decodes to *fields*, arrays whose last axes,
one after the other, make up the head; planar words have one field per code of a byte, so nothing
is concatenated.

An E4M3 number times an E4M3 or E2M1 number has at most 8 significant bits, so most formats decode
exactly to bf16, whose products are fast. A rounding conversion to bf16 is never needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.codecs import Pages, decode_rows, floats, packing
from jaxkv.formats import E2M1_MAGNITUDES, GROUP_SIZE, SideSpec

_bits = jax.lax.bitcast_convert_type

# The bits of an E4M3 number, read as f32, are 2^120 too small. Scales make up for 2^112 of it; more
# would overflow.
_SCALE_LIFT = np.float32(2.0**112)
_LEVEL_FACTOR = 2.0**8


@dataclasses.dataclass(frozen=True)
class Fields:
    """A decoded chunk. True values are `values * token_scale * factor(spec)`.

    Attributes:
      values: arrays [heads, tokens, n], all of `value_dtype(spec)`; their n sum to head_dim.
      token_scale: f32 [heads, tokens], or None for 1.
      bad: bool [heads, tokens], tokens whose scale is NaN and whose values here are finite; None
        where NaN stays in `values`.
    """

    values: tuple[jax.Array, ...]
    token_scale: jax.Array | None = None
    bad: jax.Array | None = None


def value_dtype(spec: SideSpec) -> np.dtype:
    """The dtype that a side's chunks decode to."""
    exact = _decodes_to_e4m3_products(spec) or spec.format.name in ("bf16", "fp8", "int8")
    return jnp.dtype(jnp.bfloat16 if exact else jnp.float32)


def factor(spec: SideSpec) -> float:
    """What all decoded values of a side lack, the layer's fp8 scale aside."""
    if not _decodes_to_e4m3_products(spec):
        return 1.0
    return _LEVEL_FACTOR / (spec.codebook.divisor if spec.format.is_codebook else 1.0)


def _decodes_to_e4m3_products(spec: SideSpec) -> bool:
    form = spec.format
    return form.scale == "group_e4m3" and (not form.is_codebook or spec.encoding == "searched")


def decode(chunk: Pages, spec: SideSpec, *, shield: bool) -> Fields:
    """Decodes a chunk, without the layer's fp8 scale.

    Args:
      chunk: planes [heads, tokens, words] and scales [heads, tokens] or [heads, groups, tokens].
      spec: the side.
      shield: whether a NaN scale becomes 0 and is reported in `bad`, as values need it, or makes
        the decoded values NaN, as suits keys.
    """
    if _decodes_to_e4m3_products(spec):
        return _e4m3_groups(chunk, spec, shield)
    match spec.format.name:
        case "bf16":
            return Fields(chunk.data)
        case "fp8":
            return Fields((_fp8(chunk.data[0]),))
        case "int8":
            return _int8(chunk, shield)
        case _:
            return _rows(chunk, spec, shield)


def _rows(chunk: Pages, spec: SideSpec, shield: bool) -> Fields:
    """What has no exact bf16 form, through the codec: one f32 field."""
    scales, bad = chunk.scales, None
    if scales is not None:
        if shield:
            bad = _any_nan(_group_scales(chunk, spec))
        scales = jnp.swapaxes(scales, -1, -2)
    values = decode_rows(chunk.data, scales, spec)
    if bad is not None:
        values = jnp.where(bad[..., None], 0, values)
    return Fields((values,), bad=bad)


def _int8(chunk: Pages, shield: bool) -> Fields:
    assert chunk.scales is not None
    codes = _bits(chunk.data[0], jnp.int8).astype(jnp.float32)
    scale = chunk.scales.astype(jnp.float32)
    bad = jnp.isnan(scale) if shield else None
    if bad is not None:
        scale = jnp.where(bad, 0, scale)
    return Fields((_top_half(codes),), token_scale=scale, bad=bad)


def _fp8(codes: jax.Array) -> jax.Array:
    """E4M3 bytes as bf16, NaN included."""
    word = codes.astype(jnp.uint32)
    magnitude = word & 0x7F
    value = _bits((magnitude << 20) + np.uint32(120 << 23), jnp.float32)
    # Subnormals came out as 2^-7 * (1 + m / 8).
    value = jnp.where(magnitude < 8, (value - np.float32(2.0**-7)) * 2, value)
    half = _bits(value, jnp.uint32) >> 16
    half = jnp.where(magnitude == floats.E4M3_NAN, np.uint32(0x7FC0), half)
    return _bits((half | ((word & 0x80) << 8)).astype(jnp.uint16), jnp.bfloat16)


def _e4m3_groups(chunk: Pages, spec: SideSpec, shield: bool) -> Fields:
    scales = _group_scales(chunk, spec)
    bad = _any_nan(scales) if shield else None
    if bad is not None:
        scales = jnp.where(jnp.isnan(scales), 0, scales)
    scales = jnp.swapaxes(scales, -1, -2) * _SCALE_LIFT
    codes = _codes(chunk.data, spec)
    level = _codebook_bytes if spec.format.is_codebook else _e2m1_bytes
    fields = [level(field, spec) for field in codes]
    if fields[0].shape[-1] % GROUP_SIZE:
        fields = [jnp.concatenate(fields, -1)]
    values, first = [], 0
    for field in fields:
        last = first + field.shape[-1] // GROUP_SIZE
        # Bytes in one loop and floats in the next: each fills its vectors.
        values.append(_scaled(jax.lax.optimization_barrier(field), scales[..., first:last]))
        first = last
    return Fields(tuple(values), bad=bad)


def _scaled(byte: jax.Array, scales: jax.Array) -> jax.Array:
    """E4M3 bytes [.., n], none subnormal, times lifted scales [.., n / 16], as bf16."""
    word = (_bits(byte, jnp.int8).astype(jnp.int32) << 20) & np.int32(0x87F00000 - (1 << 32))
    value = _bits(word, jnp.float32).reshape(*scales.shape, GROUP_SIZE) * scales[..., None]
    return _top_half(value).reshape(byte.shape)


def _codes(planes: Sequence[jax.Array], spec: SideSpec) -> list[jax.Array]:
    """One uint8 array per code of a byte, in the order of dims; higher bits are not cleared."""
    low = _plane_bytes(planes[0])
    width = packing.PLANES[spec.format.bits][0][0]
    fields = [low >> (k * width) for k in range(8 // width)]
    if spec.format.bits != 3:
        return fields
    # The top bits have half as many bytes: two of their fields stand beside one of the low bits.
    top = _plane_bytes(planes[1])
    return [
        (field & 3) | (jnp.concatenate([top >> (2 * k), top >> (2 * k + 1)], -1) & 1) << 2
        for k, field in enumerate(fields)
    ]


def _plane_bytes(words: jax.Array) -> jax.Array:
    # Without the barrier XLA recomputes the gather and the bitcast in every field.
    return jax.lax.optimization_barrier(packing.to_bytes(words))


def _codebook_bytes(codes: jax.Array, spec: SideSpec) -> jax.Array:
    """E4M3 bytes of the levels of codes; the searched levels are E4M3 numbers."""
    positive = spec.codebook.levels[len(spec.codebook.levels) // 2 :]
    sign = np.uint8(len(positive))
    is_positive = (codes & sign) != 0
    folded = jnp.where(is_positive, codes, ~codes)
    byte = _select(folded, [_e4m3(x) for x in positive])
    return jnp.where(is_positive, byte, byte | np.uint8(0x80))


def _e2m1_bytes(codes: jax.Array, spec: SideSpec) -> jax.Array:
    """E4M3 bytes of E2M1 codes."""
    del spec
    byte = _select(codes, [_e4m3(x) for x in E2M1_MAGNITUDES])
    return byte | ((codes & 8) << 4)


def _select(index: jax.Array, table: Sequence[np.uint8]) -> jax.Array:
    """`table[index]` by a tree of selects over the low bits of `index`."""
    if len(table) == 1:
        return jnp.full(index.shape, table[0])
    half = len(table) // 2
    return jnp.where(
        (index & np.uint8(half)) != 0, _select(index, table[half:]), _select(index, table[:half])
    )


def _e4m3(x: float) -> np.uint8:
    """The byte of a non-negative number that E4M3 holds exactly."""
    byte = np.asarray(x, jnp.float8_e4m3fn)
    assert float(byte) == x
    return np.uint8(byte.view(np.uint8))


def _group_scales(chunk: Pages, spec: SideSpec) -> jax.Array:
    """Scales of a grouped format: f32 [heads, groups, tokens]."""
    scales = chunk.scales
    assert scales is not None
    if spec.format.scale == "group_bf16":
        return scales.astype(jnp.float32)
    if scales.dtype == jnp.uint32:
        heads, words, tokens = scales.shape
        scales = _bits(scales, jnp.uint8).transpose(0, 1, 3, 2).reshape(heads, 4 * words, tokens)
    return floats.from_e4m3(scales)


def _any_nan(scales: jax.Array) -> jax.Array:
    return jnp.isnan(scales).any(-2)


def _top_half(x: jax.Array) -> jax.Array:
    """F32 that bf16 holds exactly, as bf16: XLA's own conversion rounds, slowly."""
    return _bits((_bits(x, jnp.uint32) >> 16).astype(jnp.uint16), jnp.bfloat16)


def split_bf16(x: jax.Array, parts: int) -> jax.Array:
    """Rows of f32 as `parts` bf16 terms that sum to them, one below the other.

    Args:
      x: f32 [.., rows, n].
      parts: 1 (8 significant bits) or 2 (16).

    Returns:
      bf16 [.., parts * rows, n].
    """
    terms, rest = [], x
    for _ in range(parts):
        # Rounds half up in integers. A NaN keeps its top bit, or leaves NaN in the rest.
        bits = (_bits(rest, jnp.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        term = _bits(bits, jnp.float32)
        terms.append(_top_half(term))
        rest = rest - term
    return terms[0] if parts == 1 else jnp.concatenate(terms, -2)


def read_blocks(pages: Pages, ids: jax.Array) -> Pages:
    """Reads blocks as a chunk.

    Args:
      pages: one side of a layer.
      ids: int32 [n], in range.

    Returns:
      Planes [heads, n * block_size, words] and scales [heads, (groups,) n * block_size].
    """
    heads = jnp.arange(pages.data[0].shape[1])[:, None]

    def read(leaf: jax.Array) -> jax.Array:
        # Head-major at once: every (head, block) is one contiguous run.
        return leaf.at[ids[None, :], heads].get(mode="clip")

    planes = [read(leaf) for leaf in pages.data]
    data = tuple(x.reshape(x.shape[0], -1, x.shape[-1]) for x in planes)
    if pages.scales is None:
        return Pages(data, None)
    scales = read(pages.scales)
    if scales.ndim == 4:
        scales = scales.swapaxes(1, 2)
        return Pages(data, scales.reshape(*scales.shape[:2], -1))
    return Pages(data, scales.reshape(scales.shape[0], -1))
