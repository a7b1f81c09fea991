"""Chunks of a cache, decoded to operands of matrix products.

A chunk is a run of tokens of one sequence, of all KV heads: data planes [heads, tokens, words] and
scales [heads, tokens] or [heads, groups, tokens]. An E4M3 number times an E4M3 or E2M1 number has
at most 8 significant bits, so most formats decode exactly to bf16, whose products are fast, and no
rounding conversion is needed.

XLA's CPU backend compiles each fusion to a loop nest over the shape of its result. So arrays keep
shapes whose innermost axis is contiguous in every operand, and barriers part loops over bytes from
loops over floats: each fills its vectors.
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
_barrier = jax.lax.optimization_barrier

# Sign, exponent and significand of an E4M3 byte that was sign-extended and shifted by 20. Read as
# f32, that is 2^120 too small; scales make up for 2^112 of it, more would overflow.
_E4M3_IN_F32 = np.uint32(0x87F00000).view(np.int32)
_SCALE_LIFT = np.float32(2.0**112)
_LEVEL_FACTOR = 2.0**8
# Bytes of a vector that XLA fills at a time on a CPU; shorter loops run one byte at a time.
_VECTOR_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A decoded chunk. True values are `values * token_scale * factor(spec)`.

    Attributes:
      values: [heads, tokens, head_dim] of `value_dtype(spec)`.
      token_scale: f32 [heads, tokens], or None for 1.
      bad: bool [heads, tokens], tokens whose scale is NaN and whose values here are finite; None
        where NaN stays in `values`.
    """

    values: jax.Array
    token_scale: jax.Array | None = None
    bad: jax.Array | None = None


def value_dtype(spec: SideSpec) -> np.dtype:
    """The dtype that a side's chunks decode to."""
    exact = _holds_e4m3_products(spec) or spec.format.name in ("bf16", "fp8", "int8")
    return jnp.dtype(jnp.bfloat16 if exact else jnp.float32)


def factor(spec: SideSpec) -> float:
    """What all decoded values of a side lack, the layer's fp8 scale aside."""
    if not _holds_e4m3_products(spec):
        return 1.0
    return _LEVEL_FACTOR / (spec.codebook.divisor if spec.format.is_codebook else 1.0)


def _holds_e4m3_products(spec: SideSpec) -> bool:
    """Whether stored values are products of an E4M3 scale and an E4M3 or E2M1 level."""
    form = spec.format
    return form.scale == "group_e4m3" and (not form.is_codebook or spec.encoding == "searched")


def read_blocks(pages: Pages, ids: jax.Array) -> Pages:
    """Reads blocks as one chunk.

    Args:
      pages: one side of a layer.
      ids: int32 [n], in range.

    Returns:
      The chunk: planes [heads, n * block_size, words], scales [heads, (groups,) n * block_size].
    """
    heads = jnp.arange(pages.data[0].shape[1])[:, None]

    def read(leaf: jax.Array) -> jax.Array:
        # Head-major at once, one head of one block being a contiguous run; flat, as XLA copies
        # along the innermost axis.
        runs = leaf.reshape(*leaf.shape[:2], -1).at[ids[None, :], heads].get(mode="clip")
        return runs.reshape(*runs.shape[:2], *leaf.shape[2:])

    planes = [read(leaf) for leaf in pages.data]
    data = tuple(x.reshape(x.shape[0], -1, x.shape[-1]) for x in planes)
    if pages.scales is None:
        return Pages(data, None)
    scales = read(pages.scales)
    if scales.ndim == 4:
        scales = scales.swapaxes(1, 2)
    return Pages(data, scales.reshape(*scales.shape[:-2], -1))


def read_part(pages: Pages, block: jax.Array, offset: jax.Array, tokens: int) -> Pages:
    """Reads `tokens` tokens of one block as a chunk.

    Args:
      pages: one side of a layer.
      block: int32 scalar, in range.
      offset: int32 scalar, the first token, at most block_size - tokens.
      tokens: how many.

    Returns:
      The chunk: planes [heads, tokens, words], scales [heads, (groups,) tokens].
    """

    def read(leaf: jax.Array, axis: int) -> jax.Array:
        start = [jnp.int32(0)] * leaf.ndim
        start[0], start[axis] = block, offset
        sizes = (1, *leaf.shape[1:axis], tokens, *leaf.shape[axis + 1 :])
        return jax.lax.dynamic_slice(leaf, start, sizes)[0]

    data = tuple(read(plane, 2) for plane in pages.data)
    return Pages(data, None if pages.scales is None else read(pages.scales, pages.scales.ndim - 1))


def decode(chunk: Pages, spec: SideSpec, *, shield: bool) -> Decoded:
    """Decodes a chunk, without the layer's fp8 scale.

    Args:
      chunk: planes [heads, tokens, words] and scales [heads, tokens] or [heads, groups, tokens].
      spec: the side.
      shield: whether a NaN scale becomes 0 and is reported in `bad`, as values need it, or makes
        the decoded values NaN, as suits keys.
    """
    if _holds_e4m3_products(spec):
        return _decode_e4m3_products(chunk, spec, shield)
    match spec.format.name:
        case "bf16":
            return Decoded(chunk.data[0])
        case "fp8":
            return Decoded(_decode_fp8(chunk.data[0]))
        case "int8":
            return _decode_int8(chunk, shield)
        case _:
            return _decode_rows(chunk, spec, shield)


def _decode_rows(chunk: Pages, spec: SideSpec, shield: bool) -> Decoded:
    """What has no exact bf16 form, through the codec, in f32."""
    scales, bad = chunk.scales, None
    if scales is not None:
        if shield:
            is_bf16 = scales.dtype == jnp.bfloat16
            bad = jnp.isnan(scales).any(-2) if is_bf16 else _any_e4m3_nan(scales)
        scales = jnp.swapaxes(scales, -1, -2)
    values = decode_rows(chunk.data, scales, spec)
    if bad is not None:
        values = jnp.where(bad[..., None], 0, values)
    return Decoded(values, bad=bad)


def _decode_int8(chunk: Pages, shield: bool) -> Decoded:
    assert chunk.scales is not None
    codes = _bits(chunk.data[0], jnp.int8).astype(jnp.float32)
    scale = chunk.scales.astype(jnp.float32)
    bad = jnp.isnan(scale) if shield else None
    if bad is not None:
        scale = jnp.where(bad, 0, scale)
    return Decoded(_top_half(codes), scale, bad)


def _decode_fp8(codes: jax.Array) -> jax.Array:
    """E4M3 bytes as bf16, NaN included."""
    word = codes.astype(jnp.uint32)
    magnitude = word & 0x7F
    value = _bits((magnitude << 20) + np.uint32(120 << 23), jnp.float32)
    # Subnormals came out as 2^-7 * (1 + m / 8).
    value = jnp.where(magnitude < 8, (value - np.float32(2.0**-7)) * 2, value)
    half = _bits(value, jnp.uint32) >> 16
    half = jnp.where(magnitude == floats.E4M3_NAN, np.uint32(0x7FC0), half)
    return _bits((half | ((word & 0x80) << 8)).astype(jnp.uint16), jnp.bfloat16)


def _decode_e4m3_products(chunk: Pages, spec: SideSpec, shield: bool) -> Decoded:
    assert chunk.scales is not None
    words = _barrier(jnp.swapaxes(chunk.scales, -1, -2))
    scales = floats.from_e4m3(packing.to_bytes(words) if words.dtype == jnp.uint32 else words)
    bad = None
    if shield:
        bad = _any_e4m3_nan(chunk.scales)
        scales = jnp.where(jnp.isnan(scales), 0, scales)
    scales = _barrier(scales * _SCALE_LIFT)
    byte = _barrier(_level_bytes(chunk.data, spec)).reshape(*scales.shape, GROUP_SIZE)
    word = (_bits(byte, jnp.int8).astype(jnp.int32) << 20) & _E4M3_IN_F32
    values = _top_half(_bits(word, jnp.float32) * scales[..., None])
    return Decoded(values.reshape(*scales.shape[:-1], spec.head_dim), bad=bad)


def _any_e4m3_nan(scales: jax.Array) -> jax.Array:
    """Which tokens have a NaN among scale bytes, or words of them, [heads, n, tokens]."""
    ones = np.array(0x01010101).astype(scales.dtype)
    # Only 0x7F carries into the top bit of its byte.
    carried = ((scales & (ones * np.array(0x7F, scales.dtype))) + ones) & (ones << 7)
    return (carried != 0).any(-2)


def _level_bytes(planes: Sequence[jax.Array], spec: SideSpec) -> jax.Array:
    """E4M3 bytes of the levels of all codes: [heads, tokens, .., bytes], in the order of dims."""
    *bits, top = _code_bits(planes, spec.format.bits)
    if not spec.format.is_codebook:
        byte = _select(bits, [_e4m3(x) for x in E2M1_MAGNITUDES])
        return jnp.where(top, byte | np.uint8(0x80), byte)
    levels = spec.codebook.levels
    # Below the middle codes count down, which is to flip the bits of their rank.
    byte = _select([bit == top for bit in bits], [_e4m3(x) for x in levels[len(levels) // 2 :]])
    return jnp.where(top, byte, byte | np.uint8(0x80))


def _code_bits(planes: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """The bits of all codes, lowest first: bool [heads, tokens, .., run], in the order of dims."""
    (width, _), *_ = packing.PLANES[bits]
    num_bytes = planes[0].shape[-1] * planes[0].dtype.itemsize
    fields = 8 // width
    wide = min(fields, -(-_VECTOR_BYTES // num_bytes))
    wide = 1 << (wide - 1).bit_length()
    found = _plane_bits(planes[0], width, wide)
    if bits == 3:
        # The plane of top bits has half as many bytes: two of its fields face one of the low bits.
        found += _plane_bits(planes[1], 1, 2 * wide)
    return found


def _plane_bits(words: jax.Array, width: int, wide: int) -> list[jax.Array]:
    """The bits of the fields of a plane, bool [heads, tokens, 8 / width / wide, run], lowest first.

    A byte has fields of `width` bits, and a row of bytes is short for a vector. So a run is `wide`
    rows, the n-th of which keeps every field number n modulo `wide`; then one mask for all of the
    run tests a bit, in one vector loop.
    """
    fields = np.arange(8 // width).reshape(-1, wide)
    field_masks = (2**width - 1 << width * fields).sum(0, dtype=np.uint8)
    if wide > 1:
        patterns = np.repeat(field_masks[:, None], words.dtype.itemsize, 1).view(words.dtype)
        words = words[:, :, None] & patterns
    # Without the barrier XLA gathers and shifts again for every bit.
    run = _barrier(packing.to_bytes(words)).reshape(*words.shape[:2], 1, -1)
    lowest = (1 << width * fields).sum(1, dtype=np.uint8)[:, None]
    return [(run & (lowest << bit)) != 0 for bit in range(width)]


def _select(bits: Sequence[jax.Array], table: Sequence[np.uint8]) -> jax.Array:
    """The entry of `table` at the index with these bits, lowest first."""
    *rest, top = bits
    if not rest:
        return jnp.where(top, table[1], table[0])
    half = len(table) // 2
    return jnp.where(top, _select(rest, table[half:]), _select(rest, table[:half]))


def _e4m3(x: float) -> np.uint8:
    """The byte of a non-negative number that E4M3 holds exactly."""
    byte = np.asarray(x, jnp.float8_e4m3fn)
    assert float(byte) == x
    return np.uint8(byte.view(np.uint8))


def _top_half(x: jax.Array) -> jax.Array:
    """F32 that bf16 holds exactly, as bf16: XLA's own conversion rounds, slowly."""
    return _bits((_bits(x, jnp.uint32) >> 16).astype(jnp.uint16), jnp.bfloat16)


def split_bf16(x: jax.Array, parts: int) -> jax.Array:
    """Rows of f32 as bf16 terms that sum to them, one below the other.

    Args:
      x: f32 [.., rows, n].
      parts: 1 (8 significant bits) or 2 (16).

    Returns:
      bf16 [.., parts * rows, n].
    """
    terms, rest = [], x
    for _ in range(parts):
        # Rounds half up in integers, past which no NaN would be safe.
        bits = (_bits(rest, jnp.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        term = jnp.where(jnp.isnan(rest), rest, _bits(bits, jnp.float32))
        terms.append(_top_half(term))
        rest = rest - term
    return terms[0] if parts == 1 else jnp.concatenate(terms, -2)
