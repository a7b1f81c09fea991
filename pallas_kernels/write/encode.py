"""Scaling and encoding of a tile, one thread per group.

The arithmetic is that of `jaxkv.codecs.rows`, step by step: the same products and true divisions,
comparisons x >= bound * step with ties up, and small floats by integer rounding, so that codes
and scales are the codec's bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.formats import E2M1_MAGNITUDES, NVFP4_PROBES, SideSpec
from pallas_kernels._compat import plgpu
from pallas_kernels.write import exact
from pallas_kernels.write.tiles import Tile, bits_of, f32, float_of

E4M3_MAX = f32(448.0)
E4M3_MAX_BYTE = np.uint32(0x7E)
E4M3_NAN = np.uint32(0x7F)
FP8_SATURATED = f32(448.0 * (1 + 2.0**-4))
F16_MAX = f32(65504.0)
F16_OVERFLOW = f32(65520.0)
F16_TINY = f32(2.0**-24)
TURBO8_MIN_SCALE = f32(1e-12)
# E2M1 decision bounds; at every other one a tie goes down, to the even code.
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_TIES_DOWN = (True, False, True, False, True, False, True)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tile's codes and scales, before packing.

    Attributes:
      codes: uint32 of the tile's shape, or native floats (bf16, f16).
      scales: uint32 E4M3 bytes or bf16 [tokens, words, 4]; f16 [tokens]; None.
      saturated: int32 [tokens] counts, or None where the format cannot saturate.
      flushed: int32 [tokens] counts, or None.
    """

    codes: jax.Array
    scales: jax.Array | None
    saturated: jax.Array | None = None
    flushed: jax.Array | None = None


def count(where: jax.Array) -> jax.Array:
    """How many are true in each token: bool [tokens, ...] to int32 [tokens]."""
    total = jnp.where(where, jnp.int32(1), jnp.int32(0))
    for axis in reversed(range(1, total.ndim)):
        total = jnp.sum(total, axis=axis)
    return total


def to_e4m3(magnitude: jax.Array) -> jax.Array:
    """Nonnegative f32, no NaN, to E4M3 bytes in uint32; ties to even, saturating."""
    magnitude = jnp.minimum(magnitude, E4M3_MAX)
    bits = bits_of(magnitude)
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    normal = ((bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
    # At 2^14 one unit in the last place is 2^-9, the step of the subnormals.
    subnormal = bits_of(magnitude + f32(2.0**14)) - bits_of_constant(2.0**14)
    return jnp.where(magnitude < f32(2.0**-6), subnormal, normal)


def bits_of_constant(value: float) -> np.uint32:
    """The bits of a constant as f32."""
    return np.float32(value).view(np.uint32)


def from_e4m3(byte: jax.Array) -> jax.Array:
    """Nonnegative E4M3 bytes below NaN, in uint32, as f32."""
    normal = float_of((byte << np.uint32(20)) + np.uint32(120 << 23))
    subnormal = byte.astype(jnp.int32).astype(jnp.float32) * f32(2.0**-9)
    return jnp.where(byte < np.uint32(8), subnormal, normal)


def _signed_e4m3(ratio: jax.Array) -> jax.Array:
    sign = (bits_of(ratio) >> np.uint32(24)) & np.uint32(0x80)
    return to_e4m3(jnp.abs(ratio)) | sign


def _group_max(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=3)


def _token_max(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.max(_group_max(x), axis=2), axis=1)


def _encode_float(dtype: Any) -> Callable[..., Stored]:
    top = f32(float(jnp.finfo(dtype).max))

    def encode(x: jax.Array, bad: jax.Array, spec: SideSpec, tile: Tile, scale: Any) -> Stored:
        del spec, tile, scale
        clipped = jnp.minimum(jnp.maximum(x, -top), top)
        codes = jnp.where(bad, f32(np.nan), clipped).astype(dtype)
        if dtype != jnp.float16:
            return Stored(codes, None)
        overflow = jnp.where(bad, f32(0), jnp.abs(x)) >= F16_OVERFLOW
        return Stored(codes, None, count(overflow))

    return encode


def _encode_fp8(x: jax.Array, bad: jax.Array, spec: SideSpec, tile: Tile, scale: Any) -> Stored:
    del spec
    ratio = jnp.where(bad, f32(0), x)
    if scale is not None:
        ratio = exact.divide(ratio, tile.spread(scale), tile)
    codes = jnp.where(bad, E4M3_NAN, _signed_e4m3(ratio))
    return Stored(codes, None, count(jnp.abs(ratio) > FP8_SATURATED))


def _encode_int8(x: jax.Array, bad: jax.Array, spec: SideSpec, tile: Tile, scale: Any) -> Stored:
    del spec, scale
    bad_tokens = count(bad) > 0
    x = jnp.where(tile.spread(bad_tokens), f32(0), x)
    amax = _token_max(x)
    step = jnp.minimum(amax * f32(1 / 127), F16_MAX).astype(jnp.float16).astype(jnp.float32)
    step = jnp.where((amax > 0) & (step == 0), F16_TINY, step)
    ratio = exact.divide(x, tile.spread(jnp.where(step == 0, f32(1), step)), tile)
    ratio = lax.round(ratio, lax.RoundingMethod.TO_NEAREST_EVEN)
    codes = jnp.minimum(jnp.maximum(ratio, f32(-127)), f32(127)).astype(jnp.int32)
    codes = lax.bitcast_convert_type(codes, jnp.uint32) & np.uint32(0xFF)
    stored = jnp.where(bad_tokens, f32(np.nan), step).astype(jnp.float16)
    return Stored(codes, stored, count(step >= F16_MAX))


def _encode_turbo8(x: jax.Array, bad: jax.Array, spec: SideSpec, tile: Tile, scale: Any) -> Stored:
    del spec, scale
    x = jnp.where(bad, f32(0), x)
    step = jnp.maximum(_group_max(x) * f32(1 / 448), TURBO8_MIN_SCALE).astype(jnp.bfloat16)
    codes = _signed_e4m3(exact.divide(x, tile.spread(step.astype(jnp.float32)), tile))
    bad_groups = _any_element(bad)
    stored = jnp.where(bad_groups, f32(np.nan), step.astype(jnp.float32)).astype(jnp.bfloat16)
    return Stored(codes, stored)


def _any_element(bad: jax.Array) -> jax.Array:
    """Bool of the tile's shape to bool [tokens, words, 4]."""
    return jnp.max(jnp.where(bad, jnp.int32(1), jnp.int32(0)), axis=3) > 0


@dataclasses.dataclass(frozen=True)
class _Ladder:
    """A quantizer that is symmetric about zero.

    Attributes:
      bounds: positive decision bounds, ascending; 2^k - 1 of them.
      magnitudes: positive levels, one more than the bounds.
      ties_down: bounds at which a tie keeps the lower magnitude.
      signed_ties: a tie goes up on the signed axis, so that negative ties keep the lower one.
    """

    bounds: tuple[float, ...]
    magnitudes: tuple[float, ...]
    ties_down: tuple[bool, ...]
    signed_ties: bool

    @classmethod
    def of(cls, spec: SideSpec) -> _Ladder:
        if not spec.format.is_codebook:
            return cls(E2M1_BOUNDS, E2M1_MAGNITUDES, E2M1_TIES_DOWN, False)
        book = spec.codebook
        half = len(book.levels) // 2
        ties = (False,) * (half - 1)
        return cls(book.bounds[half:], book.levels[half:], ties, True)

    def rank(self, x: jax.Array, unit: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """(rank, level): index of each element's magnitude, and the magnitude in f32.

        Positive floats order as their bits, so ties are moved by one on the integers.
        """
        key = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
        if self.signed_ties:
            key = key - jnp.where(x < 0, jnp.int32(1), jnp.int32(0))
        edges = []
        for bound, down in zip(self.bounds, self.ties_down):
            edge = lax.bitcast_convert_type(unit * f32(bound), jnp.int32)
            edges.append(tile.spread(edge + np.int32(1) if down else edge))
        choice: list[jax.Array] = []
        size = len(self.magnitudes)
        while size > 1:
            # Which edge halves what is left depends on the halves taken so far.
            size //= 2
            candidates = edges[size - 1 :: 2 * size]
            choice.append(key >= _select(choice, candidates))
        ranks = [jnp.full(tile.shape, np.uint32(i)) for i in range(len(self.magnitudes))]
        levels = [jnp.full(tile.shape, f32(level)) for level in self.magnitudes]
        return _select(choice, ranks), _select(choice, levels)


def _select(choice: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """values[the number whose bits, first most significant, are `choice`]."""
    if not choice:
        return values[0]
    half = len(values) // 2
    low = _select(choice[1:], values[:half])
    return jnp.where(choice[0], _select(choice[1:], values[half:]), low)


def _sum_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x, axis=3)


def _least_error(
    x: jax.Array,
    probes: tuple[float, ...],
    probe: Callable[[jax.Array], jax.Array],
    unit_of: Callable[[jax.Array], jax.Array],
    ladder: _Ladder,
    tile: Tile,
) -> jax.Array:
    """The scale byte with the least squared error; the first listed wins a tie.

    A loop, not unrolled: it keeps the registers of one attempt alive instead of those of six.

    Args:
      x: the groups.
      probes: what to try, numbers that `probe` turns into bytes.
      probe: f32 scalar to bytes [tokens, words, 4].
      unit_of: bytes to the size of one unit of the ladder.
      ladder: the quantizer.
      tile: the tile.
    """
    magnitude = jnp.abs(x)

    def attempt(index: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        value = jnp.float32(probes[0])
        for i, other in enumerate(probes[1:], start=1):
            value = jnp.where(index == i, f32(other), value)
        byte = probe(value)
        unit = unit_of(byte)
        _, level = ladder.rank(x, unit, tile)
        error = _sum_squares(magnitude - level * tile.spread(unit))
        # Errors beyond f32 are never less than infinity: the first probe is the start.
        better = error < best[0]
        return jnp.where(better, error, best[0]), jnp.where(better, byte, best[1])

    first = probe(jnp.float32(probes[0]))
    start = plgpu.layout_cast(jnp.full(first.shape, f32(np.inf)), tile.grouped.reduce(3))
    return lax.fori_loop(0, len(probes), attempt, (start, first))[1]


def _codebook_codes(x: jax.Array, rank: jax.Array, empty: jax.Array, half: int) -> jax.Array:
    """Codes from ranks; groups without a scale take the first positive level."""
    signed = jnp.where(x < 0, rank ^ np.uint32(half - 1), rank | np.uint32(half))
    return jnp.where(empty, np.uint32(half), signed)


def _codebook_reference(x: jax.Array, spec: SideSpec, tile: Tile) -> tuple[jax.Array, ...]:
    ladder = _Ladder.of(spec)
    half = len(ladder.magnitudes)
    amax = _group_max(x)
    rank, level = ladder.rank(x, amax * f32(1 / spec.codebook.top), tile)
    empty = tile.spread(amax) == 0
    level = jnp.where(empty, f32(ladder.magnitudes[0]), level)
    norm, level_norm = (exact.sqrt(_sum_squares(a), tile) for a in (x, level))
    byte = to_e4m3(exact.divide(norm, level_norm, tile))
    return _codebook_codes(x, rank, empty, half), byte, byte == E4M3_MAX_BYTE


def _codebook_searched(x: jax.Array, spec: SideSpec, tile: Tile) -> tuple[jax.Array, ...]:
    book, ladder = spec.codebook, _Ladder.of(spec)
    first = to_e4m3(_group_max(x) * f32(book.divisor / book.top))
    low = jnp.minimum(first, np.uint32(1)).astype(jnp.int32)

    def probe(offset: jax.Array) -> jax.Array:
        byte = jnp.maximum(first.astype(jnp.int32) + offset.astype(jnp.int32), low)
        return jnp.minimum(byte, np.int32(E4M3_MAX_BYTE)).astype(jnp.uint32)

    def unit(byte: jax.Array) -> jax.Array:
        return from_e4m3(byte) * f32(1 / book.divisor)

    byte = _least_error(x, book.probes, probe, unit, ladder, tile)
    rank, _ = ladder.rank(x, unit(byte), tile)
    codes = _codebook_codes(x, rank, tile.spread(byte) == 0, len(ladder.magnitudes))
    return codes, byte, (byte == E4M3_MAX_BYTE) | (first == E4M3_MAX_BYTE)


def _nvfp4_codes(x: jax.Array, byte: jax.Array, tile: Tile) -> jax.Array:
    """Nearest-even E2M1 of x / scale; a zero scale leaves the sign alone."""
    scale = from_e4m3(byte)
    divisor = tile.spread(jnp.where(scale == 0, f32(1), scale))
    ratio = exact.divide(jnp.abs(x), divisor, tile)
    ratio = jnp.where(tile.spread(scale) == 0, f32(0), ratio)
    ratio = jnp.minimum(ratio, f32(6.0))
    bits = bits_of(ratio)
    odd = (bits >> np.uint32(22)) & np.uint32(1)
    normal = ((bits + np.uint32(0x1FFFFF) + odd) >> np.uint32(22)) - np.uint32(126 << 1)
    # At 2^22 one unit in the last place is one half.
    subnormal = bits_of(ratio + f32(2.0**22)) - bits_of_constant(2.0**22)
    magnitude = jnp.where(ratio < f32(1.0), subnormal, normal)
    return magnitude | ((bits_of(x) >> np.uint32(28)) & np.uint32(8))


def _nvfp4(x: jax.Array, spec: SideSpec, tile: Tile) -> tuple[jax.Array, ...]:
    raw = _group_max(x) * f32(1 / 6)
    first = to_e4m3(raw)
    byte = first
    if spec.encoding == "searched":
        byte = _least_error(
            x, NVFP4_PROBES, lambda m: to_e4m3(raw * m), from_e4m3, _Ladder.of(spec), tile
        )
    saturated = (byte == E4M3_MAX_BYTE) | (first == E4M3_MAX_BYTE)
    return _nvfp4_codes(x, byte, tile), byte, saturated


def _encode_e4m3_groups(
    x: jax.Array, bad: jax.Array, spec: SideSpec, tile: Tile, scale: Any
) -> Stored:
    del scale
    bad_groups = _any_element(bad)
    x = jnp.where(tile.spread(bad_groups), f32(0), x)
    if not spec.format.is_codebook:
        rule = _nvfp4
    else:
        rule = _codebook_searched if spec.encoding == "searched" else _codebook_reference
    codes, byte, saturated = rule(x, spec, tile)
    flushed = (byte == 0) & (_group_max(x) > 0)
    stored = jnp.where(bad_groups, E4M3_NAN, byte)
    return Stored(codes, stored, count(saturated), count(flushed))


_ENCODERS: dict[str, Callable[..., Stored]] = {
    "bf16": _encode_float(jnp.bfloat16),
    "f16": _encode_float(jnp.float16),
    "fp8": _encode_fp8,
    "int8": _encode_int8,
    "turbo8": _encode_turbo8,
    "nvfp4": _encode_e4m3_groups,
    "turbo4": _encode_e4m3_groups,
    "turbo3": _encode_e4m3_groups,
    "turbo2": _encode_e4m3_groups,
}


def encode(x: jax.Array, spec: SideSpec, tile: Tile, scale: Any) -> tuple[Stored, jax.Array]:
    """Encodes a tile.

    Args:
      x: f32 of the tile's shape in the stored basis, in `tile.grouped`.
      spec: the side.
      tile: the tile.
      scale: f32 scalar, fp8 only.

    Returns:
      What to store, and int32 [tokens] that is nonzero where a token had a NaN or an infinity.
    """
    bad = (bits_of(x) & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000)
    non_finite = count(bad)
    if spec.format.is_rotated:
        bad = tile.spread(non_finite) > 0
    return _ENCODERS[spec.format.name](x, bad, spec, tile, scale), non_finite
