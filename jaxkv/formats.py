"""Storage formats as data: names, K/V pairs, bits, group sizes, codebooks.

Nothing here touches an array. Adding a format means a row in `FORMATS` and its codec.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Literal

Encoding = Literal["searched", "reference"]
ScaleKind = Literal["none", "layer_f32", "token_f16", "group_bf16", "group_e4m3"]

Rotation = Literal["signs", "hadamard"]

ENCODINGS: tuple[Encoding, ...] = ("searched", "reference")
ROTATIONS: tuple[Rotation, ...] = ("signs", "hadamard")
GROUP_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Reconstruction levels of a codebook format.

    Attributes:
      levels: all levels in ascending order; code i decodes to `levels[i] / divisor * scale`.
      bounds: `len(levels) - 1` decision bounds, ascending, in the units of `levels`; a value on
        a bound takes the upper code.
      divisor: what the levels are divided by. The searched encoding keeps its levels exact in
        E4M3 and folds the divisor into other factors; the reference encoding has 1.
      probes: the offsets from the first scale byte that an encoder tries, in order. Empty: the
        scale follows from the norm instead.
    """

    levels: tuple[float, ...]
    bounds: tuple[float, ...]
    divisor: float = 1.0
    probes: tuple[int, ...] = ()

    @property
    def top(self) -> float:
        """The largest level."""
        return self.levels[-1]


def _symmetric(positive: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(-x for x in reversed(positive)) + positive


def _reference(positive: tuple[float, ...], bounds: tuple[float, ...]) -> Codebook:
    return Codebook(_symmetric(positive), tuple(-x for x in reversed(bounds)) + (0.0,) + bounds)


def _searched(positive: tuple[float, ...], divisor: float, probes: tuple[int, ...]) -> Codebook:
    levels = _symmetric(positive)
    bounds = tuple((a + b) / 2 for a, b in itertools.pairwise(levels))
    return Codebook(levels, bounds, divisor, probes)


# Lloyd-Max quantizers of N(0, 1) (Max, "Quantizing for minimum distortion", 1960).
_CODEBOOKS: dict[tuple[int, Encoding], Codebook] = {
    (4, "reference"): _reference(
        (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
        (0.2582, 0.5224, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
    ),
    (3, "reference"): _reference((0.2451, 0.7560, 1.3440, 2.1520), (0.501, 1.050, 1.748)),
    (2, "reference"): _reference((0.4528, 1.5104), (0.9816,)),
    (4, "searched"): _searched((1.125, 3.25, 5.5, 8, 11, 14, 18, 22), 8.4, (1, 0, -1)),
    (3, "searched"): _searched((3.75, 12, 22, 36), 15.8, (0, -1, -2)),
    (2, "searched"): _searched((5, 18), 11.3, (-1, -3, -5)),
}

# E2M1 magnitudes in code order (OCP Microscaling Formats specification v1.0); code | 8 negates.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Multipliers of amax / 6 that the searched nvfp4 encoding tries, in order.
NVFP4_PROBES = (1.0, 0.667, 0.75, 0.85, 1.15, 1.5)


@dataclasses.dataclass(frozen=True)
class StorageFormat:
    """How one side (K or V) of a cache is stored.

    Attributes:
      name: the format's name.
      bits: bits of one stored code.
      scale: what scales come with the codes.
      is_rotated: whether a Hadamard rotation is applied before encoding.
      summary: one line for people who choose a format.
    """

    name: str
    bits: int
    scale: ScaleKind
    is_rotated: bool
    summary: str

    def __str__(self) -> str:
        return self.name

    @property
    def group_size(self) -> int | None:
        """Elements that share one scale, or None where there are no groups."""
        return GROUP_SIZE if self.scale in ("group_bf16", "group_e4m3") else None

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element with group scales, without per-row and per-layer scales."""
        return self.bits + {"group_bf16": 1.0, "group_e4m3": 0.5}.get(self.scale, 0.0)

    @property
    def has_layer_scale(self) -> bool:
        """Whether all codes of a layer's side share one f32 scale (fp8)."""
        return self.scale == "layer_f32"

    @property
    def is_codebook(self) -> bool:
        """Whether codes index Lloyd-Max levels (turbo4, turbo3, turbo2)."""
        return self.is_rotated and self.bits < 8

    @property
    def has_encodings(self) -> bool:
        """Whether `encoding=` changes what is stored."""
        return self.scale == "group_e4m3"

    def codebook(self, encoding: Encoding) -> Codebook:
        """The levels and bounds of a codebook format under an encoding."""
        if not self.is_codebook:
            raise ValueError(f"format {self.name!r} has no codebook")
        return _CODEBOOKS[self.bits, encoding]

    def data_bytes(self, elements: int) -> int:
        """Bytes of the codes of `elements` elements."""
        return elements * self.bits // 8

    def scale_bytes(self, elements: int, head_dim: int) -> int:
        """Bytes of the scales that are stored with `elements` elements in rows of `head_dim`."""
        per_scale = {
            "token_f16": (2, head_dim),
            "group_bf16": (2, GROUP_SIZE),
            "group_e4m3": (1, GROUP_SIZE),
        }
        size, share = per_scale.get(self.scale, (0, 1))
        return elements // share * size


FORMATS: dict[str, StorageFormat] = {
    f.name: f
    for f in (
        StorageFormat("bf16", 16, "none", False, "exact for bf16 models; the yardstick"),
        StorageFormat("f16", 16, "none", False, "finer than bf16, values beyond 65504 saturate"),
        StorageFormat("int8", 8, "token_f16", False, "8 bits, a scale per token and head"),
        StorageFormat("fp8", 8, "layer_f32", False, "8 bits, one scale per layer; cheapest"),
        StorageFormat("nvfp4", 4, "group_e4m3", False, "4.5 bits, E2M1 codes, no rotation"),
        StorageFormat("turbo8", 8, "group_bf16", True, "9 bits, rotated, near lossless"),
        StorageFormat("turbo4", 4, "group_e4m3", True, "4.5 bits, rotated codebook"),
        StorageFormat("turbo3", 3, "group_e4m3", True, "3.5 bits, best for V or with exact tokens"),
        StorageFormat("turbo2", 2, "group_e4m3", True, "2.5 bits, V only or with exact tokens"),
    )
}

_NAMED_PAIRS: dict[str, tuple[str, str]] = {
    "turbo4k_turbo3v": ("turbo4", "turbo3"),
    "turbo4k_turbo8v": ("turbo4", "turbo8"),
    "turbo3k_turbo8v": ("turbo3", "turbo8"),
    "bf16k_turbo4v": ("bf16", "turbo4"),
    "bf16k_turbo3v": ("bf16", "turbo3"),
    "bf16k_turbo2v": ("bf16", "turbo2"),
    "fp8k_turbo4v": ("fp8", "turbo4"),
    "fp8k_turbo3v": ("fp8", "turbo3"),
    "fp8k_turbo2v": ("fp8", "turbo2"),
}
PAIR_NAMES: tuple[str, ...] = tuple(_NAMED_PAIRS)
# fp8k_turbo4v is also written fp8k4v.
ALIASES: dict[str, str] = {re.sub(r"_turbo(\d)v$", r"\1v", n): n for n in PAIR_NAMES}


@dataclasses.dataclass(frozen=True)
class Format:
    """The storage formats of both sides of a cache.

    Attributes:
      k: format of the keys.
      v: format of the values.
    """

    k: StorageFormat
    v: StorageFormat

    @classmethod
    def parse(cls, name: str | Format) -> Format:
        """Reads a format name.

        Args:
          name: a symmetric name ("turbo4"), a pair ("fp8k_turbo4v", any `<fmt>k_<fmt>v`), an
            alias ("fp8k4v"), or a `Format`, which is returned as it is.

        Raises:
          TypeError: name is neither a string nor a Format.
          ValueError: the name is unknown; the message lists what is accepted.
        """
        if isinstance(name, Format):
            return name
        if not isinstance(name, str):
            raise TypeError(f"format: expected a name or a jaxkv.Format, got {name!r}")
        return _parse(name)

    def __str__(self) -> str:
        return f"{self.k}k_{self.v}v" if self.is_asymmetric else str(self.k)

    @property
    def is_asymmetric(self) -> bool:
        """Whether keys and values are stored in different formats."""
        return self.k != self.v

    @property
    def bits_per_element(self) -> float:
        """Mean of both sides at equal head_dim."""
        return (self.k.bits_per_element + self.v.bits_per_element) / 2


@functools.cache
def _parse(name: str) -> Format:
    full = ALIASES.get(name, name)
    if full in FORMATS:
        return Format(FORMATS[full], FORMATS[full])
    pair = re.fullmatch(r"([a-z0-9]+)k_([a-z0-9]+)v", full)
    if pair and pair[1] in FORMATS and pair[2] in FORMATS:
        return Format(FORMATS[pair[1]], FORMATS[pair[2]])
    raise ValueError(
        f"format: unknown name {name!r}; expected one of {', '.join(FORMATS)}; a pair "
        f"{', '.join(PAIR_NAMES)}; an alias {', '.join(ALIASES)}; or any <format>k_<format>v"
    )


@dataclasses.dataclass(frozen=True)
class SideSpec:
    """Everything static that encodes and decodes one side (K or V) of a layer.

    Attributes:
      format: the storage format.
      head_dim: elements of one head.
      encoding: "searched" or "reference".
      rotation: "signs", "hadamard", or "none" (always "none" where the format is not rotated).
    """

    format: StorageFormat
    head_dim: int
    encoding: Encoding = "searched"
    rotation: Literal["signs", "hadamard", "none"] = "signs"

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % GROUP_SIZE:
            raise ValueError(
                f"head_dim: got {self.head_dim}, expected a positive multiple of {GROUP_SIZE} "
                "(scale groups never cross a head)"
            )
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding: got {self.encoding!r}, expected one of {ENCODINGS}")
        if self.rotation not in (*ROTATIONS, "none"):
            raise ValueError(f"rotation: got {self.rotation!r}, expected one of {ROTATIONS}")
        if not self.format.is_rotated:
            object.__setattr__(self, "rotation", "none")

    @property
    def num_groups(self) -> int:
        """Scale groups of one head of one token."""
        return self.head_dim // GROUP_SIZE

    @property
    def codebook(self) -> Codebook:
        """The codebook under this encoding (codebook formats only)."""
        return self.format.codebook(self.encoding)


def format_names() -> tuple[str, ...]:
    """Every symmetric name and named pair, in documentation order."""
    return (*FORMATS, *PAIR_NAMES)
