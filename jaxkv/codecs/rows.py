"""Encode and decode rows: one head of one token each. The numeric truth of every format.

A row goes in as f32 values in the stored basis (rotated already where the format is rotated) and
comes out as the words and scales that pages hold. Kernels are tested against these functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.codecs import floats, packing, rotation
from jaxkv.formats import GROUP_SIZE, NVFP4_PROBES, SideSpec

F16_MAX = np.float32(65504.0)
F16_OVERFLOW = np.float32(65520.0)
F16_TINY = np.float32(2.0**-24)
INT8_MAX = np.float32(127.0)
TURBO8_MIN_SCALE = np.float32(1e-12)
# An fp8 value this far beyond the largest one is lost to more than rounding.
FP8_SATURATED = np.float32(448.0 * (1 + 2.0**-4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Rows in the form in which pages store them.

    Attributes:
      data: planes of codes, each [..., words]: native floats for bf16 and f16, uint8 for 8-bit
        codes, planar words for the rest.
      scales: u32 [..., head_dim / 64] (four E4M3 bytes a word) or uint8 [..., head_dim / 16] for
        4, 3 and 2 bits; bf16 [..., head_dim / 16] for turbo8; f16 [...] for int8; else None.
      layer_scale: f32 scalar for fp8, else None.
      spec: what these rows are.
    """

    data: tuple[jax.Array, ...]
    scales: jax.Array | None
    layer_scale: jax.Array | None
    spec: SideSpec = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Audit:
    """What encoding did to each row: int32 [...] counts.

    Attributes:
      saturated: elements (fp8, f16) or scales beyond what the format holds.
      flushed: groups of nonzero values whose scale rounded to zero.
      non_finite: 1 where the row had a NaN or an infinity.
    """

    saturated: jax.Array
    flushed: jax.Array
    non_finite: jax.Array


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Codes and scales before packing, with the counts of `Audit`."""

    codes: jax.Array
    scales: jax.Array | None
    saturated: jax.Array
    flushed: jax.Array


@functools.partial(jax.jit, static_argnames="spec")
def encode_rows(
    x: jax.Array, spec: SideSpec, layer_scale: jax.Array | None = None
) -> tuple[Encoded, Audit]:
    """Rotates (where the side is rotated), scales, encodes and packs rows.

    Args:
      x: [..., head_dim], any float dtype.
      spec: the side.
      layer_scale: f32 scalar, fp8 only; None means 1.

    Returns:
      The rows, and the counts of what did not fit.
    """
    x = x.astype(jnp.float32)
    bad = ~jnp.isfinite(x)
    if spec.format.is_rotated:
        y = rotation.rotate(x, spec)
        # One bad element reaches the whole head; finite input may overflow in the sums.
        bad = jnp.broadcast_to((bad | ~jnp.isfinite(y)).any(-1, keepdims=True), x.shape)
        x = y
    bad_rows = bad.any(-1)
    stored = _CODECS[spec.format.name].encode(x, bad, spec, layer_scale)
    encoded = Encoded(
        _pack_codes(stored.codes, spec), _pack_scales(stored.scales, spec), layer_scale, spec
    )
    if spec.format.has_layer_scale and layer_scale is None:
        encoded = dataclasses.replace(encoded, layer_scale=jnp.float32(1))
    count = jnp.zeros(bad_rows.shape, jnp.int32)
    return encoded, Audit(
        count + stored.saturated, count + stored.flushed, bad_rows.astype(jnp.int32)
    )


@functools.partial(jax.jit, static_argnames="spec")
def decode_rows(
    data: tuple[jax.Array, ...],
    scales: jax.Array | None,
    spec: SideSpec,
    layer_scale: jax.Array | None = None,
) -> jax.Array:
    """Decodes rows, staying in the stored basis.

    Args:
      data: planes [..., words], as in `Encoded`.
      scales: as in `Encoded`.
      spec: the side.
      layer_scale: f32 scalar, fp8 only; None means 1.

    Returns:
      f32 [..., head_dim].
    """
    codes = unpack_codes(data, spec)
    return _CODECS[spec.format.name].decode(codes, unpack_scales(scales, spec), spec, layer_scale)


def _pack_codes(codes: jax.Array, spec: SideSpec) -> tuple[jax.Array, ...]:
    if spec.format.bits >= 8:
        return (codes,)
    return packing.pack(codes, spec.format.bits)


def unpack_codes(data: tuple[jax.Array, ...], spec: SideSpec) -> jax.Array:
    """Planes [..., words] as one code per element: native floats or uint8 [..., head_dim]."""
    if spec.format.bits >= 8:
        return data[0]
    return packing.unpack(data, spec.format.bits)


def _pack_scales(scales: jax.Array | None, spec: SideSpec) -> jax.Array | None:
    if scales is None or spec.format.scale != "group_e4m3" or spec.head_dim % 64:
        return scales
    return packing.to_words(scales, np.dtype(np.uint32))


def unpack_scales(scales: jax.Array | None, spec: SideSpec) -> jax.Array | None:
    """Stored scales as one scale per group, uint8 or bf16 [..., groups]; others unchanged."""
    if scales is None or spec.format.scale != "group_e4m3" or spec.head_dim % 64:
        return scales
    return packing.to_bytes(scales)


def _grouped(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, GROUP_SIZE)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def _encode_float(dtype: np.dtype) -> Callable[..., _Stored]:
    top = np.float32(jnp.finfo(dtype).max)

    def encode(x: jax.Array, bad: jax.Array, spec: SideSpec, layer_scale: object) -> _Stored:
        del spec, layer_scale
        codes = jnp.where(bad, jnp.nan, jnp.clip(x, -top, top)).astype(dtype)
        overflow = (jnp.abs(x) >= F16_OVERFLOW) & ~bad if dtype == jnp.float16 else bad & False
        return _Stored(codes, None, overflow.sum(-1, dtype=jnp.int32), jnp.int32(0))

    return encode


def _decode_float(codes: jax.Array, scales: object, spec: object, layer_scale: object) -> jax.Array:
    del scales, spec, layer_scale
    return codes.astype(jnp.float32)


def _encode_fp8(
    x: jax.Array, bad: jax.Array, spec: SideSpec, layer_scale: jax.Array | None
) -> _Stored:
    del spec
    ratio = jnp.where(bad, 0, x) / (jnp.float32(1) if layer_scale is None else layer_scale)
    saturated = (jnp.abs(ratio) > FP8_SATURATED).sum(-1, dtype=jnp.int32)
    codes = jnp.where(bad, np.uint8(floats.E4M3_NAN), floats.to_e4m3(ratio))
    return _Stored(codes, None, saturated, jnp.int32(0))


def _decode_fp8(
    codes: jax.Array, scales: object, spec: object, layer_scale: jax.Array | None
) -> jax.Array:
    del scales, spec
    value = floats.from_e4m3(codes)
    return value if layer_scale is None else value * layer_scale


def _encode_int8(x: jax.Array, bad: jax.Array, spec: SideSpec, layer_scale: object) -> _Stored:
    del spec, layer_scale
    bad = bad.any(-1)
    x = jnp.where(bad[..., None], 0, x)
    amax = jnp.abs(x).max(-1)
    raw = amax * np.float32(1 / 127)
    scale = jnp.minimum(raw, F16_MAX).astype(jnp.float16).astype(jnp.float32)
    scale = jnp.where((amax > 0) & (scale == 0), F16_TINY, scale)
    ratio = x / jnp.where(scale == 0, 1, scale)[..., None]
    codes = jnp.clip(jnp.rint(ratio), -INT8_MAX, INT8_MAX).astype(jnp.int8)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    stored = jnp.where(bad, jnp.nan, scale).astype(jnp.float16)
    return _Stored(codes, stored, (scale >= F16_MAX).astype(jnp.int32), jnp.int32(0))


def _decode_int8(
    codes: jax.Array, scales: jax.Array | None, spec: object, layer_scale: object
) -> jax.Array:
    del spec, layer_scale
    assert scales is not None
    value = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    return value * scales.astype(jnp.float32)[..., None]


def _encode_turbo8(x: jax.Array, bad: jax.Array, spec: SideSpec, layer_scale: object) -> _Stored:
    del spec, layer_scale
    bad_group = _grouped(bad).any(-1)
    groups = jnp.where(bad_group[..., None], 0, _grouped(x))
    raw = jnp.maximum(jnp.abs(groups).max(-1) * np.float32(1 / 448), TURBO8_MIN_SCALE)
    scale = raw.astype(jnp.bfloat16)
    codes = floats.to_e4m3(groups / scale.astype(jnp.float32)[..., None])
    stored = jnp.where(bad_group, jnp.bfloat16(jnp.nan), scale)
    return _Stored(_flat(codes), stored, jnp.int32(0), jnp.int32(0))


def _decode_turbo8(
    codes: jax.Array, scales: jax.Array | None, spec: object, layer_scale: object
) -> jax.Array:
    del spec, layer_scale
    assert scales is not None
    value = _grouped(floats.from_e4m3(codes))
    return _flat(value * scales.astype(jnp.float32)[..., None])


def _quantize_codebook(groups: jax.Array, step: jax.Array, spec: SideSpec) -> jax.Array:
    """Codes of groups [..., 16] when one unit of the codebook is `step` [...]."""
    # One broadcast comparison: unrolled, the bounds dominate a step's compile time.
    bounds = np.asarray(spec.codebook.bounds, np.float32)
    above = groups[..., None] >= bounds * step[..., None, None]
    return above.sum(-1, dtype=jnp.int32).astype(jnp.uint8)


def _levels(codes: jax.Array, spec: SideSpec) -> jax.Array:
    """The codebook's level of each code, as f32, in the units of the codebook."""
    levels = np.asarray(spec.codebook.levels, np.float32)
    half = len(levels) // 2
    positive = codes >= half
    rank = jnp.where(positive, codes - half, half - 1 - codes)
    value = jnp.full(codes.shape, levels[half])
    for i in range(1, half):
        value = jnp.where(rank == i, levels[half + i], value)
    return jnp.where(positive, value, -value)


def _unit(byte: jax.Array, spec: SideSpec) -> jax.Array:
    """f32 size of one unit of the codebook under a scale byte."""
    return floats.from_e4m3(byte) * np.float32(1 / spec.codebook.divisor)


def _encode_codebook_reference(groups: jax.Array, spec: SideSpec) -> tuple[jax.Array, ...]:
    """Codes from the amax, then the scale that keeps the group's norm."""
    amax = jnp.abs(groups).max(-1)
    codes = _quantize_codebook(groups, amax * np.float32(1 / spec.codebook.top), spec)
    codes = jnp.where(amax[..., None] == 0, np.uint8(2 ** (spec.format.bits - 1)), codes)
    levels = _levels(codes, spec)
    norm = jnp.sqrt((groups * groups).sum(-1)) / jnp.sqrt((levels * levels).sum(-1))
    scale = floats.to_e4m3(jnp.minimum(norm, floats.E4M3_MAX))
    return codes, scale, scale == floats.E4M3_MAX_BYTE


def _encode_codebook_searched(groups: jax.Array, spec: SideSpec) -> tuple[jax.Array, ...]:
    """The scale byte, of a few near the amax's, with the least squared error."""
    book = spec.codebook
    amax = jnp.abs(groups).max(-1)
    first = floats.to_e4m3(
        jnp.minimum(amax * np.float32(book.divisor / book.top), floats.E4M3_MAX)
    ).astype(jnp.int32)

    # All candidates at once, on a leading axis; argmin takes the first listed of equals.
    offsets = jnp.asarray(book.probes, jnp.int32).reshape(-1, *(1,) * first.ndim)
    bytes_tried = jnp.clip(first + offsets, jnp.minimum(first, 1), floats.E4M3_MAX_BYTE)
    units = _unit(bytes_tried, spec)
    codes_tried = _quantize_codebook(groups, units, spec)
    error = groups - _levels(codes_tried, spec) * units[..., None]
    best = jnp.argmin((error * error).sum(-1), axis=0)
    # A gather here costs more than all the rest to compile.
    is_best = best == jnp.arange(len(book.probes)).reshape(offsets.shape)
    byte = jnp.where(is_best, bytes_tried, 0).max(0)
    codes = jnp.where(is_best[..., None], codes_tried, 0).max(0)
    codes = jnp.where(byte[..., None] == 0, np.uint8(2 ** (spec.format.bits - 1)), codes)
    saturated = (byte == floats.E4M3_MAX_BYTE) | (first == floats.E4M3_MAX_BYTE)
    return codes, byte.astype(jnp.uint8), saturated


def _least_error(attempts: list[tuple[jax.Array, ...]]) -> tuple[jax.Array, jax.Array]:
    """(scale byte, codes) of the attempt with the least error; the first listed wins a tie."""
    best, byte, codes = attempts[0]
    for error, other_byte, other_codes in attempts[1:]:
        better = error < best
        best = jnp.where(better, error, best)
        byte = jnp.where(better, other_byte, byte)
        codes = jnp.where(better[..., None], other_codes, codes)
    return byte, codes


def _encode_nvfp4_groups(groups: jax.Array, spec: SideSpec) -> tuple[jax.Array, ...]:
    raw = jnp.abs(groups).max(-1) * np.float32(1 / 6)

    def attempt(multiplier: float) -> tuple[jax.Array, ...]:
        byte = floats.to_e4m3(jnp.minimum(raw * np.float32(multiplier), floats.E4M3_MAX))
        scale = floats.from_e4m3(byte)[..., None]
        ratio = jnp.where(scale == 0, groups * 0, groups / jnp.where(scale == 0, 1, scale))
        codes = floats.to_e2m1(ratio)
        error = groups - floats.from_e2m1(codes) * scale
        return (error * error).sum(-1), byte, codes

    probes = NVFP4_PROBES if spec.encoding == "searched" else NVFP4_PROBES[:1]
    byte, codes = _least_error([attempt(m) for m in probes])
    first = floats.to_e4m3(jnp.minimum(raw, floats.E4M3_MAX))
    saturated = (byte == floats.E4M3_MAX_BYTE) | (first == floats.E4M3_MAX_BYTE)
    return codes, byte, saturated


def _encode_e4m3_groups(
    x: jax.Array, bad: jax.Array, spec: SideSpec, layer_scale: object
) -> _Stored:
    del layer_scale
    bad_group = _grouped(bad).any(-1)
    # The barriers keep XLA from computing the groups again in every consumer.
    groups = jax.lax.optimization_barrier(jnp.where(bad_group[..., None], 0, _grouped(x)))
    if spec.format.is_codebook:
        searched = spec.encoding == "searched"
        encode = _encode_codebook_searched if searched else _encode_codebook_reference
    else:
        encode = _encode_nvfp4_groups
    codes, byte, saturated = jax.lax.optimization_barrier(encode(groups, spec))
    flushed = (byte == 0) & (groups != 0).any(-1)
    byte = jnp.where(bad_group, np.uint8(floats.E4M3_NAN), byte)
    return _Stored(
        _flat(codes), byte, saturated.sum(-1, dtype=jnp.int32), flushed.sum(-1, dtype=jnp.int32)
    )


def _decode_codebook(
    codes: jax.Array, scales: jax.Array | None, spec: SideSpec, layer_scale: object
) -> jax.Array:
    del layer_scale
    assert scales is not None
    return _flat(_grouped(_levels(codes, spec)) * _unit(scales, spec)[..., None])


def _decode_nvfp4(
    codes: jax.Array, scales: jax.Array | None, spec: SideSpec, layer_scale: object
) -> jax.Array:
    del layer_scale, spec
    assert scales is not None
    return _flat(_grouped(floats.from_e2m1(codes)) * floats.from_e4m3(scales)[..., None])


@dataclasses.dataclass(frozen=True)
class _Codec:
    encode: Callable[..., _Stored]
    decode: Callable[..., jax.Array]


_CODEBOOK = _Codec(_encode_e4m3_groups, _decode_codebook)
_CODECS: dict[str, _Codec] = {
    "bf16": _Codec(_encode_float(jnp.dtype(jnp.bfloat16)), _decode_float),
    "f16": _Codec(_encode_float(jnp.dtype(jnp.float16)), _decode_float),
    "fp8": _Codec(_encode_fp8, _decode_fp8),
    "int8": _Codec(_encode_int8, _decode_int8),
    "turbo8": _Codec(_encode_turbo8, _decode_turbo8),
    "nvfp4": _Codec(_encode_e4m3_groups, _decode_nvfp4),
    "turbo4": _CODEBOOK,
    "turbo3": _CODEBOOK,
    "turbo2": _CODEBOOK,
}
