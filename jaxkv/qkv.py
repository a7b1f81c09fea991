"""Rotary position embeddings and RMS normalisation, as pure functions over arrays."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

RopeStyle = Literal["none", "half", "interleaved"]
ROPE_STYLES: tuple[RopeStyle, ...] = ("none", "half", "interleaved")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the length it was trained on.

    With `factor` alone every frequency is divided by it (linear scaling). With
    `original_max_positions` the rule of Llama 3.1 applies: wavelengths above
    `original_max_positions / low_frequency_factor` are stretched by `factor`, those below
    `original_max_positions / high_frequency_factor` are kept, and the ones between are blended.
    `divisors` gives one divisor per frequency outright, as GGUF files do.

    Reference: the Llama 3.1 model card and its published `config.json`.
    """

    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"RopeScaling: factor must be positive, got {self.factor}")
        if self.original_max_positions and (
            self.high_frequency_factor <= self.low_frequency_factor
        ):
            raise ValueError(
                "RopeScaling: high_frequency_factor must exceed low_frequency_factor, got "
                f"{self.high_frequency_factor} and {self.low_frequency_factor}"
            )


def rope_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Angle per position of each rotated pair.

    Args:
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the geometric series of wavelengths.
      scaling: optional stretching of the series.

    Returns:
      f32[rotary_dim / 2], radians per position, fastest first.

    Reference: Su et al., RoFormer (2021), https://arxiv.org/abs/2104.09864
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be positive and even, got {rotary_dim}")
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequencies = 1.0 / jnp.float32(theta) ** exponents
    if scaling is None:
        return frequencies
    if scaling.divisors is not None:
        if len(scaling.divisors) != rotary_dim // 2:
            raise ValueError(
                f"RopeScaling: {len(scaling.divisors)} divisors for {rotary_dim // 2} frequencies"
            )
        return frequencies / jnp.asarray(scaling.divisors, jnp.float32)
    stretched = frequencies / scaling.factor
    if scaling.original_max_positions is None:
        return stretched
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * stretched


def rope_angles(
    positions: ArrayLike, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at the given positions.

    Args:
      positions: int32[...], tokens before this one in its sequence.
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the wavelengths.
      scaling: optional stretching of the frequencies.

    Returns:
      (cos, sin), each f32[..., rotary_dim / 2].
    """
    frequencies = rope_frequencies(rotary_dim, theta, scaling)
    angles = jnp.asarray(positions, jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope_tables(
    max_positions: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of all positions from 0 on, for `apply_rope` and `write_qkv`.

    Args:
      max_positions: rows of the tables; the longest sequence they serve.
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the wavelengths.
      scaling: optional stretching of the frequencies.

    Returns:
      (cos, sin), each f32[max_positions, rotary_dim / 2].
    """
    return rope_angles(jnp.arange(max_positions), rotary_dim, theta, scaling)


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array, style: RopeStyle) -> jax.Array:
    """Rotates pairs of a head's first dims by the given angles, in f32.

    Args:
      x: [..., heads, head_dim].
      cos: f32[..., rotary_dim / 2], one row for each token; rotary_dim <= head_dim.
      sin: as cos.
      style: "half" pairs dim i with i + rotary_dim / 2 (Hugging Face Llama), "interleaved" pairs
        2 i with 2 i + 1 (the RoFormer paper, GGUF Llama), "none" returns x.

    Returns:
      As x; dims from rotary_dim on are untouched.
    """
    if style not in ROPE_STYLES:
        raise ValueError(f"rope style must be one of {', '.join(ROPE_STYLES)}, got {style!r}")
    if style == "none":
        return x
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rope: rotary_dim {2 * half} exceeds head_dim {x.shape[-1]}")
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = x[..., : 2 * half].astype(jnp.float32)
    if style == "half":
        a, b = rotated[..., :half], rotated[..., half:]
        pairs = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    pairs = pairs.astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return pairs
    return jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1)


def apply_rope(
    x: jax.Array, positions: jax.Array, cos: jax.Array, sin: jax.Array, style: RopeStyle = "half"
) -> jax.Array:
    """Rotary position embedding of x from precomputed tables.

    Args:
      x: [..., heads, head_dim].
      positions: int32[...]; one that the tables do not reach gives NaN, never a wrong angle.
      cos: f32[max_positions, rotary_dim / 2].
      sin: as cos.
      style: see `rotate_pairs`.

    Returns:
      As x.
    """
    rows = [
        table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        for table in (cos, sin)
    ]
    return rotate_pairs(x, rows[0], rows[1], style)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in f32.

    Args:
      x: [..., n].
      weight: [n].
      eps: added to the mean square.

    Returns:
      As x: x / sqrt(mean(x^2) + eps) * weight.

    Reference: Zhang and Sennrich, Root Mean Square Layer Normalization (2019),
    https://arxiv.org/abs/1910.07467
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * weight.astype(jnp.float32)).astype(x.dtype)
