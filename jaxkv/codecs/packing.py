"""Codes to planar words and back, and the canonical packing of exported bytes.

Planar: a row of `head_dim` codes of b bits takes W = head_dim * b / 8 bytes, and field k (bits
k*b to k*b + b - 1, lowest first) of byte j is the code of dim k * W + j. A vector load of words
therefore yields contiguous runs of dims with one shift and one mask per field, on a CPU and in a
GPU kernel alike. Three-bit codes are a 2-bit plane (the low bits) and a 1-bit plane.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Bits of each plane and the word that holds its bytes, per code width.
PLANES: dict[int, tuple[tuple[int, np.dtype], ...]] = {
    4: ((4, np.dtype(np.uint32)),),
    3: ((2, np.dtype(np.uint16)), (1, np.dtype(np.uint16))),
    2: ((2, np.dtype(np.uint32)),),
}


def plane_words(head_dim: int, bits: int) -> tuple[int, ...]:
    """Words of one row in each plane."""
    return tuple(head_dim * b // 8 // word.itemsize for b, word in PLANES[bits])


def pack(codes: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    """Packs codes into planar words.

    Args:
      codes: uint8 [..., head_dim], each below 2^bits.
      bits: 2, 3 or 4.

    Returns:
      One array of words [..., words] per plane of `PLANES[bits]`.
    """
    planes = []
    shift = 0
    for width, word in PLANES[bits]:
        fields = (codes >> shift) & (2**width - 1)
        fields = fields.reshape(*codes.shape[:-1], 8 // width, -1)
        row = jnp.zeros_like(fields[..., 0, :])
        for k in range(8 // width):
            row = row | (fields[..., k, :] << (k * width))
        planes.append(to_words(row, word))
        shift += width
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], bits: int) -> jax.Array:
    """Inverse of `pack`: words [..., words] per plane to uint8 codes [..., head_dim]."""
    codes = None
    shift = 0
    for (width, _), words in zip(PLANES[bits], planes):
        row = to_bytes(words)
        fields = [(row >> (k * width)) & (2**width - 1) for k in range(8 // width)]
        plane = jnp.concatenate(fields, axis=-1) << shift
        codes = plane if codes is None else codes | plane
        shift += width
    assert codes is not None
    return codes


def to_words(row: jax.Array, word: np.dtype) -> jax.Array:
    """uint8 [..., n] as little-endian words [..., n / itemsize]."""
    size = word.itemsize
    return jax.lax.bitcast_convert_type(row.reshape(*row.shape[:-1], -1, size), word)


def to_bytes(words: jax.Array) -> jax.Array:
    """Little-endian words [..., n] as uint8 [..., n * itemsize]."""
    row = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return row.reshape(*words.shape[:-1], -1)


def to_canonical(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes in order, least significant bit first.

    Args:
      codes: uint8 [..., n], n a multiple of 16.
      bits: 2, 3, 4 or 8.

    Returns:
      uint8 [..., n * bits / 8].
    """
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1)
    return np.packbits(stream, axis=-1, bitorder="little")


def from_canonical(data: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `to_canonical`: uint8 [..., n * bits / 8] to uint8 codes [..., n]."""
    stream = np.unpackbits(data, axis=-1, bitorder="little")
    stream = stream.reshape(*data.shape[:-1], -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream * weights).sum(-1, dtype=np.uint8)
