"""Codecs: arrays of heads to stored bytes and back, in plain jnp.

`encode` and `decode` are the public pair; the rest is what caches and kernels build on.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxkv.codecs.pages import (
    Pages,
    copy_blocks,
    copy_tokens,
    decode_pages,
    from_canonical_bytes,
    init_pages,
    pages_shapes,
    rows_of_block,
    scatter_rows,
    to_canonical_bytes,
)
from jaxkv.codecs.rotation import rotate, rotation_factor, rotation_matrix, sign_tables, unrotate
from jaxkv.codecs.rows import Audit, Encoded, decode_rows, encode_rows
from jaxkv.formats import Encoding, Format, Rotation, SideSpec, StorageFormat

__all__ = [
    "Audit",
    "Encoded",
    "Pages",
    "SideSpec",
    "copy_blocks",
    "copy_tokens",
    "decode",
    "decode_pages",
    "decode_rows",
    "encode",
    "encode_rows",
    "from_canonical_bytes",
    "init_pages",
    "pages_shapes",
    "rotate",
    "rotation_factor",
    "rotation_matrix",
    "rows_of_block",
    "scatter_rows",
    "sign_tables",
    "to_bytes",
    "to_canonical_bytes",
    "unrotate",
]


def encode(
    x: jax.Array,
    format: str | StorageFormat,
    *,
    encoding: Encoding = "searched",
    rotate: bool | None = None,
    rotation: Rotation = "signs",
    scale: jax.Array | float | None = None,
) -> Encoded:
    """Encodes heads in a storage format.

    Args:
      x: [..., head_dim], any float dtype; head_dim a multiple of 16.
      format: a symmetric format name or a `StorageFormat`.
      encoding: "searched" (least error) or "reference" (the published amax and norm rules).
      rotate: whether to rotate first; None follows the format. Only rotated formats can.
      rotation: "signs" or "hadamard".
      scale: fp8 only: the layer's scale; None means 1.

    Returns:
      The encoded rows, which know their format.

    Raises:
      ValueError: an unknown format, a pair, a bad head_dim, or `scale`/`rotate` that the format
        does not take.
    """
    if isinstance(format, str):
        parsed = Format.parse(format)
        if parsed.is_asymmetric:
            raise ValueError(f"format: got the pair {format!r}, expected one side's format")
        format = parsed.k
    if rotate and not format.is_rotated:
        raise ValueError(f"rotate: got True, but format {format} is not rotated")
    if scale is not None and not format.has_layer_scale:
        raise ValueError(f"scale: got a scale, but format {format} computes its own")
    spec = SideSpec(format, x.shape[-1], encoding, "none" if rotate is False else rotation)
    layer_scale = None if scale is None else jax.numpy.asarray(scale, jax.numpy.float32)
    return encode_rows(x, spec, layer_scale)[0]


def decode(encoded: Encoded) -> jax.Array:
    """Decodes what `encode` returned, rotation undone: f32 [..., head_dim]."""
    x = decode_rows(encoded.data, encoded.scales, encoded.spec, encoded.layer_scale)
    return unrotate(x, encoded.spec)


def to_bytes(encoded: Encoded) -> tuple[np.ndarray, np.ndarray]:
    """The canonical bytes of encoded rows, in row order: (data, scales), uint8 [n] each."""
    return to_canonical_bytes(encoded.data, encoded.scales, encoded.spec)
