"""Array twins of the lane programs: what interpreted kernels decode tiles with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.formats import GROUP_SIZE, SideSpec
from pallas_kernels.dequantize import TURBO8_UNIT, compute_dtype, has_row_scale, levels
from pallas_kernels.register_order import RowOrder

# (low, high) rows of a tile to keep; a low of None is 0.
Bounds = tuple[jax.Array | None, jax.Array]


def decode_tile(
    spec: SideSpec,
    data: tuple[jax.Array, ...],
    scales: jax.Array | None,
    bounds: Bounds | None,
) -> jax.Array:
    """What `dequantize.decode_tile` computes, with array operations.

    Args:
      spec: the side.
      data: planes [64, words].
      scales: [scale rows, 64], or None.
      bounds: rows to keep, as in `dequantize.decode_tile`.

    Returns:
      [64, head_dim] in `compute_dtype`, columns in register order.
    """
    order = RowOrder(spec.format.bits, spec.head_dim)
    dim = order.dim(lax.iota(jnp.int32, spec.head_dim))
    values = _values(spec, order, data, dim)
    if scales is not None and not has_row_scale(spec):
        values = values * _group_scales(spec, scales, dim)
    if bounds is not None and not has_row_scale(spec):
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where(_inside(row, bounds), values, 0)
    return values.astype(compute_dtype(spec))


def row_scales(scales: jax.Array, bounds: Bounds | None) -> jax.Array:
    """f32 [64] from f16 [64]: each token's scale, zero outside the bounds."""
    values = scales.astype(jnp.float32)
    if bounds is None:
        return values
    row = lax.iota(jnp.int32, len(scales))
    return jnp.where(_inside(row, bounds), values, 0)


def _inside(row: jax.Array, bounds: Bounds) -> jax.Array:
    low, high = bounds
    return row < high if low is None else (row >= low) & (row < high)


def _values(
    spec: SideSpec, order: RowOrder, data: tuple[jax.Array, ...], dim: jax.Array
) -> jax.Array:
    bits = spec.format.bits
    if bits == 8:
        raw = jnp.take(data[0], dim, axis=1)
        if spec.format.name == "int8":
            return lax.bitcast_convert_type(raw, jnp.int8).astype(jnp.float32)
        value = lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(jnp.float32)
        return value / np.float32(TURBO8_UNIT) if spec.format.name == "turbo8" else value
    code = _field(data[0], dim, order.row_bytes, 2 if bits == 3 else bits)
    if bits == 3:
        code |= _field(data[1], dim, order.row_bytes // 2, 1) << 2
    value = jnp.zeros(code.shape, jnp.float32)
    for index, level in enumerate(levels(spec)):
        rounded = np.float32(level.astype(np.float16))
        value = jnp.where(code == index, rounded, value)
    return value


def _field(plane: jax.Array, dim: jax.Array, row_bytes: int, bits: int) -> jax.Array:
    """Field `dim // row_bytes` of byte `dim % row_bytes` of each row."""
    itemsize = plane.dtype.itemsize
    byte, field = dim % row_bytes, dim // row_bytes
    words = jnp.take(plane, byte // itemsize, axis=1).astype(jnp.uint32)
    shift = (byte % itemsize * 8 + field * bits).astype(jnp.uint32)
    return (words >> shift[None, :]) & np.uint32(2**bits - 1)


def _group_scales(spec: SideSpec, scales: jax.Array, dim: jax.Array) -> jax.Array:
    group = dim // GROUP_SIZE
    if spec.format.scale == "group_bf16":
        return jnp.take(scales, group, axis=0).T.astype(jnp.float32)
    words = jnp.take(scales, group // 4, axis=0).T
    shift = (group % 4 * 8).astype(jnp.uint32)
    byte = ((words >> shift[None, :]) & 255).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32)
