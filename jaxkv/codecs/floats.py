"""Small floats by integer arithmetic: E4M3 ("fn") and E2M1.

XLA converts whole arrays when a float8 array is touched on a CPU, and its cast to E4M3 does not
saturate; bytes and integer rounding avoid both (OCP 8-bit Floating Point Specification v1.0).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

E4M3_MAX = np.float32(448.0)
E4M3_MAX_BYTE = 0x7E
E4M3_NAN = 0x7F

_MIN_NORMAL = np.float32(2.0**-6)
_STEPS_PER_SUBNORMAL = np.float32(2.0**9)


def to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds to the nearest E4M3 number, ties to even, saturating at 448.

    Args:
      x: f32 [...]; NaN becomes NaN.

    Returns:
      uint8 [...], the E4M3 bytes.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = (bits >> 24) & 0x80
    magnitude = jnp.minimum(jnp.abs(x), E4M3_MAX)
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - np.uint32((127 - 7) << 3)
    subnormal = jnp.rint(magnitude * _STEPS_PER_SUBNORMAL).astype(jnp.uint32)
    code = jnp.where(magnitude < _MIN_NORMAL, subnormal, normal)
    code = jnp.where(jnp.isnan(x), E4M3_NAN, code)
    return (code | sign).astype(jnp.uint8)


def from_e4m3(byte: jax.Array) -> jax.Array:
    """E4M3 bytes, uint8 [...], as f32 [...]; 0x7F and 0xFF are NaN."""
    byte = byte.astype(jnp.uint32)
    magnitude = byte & 0x7F
    normal = jax.lax.bitcast_convert_type(
        (magnitude << 20) + np.uint32((127 - 7) << 23), jnp.float32
    )
    subnormal = magnitude.astype(jnp.float32) * np.float32(2.0**-9)
    value = jnp.where(magnitude < 8, subnormal, normal)
    value = jnp.where(magnitude == E4M3_NAN, jnp.float32(jnp.nan), value)
    return jnp.where(byte >= 0x80, -value, value)


def to_e2m1(x: jax.Array) -> jax.Array:
    """Rounds to the nearest E2M1 number, ties to even, saturating at 6; the sign is copied.

    Args:
      x: f32 [...], no NaN.

    Returns:
      uint8 [...], codes 0 to 15.
    """
    a = jnp.abs(x)
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    code = sum(c.astype(jnp.uint8) for c in above)
    return jnp.where(jnp.signbit(x), code | 8, code)


def from_e2m1(code: jax.Array) -> jax.Array:
    """E2M1 codes, uint8 [...] 0 to 15, as f32 [...]."""
    code = code.astype(jnp.uint32)
    magnitude = code & 7
    normal = jax.lax.bitcast_convert_type((magnitude << 22) + np.uint32(126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * np.float32(0.5), normal)
    return jnp.where(code >= 8, -value, value)
