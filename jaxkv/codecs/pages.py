"""`Pages`: the arrays of one side of one layer, and how rows get in and out of them.

Head-major, so that one head of one block is one contiguous run:

| format | data | scales |
|---|---|---|
| bf16, f16 | native [blocks, heads, block_size, D] | none |
| fp8, int8, turbo8 | uint8 [blocks, heads, block_size, D] | int8: f16 [blocks, heads, block_size] |
| nvfp4, turbo4 | uint32 [blocks, heads, block_size, D / 8] | E4M3 |
| turbo3 | uint16 [.., D / 8] (low bits) and uint16 [.., D / 16] (top bits) | E4M3 |
| turbo2 | uint32 [.., D / 16] | E4M3 |

E4M3 group scales are token-minor: uint32 [blocks, heads, D / 64, block_size], byte g of word w is
group 4 w + g, where 64 divides D; else uint8 [blocks, heads, D / 16, block_size]. turbo8 scales are
bf16 [blocks, heads, D / 16, block_size]. fp8 has one f32 scale per layer and side, kept elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.codecs import packing
from jaxkv.codecs.rows import Encoded, decode_rows, unpack_codes, unpack_scales
from jaxkv.formats import GROUP_SIZE, SideSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """One side (K or V) of one layer.

    Attributes:
      data: planes of codes, each [blocks, heads, block_size, words].
      scales: scales stored beside the codes, or None. See the module's table.
    """

    data: tuple[jax.Array, ...]
    scales: jax.Array | None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.data[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.data[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def pages_shapes(num_blocks: int, num_heads: int, block_size: int, spec: SideSpec) -> Any:
    """The shapes and dtypes of a side's arrays, as a `Pages` of `jax.ShapeDtypeStruct`."""
    lead = (num_blocks, num_heads)

    def plane(words: int, dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, block_size, words), dtype)

    bits, dim = spec.format.bits, spec.head_dim
    data: tuple[Any, ...]
    if bits == 16:
        data = (plane(dim, jnp.bfloat16 if spec.format.name == "bf16" else jnp.float16),)
    elif bits == 8:
        data = (plane(dim, jnp.uint8),)
    else:
        words = packing.plane_words(dim, bits)
        data = tuple(plane(n, word) for n, (_, word) in zip(words, packing.PLANES[bits]))
    return Pages(data, _scales_shape(lead, block_size, spec))


def _scales_shape(lead: tuple[int, int], block_size: int, spec: SideSpec) -> Any:
    match spec.format.scale:
        case "token_f16":
            return jax.ShapeDtypeStruct((*lead, block_size), jnp.float16)
        case "group_bf16":
            return jax.ShapeDtypeStruct((*lead, spec.num_groups, block_size), jnp.bfloat16)
        case "group_e4m3" if spec.head_dim % 64 == 0:
            return jax.ShapeDtypeStruct((*lead, spec.num_groups // 4, block_size), jnp.uint32)
        case "group_e4m3":
            return jax.ShapeDtypeStruct((*lead, spec.num_groups, block_size), jnp.uint8)
        case _:
            return None


def init_pages(num_blocks: int, num_heads: int, block_size: int, spec: SideSpec) -> Pages:
    """Zeroed pages, every leaf a buffer of its own."""
    shapes = pages_shapes(num_blocks, num_heads, block_size, spec)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def scatter_rows(pages: Pages, rows: Encoded, blocks: jax.Array, offsets: jax.Array) -> Pages:
    """Stores rows into pages.

    Args:
      pages: one side of a layer.
      rows: [N, heads] rows.
      blocks: int32 [N]; `num_blocks` or more drops the row.
      offsets: int32 [N], token offset inside the block.

    Returns:
      The new pages; in place where the old ones are donated or loop-carried.
    """
    data = tuple(
        plane.at[blocks, :, offsets].set(row, mode="drop")
        for plane, row in zip(pages.data, rows.data)
    )
    if pages.scales is None:
        return Pages(data, None)
    index: tuple = (blocks, slice(None), offsets)
    if pages.scales.ndim == 4:
        index = (blocks, slice(None), slice(None), offsets)
    return Pages(data, pages.scales.at[index].set(rows.scales, mode="drop"))


def copy_blocks(pages: Pages, source: jax.Array, destination: jax.Array) -> Pages:
    """Copies whole blocks, scales included.

    Args:
      pages: one side of a layer.
      source: int32 [n] blocks to read; must be in range.
      destination: int32 [n] blocks to write; `num_blocks` or more drops the copy.
    """
    return jax.tree.map(lambda leaf: leaf.at[destination].set(leaf[source], mode="drop"), pages)


def copy_tokens(
    pages: Pages, source: jax.Array, destination: jax.Array, first: jax.Array, count: int
) -> Pages:
    """Copies `count` tokens of one block, scales included.

    Args:
      pages: one side of a layer.
      source: int32 scalar, the block to read.
      destination: int32 scalar, the block to write; both must be in range.
      first: int32 scalar, the first token; moved back where fewer than `count` follow.
      count: how many, at most a block.
    """

    def copy(leaf: jax.Array, token_axis: int) -> jax.Array:
        sizes = [1, *leaf.shape[1:]]
        sizes[token_axis] = count
        begin = [jnp.int32(0)] * leaf.ndim
        begin[token_axis] = first
        part = jax.lax.dynamic_slice(leaf, [source, *begin[1:]], sizes)
        return jax.lax.dynamic_update_slice(leaf, part, [destination, *begin[1:]])

    scales = pages.scales
    if scales is not None:
        scales = copy(scales, scales.ndim - 1)
    return Pages(tuple(copy(plane, 2) for plane in pages.data), scales)


def rows_of_block(pages: Pages, block: int | jax.Array) -> tuple[tuple, jax.Array | None]:
    """(data, scales) of one block as rows [heads, block_size, ...], scales last."""
    data = tuple(plane[block] for plane in pages.data)
    if pages.scales is None:
        return data, None
    scales = pages.scales[block]
    return data, scales if scales.ndim == 2 else jnp.swapaxes(scales, -1, -2)


def decode_pages(pages: Pages, spec: SideSpec, layer_scale: jax.Array | None = None) -> jax.Array:
    """Decodes every block, for tests and small pools: f32 [blocks, heads, block_size, D].

    The result stays in the stored basis.
    """
    scales = pages.scales
    if scales is not None and scales.ndim == 4:
        scales = jnp.swapaxes(scales, -1, -2)
    return decode_rows(pages.data, scales, spec, layer_scale)


def to_canonical_bytes(
    data: tuple[jax.Array, ...], scales: jax.Array | None, spec: SideSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Rows as canonical bytes, in row order.

    Args:
      data: planes [..., words].
      scales: as in `Encoded`.
      spec: the side.

    Returns:
      (data bytes, scale bytes), uint8 [n] each, packed least significant bit first, all
      multi-byte values little-endian.
    """
    codes = np.asarray(unpack_codes(data, spec))
    if spec.format.bits < 8:
        codes = packing.to_canonical(codes, spec.format.bits)
    unpacked = unpack_scales(scales, spec)
    scale_array = np.zeros(0, np.uint8) if unpacked is None else np.asarray(unpacked)
    return _bytes(codes), _bytes(scale_array)


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def from_canonical_bytes(
    data: np.ndarray, scales: np.ndarray, shape: tuple[int, ...], spec: SideSpec
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Inverse of `to_canonical_bytes` for rows of leading shape `shape`."""
    bits = spec.format.bits
    if bits == 16:
        dtype = jnp.bfloat16 if spec.format.name == "bf16" else jnp.float16
        planes: tuple[jax.Array, ...] = (
            jnp.asarray(data.view(dtype).reshape(*shape, spec.head_dim)),
        )
    elif bits == 8:
        planes = (jnp.asarray(data.reshape(*shape, spec.head_dim)),)
    else:
        codes = packing.from_canonical(data.reshape(*shape, -1), bits)
        planes = packing.pack(jnp.asarray(codes), bits)
    match spec.format.scale:
        case "token_f16":
            return planes, jnp.asarray(scales.view(np.float16).reshape(shape))
        case "group_bf16":
            return planes, jnp.asarray(scales.view(jnp.bfloat16).reshape(*shape, -1))
        case "group_e4m3":
            groups = jnp.asarray(scales.reshape(*shape, spec.head_dim // GROUP_SIZE))
            if spec.head_dim % 64 == 0:
                groups = packing.to_words(groups, np.dtype(np.uint32))
            return planes, groups
        case _:
            return planes, None
