"""One side (K or V) as a kernel sees it: how pages reach shared memory and how tiles decode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.codecs import Pages
from jaxkv.formats import SideSpec
from pallas_kernels import cp_async, dequantize, twin
from pallas_kernels._compat import arith, compute_capability, fragmented_array, ir, plgpu, vector
from pallas_kernels.dequantize import TILE, ScaleTile
from pallas_kernels.lanes import MlirLanes
from pallas_kernels.register_order import RowOrder

# The copy engine moves lines of at least 16 bytes to addresses that are multiples of 128.
_LINE_BYTES = 16
_COPY_ALIGNMENT = 128

_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a matrix in shared memory whose rows are swizzled over 128 bytes."""
    tile = 128 // np.dtype(dtype).itemsize
    if columns % tile:
        return ()
    return (plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Plane:
    """One array of codes.

    Attributes:
      dtype: element type.
      columns: elements of a token's row.
      tokens_per_line: tokens that share a line of the copy.
      transforms: of its tile in shared memory.
    """

    dtype: Any
    columns: int
    tokens_per_line: int
    transforms: tuple[Any, ...]

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Lines and elements of a line in a 64-token tile."""
        return TILE // self.tokens_per_line, self.columns * self.tokens_per_line


@dataclasses.dataclass(frozen=True)
class Side:
    """Static description of one side for one kernel.

    Attributes:
      spec: format and head_dim.
      block_size: tokens of a block; a power of two, at least 16.
    """

    spec: SideSpec
    block_size: int

    @property
    def dtype(self) -> Any:
        """The type in which this side is multiplied."""
        return dequantize.compute_dtype(self.spec)

    @property
    def is_decoded(self) -> bool:
        """Whether tiles are decoded; 16-bit tiles are multiplied as they are."""
        return self.spec.format.bits < 16

    @property
    def page_tokens(self) -> int:
        """Tokens that one page contributes to a tile."""
        return min(self.block_size, TILE)

    @property
    def pages_per_tile(self) -> int:
        """Pages in a tile."""
        return TILE // self.page_tokens

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays of codes."""
        bits, dim = self.spec.format.bits, self.spec.head_dim
        if bits == 16:
            dtype: Any = jnp.bfloat16 if self.spec.format.name == "bf16" else jnp.float16
            return (Plane(dtype, dim, 1, swizzled(dim, dtype)),)
        shapes: dict[int, Sequence[tuple[Any, int]]] = {
            8: [(jnp.uint8, dim)],
            4: [(jnp.uint32, dim // 8)],
            3: [(jnp.uint16, dim // 8), (jnp.uint16, dim // 16)],
            2: [(jnp.uint32, dim // 16)],
        }
        planes: list[Plane] = []
        for dtype, columns in shapes[bits]:
            row_bytes = columns * np.dtype(dtype).itemsize
            lines = max(1, _LINE_BYTES // row_bytes)
            is_swizzled = not planes and RowOrder(bits, dim).is_swizzled
            planes.append(
                Plane(dtype, columns, lines, swizzled(columns, dtype) if is_swizzled else ())
            )
        return tuple(planes)

    @property
    def scale_rows(self) -> int:
        """Rows of scales in a page, each with one entry a token; 0 where there are none."""
        dim = self.spec.head_dim
        rows = {"group_e4m3": dim // 64, "group_bf16": dim // 16, "token_f16": 1}
        return rows.get(self.spec.format.scale, 0)

    @property
    def scale_dtype(self) -> Any:
        """Element type of the scales."""
        dtypes = {"group_e4m3": jnp.uint32, "group_bf16": jnp.bfloat16, "token_f16": jnp.float16}
        return dtypes[self.spec.format.scale]

    @property
    def scale_tile(self) -> ScaleTile | None:
        """How the scales of a tile lie in shared memory."""
        if not self.scale_rows:
            return None
        itemsize = np.dtype(self.scale_dtype).itemsize
        row_bytes = self.page_tokens * itemsize
        aligned = math.lcm(row_bytes, _COPY_ALIGNMENT) // row_bytes
        rows = -(-self.scale_rows // aligned) * aligned
        return ScaleTile(self.page_tokens, rows, itemsize)

    @property
    def copies_per_tile(self) -> int:
        """Copies that one tile takes."""
        return self.pages_per_tile * (len(self.planes) + (self.scale_rows > 0))

    @property
    def tile_bytes(self) -> int:
        """Bytes that one tile reads from device memory."""
        spec = self.spec
        elements = TILE * spec.head_dim
        data: int = spec.format.data_bytes(elements)
        scales: int = spec.format.scale_bytes(elements, spec.head_dim)
        return data + scales

    def global_arrays(self, pages: Pages) -> list[jax.Array]:
        """The arrays of a side, reshaped so that the copy engine can move their lines."""
        arrays = []
        for array, plane in zip(pages.data, self.planes, strict=True):
            blocks, heads, tokens, columns = array.shape
            line = plane.tokens_per_line
            arrays.append(array.reshape(blocks, heads, tokens // line, columns * line))
        if pages.scales is not None:
            blocks, heads = pages.scales.shape[:2]
            arrays.append(pages.scales.reshape(blocks, heads, self.scale_rows, self.block_size))
        return arrays

    def scratch_shapes(self, stages: int) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of a ring of tiles, in the order of `global_arrays`."""
        shapes: list[tuple[tuple[int, ...], Any]] = [
            ((stages, *plane.tile_shape), plane.dtype) for plane in self.planes
        ]
        if self.scale_tile is not None:
            shape = (stages, self.pages_per_tile, self.scale_tile.rows, self.page_tokens)
            shapes.append((shape, self.scale_dtype))
        return shapes

    def scratch(self, stages: int) -> list[Any]:
        """Shared memory for a ring of tiles."""
        transforms = [plane.transforms for plane in self.planes] + [()] * (self.scale_rows > 0)
        return [
            plgpu.SMEM(shape, dtype, transforms=transform)
            for (shape, dtype), transform in zip(
                self.scratch_shapes(stages), transforms, strict=True
            )
        ]

    def issue(
        self,
        sources: Sequence[Any],
        ring: Sequence[Any],
        barrier: Any,
        slot: Any,
        head: Any,
        blocks: Sequence[Any],
        offset: Any,
    ) -> None:
        """Starts the copies of one tile.

        Args:
          sources: references to `global_arrays`.
          ring: references to `scratch`.
          barrier: expects `copies_per_tile` arrivals; None copies by cp.async.
          slot: place in the ring.
          head: KV head.
          blocks: block ids of the tile's pages.
          offset: first token inside the block, where a block is longer than a tile.
        """
        for p, block in enumerate(blocks):
            for plane, source, target in zip(self.planes, sources, ring, strict=False):
                lines = self.page_tokens // plane.tokens_per_line
                first = lax.div(offset, jnp.int32(plane.tokens_per_line))
                page = source.at[block, head]
                if self.block_size > TILE:
                    page = source.at[block, head, pl.ds(first, lines)]
                if barrier is None:
                    columns = plane.tile_shape[1]
                    tile = target.at[slot]
                    cp_async.copy_rows(page, tile, plane.transforms, p * lines, lines, columns)
                else:
                    place = target.at[slot, pl.ds(p * lines, lines)]
                    plgpu.copy_gmem_to_smem(page, place, barrier)
            if self.scale_rows:
                page = sources[-1].at[block, head]
                if self.block_size > TILE:
                    page = sources[-1].at[block, head, :, pl.ds(offset, TILE)]
                place = ring[-1].at[slot, p]
                if barrier is None:
                    cp_async.copy_rows(page, place, (), 0, self.scale_rows, self.page_tokens)
                else:
                    place = ring[-1].at[slot, p, pl.ds(0, self.scale_rows)]
                    plgpu.copy_gmem_to_smem(page, place, barrier)

    def decode(
        self,
        ring: Sequence[Any],
        slot: Any,
        bounds: Any,
        opaque_zero: Any,
        layout: Any,
        interpret: bool,
    ) -> jax.Array:
        """Decodes a tile into registers, columns in register order.

        Args:
          ring: references to `scratch`.
          slot: place in the ring.
          bounds: None, or (low, high) int32 rows to keep, low None for 0; others decode to zero.
          opaque_zero: int32 0 that the compiler cannot know to be 0.
          layout: of the registers, an operand or accumulator of wgmma or mma.
          interpret: whether the kernel is interpreted.

        Returns:
          [64, head_dim] in `dtype`.
        """
        if interpret:
            return twin.decode_tile(self.spec, *self._tile_values(ring, slot), bounds)
        num_planes, dim = len(self.planes), self.spec.head_dim

        def build(context: Any, *args: Any) -> Any:
            del context
            refs, (zero, *limits) = (
                args[: len(ring)],
                (x.registers.item() for x in args[len(ring) :]),
            )
            lanes = MlirLanes(compute_capability() >= (8, 9), zero)
            keep = None if bounds is None else _pair(limits)
            scales = refs[-1] if self.scale_rows else None
            rows = dequantize.decode_tile(
                lanes, self.spec, self.scale_tile, refs[:num_planes], scales, keep
            )
            element = ir.BF16Type.get() if self.dtype == jnp.bfloat16 else ir.F16Type.get()
            # Operands and accumulators order their registers alike: by column tile, then row.
            registers = np.empty(layout.to_mgpu().registers_shape((TILE, dim)), dtype=object)
            for half, row in enumerate(rows):
                for tile, word in enumerate(row):
                    registers.reshape(dim // 8, 2)[tile, half] = lanes.as_pair(word, element)
            return fragmented_array(registers, layout)

        result = plgpu.ShapeDtypeStruct((TILE, dim), self.dtype, layout=layout)
        transforms = [plane.transforms for plane in self.planes] + [()] * (self.scale_rows > 0)
        scalars = (opaque_zero, *_known(bounds))
        return self._inline(build, result, ring, transforms, slot, scalars)

    def row_scales(self, ring: Sequence[Any], slot: Any, bounds: Any, interpret: bool) -> jax.Array:
        """f32 [64]: the scale of each token (int8), zero outside the bounds."""
        if interpret:
            _, scales = self._tile_values(ring, slot)
            assert scales is not None
            return twin.row_scales(scales[0], bounds)
        scale_tile = self.scale_tile
        assert scale_tile is not None

        def build(context: Any, *args: Any) -> Any:
            del context
            lanes = MlirLanes(compute_capability() >= (8, 9))
            limits = [x.registers.item() for x in args[1:]]
            keep = None if bounds is None else _pair(limits)
            bits = dequantize.row_scale_bits(lanes, scale_tile, args[0], keep)
            shape = _ROW_LAYOUT.to_mgpu().registers_shape((TILE,))
            registers = np.empty(shape, dtype=object)
            for half, word in enumerate(bits):
                registers.reshape(2)[half] = _f16_to_f32_vector(word)
            return fragmented_array(registers, _ROW_LAYOUT)

        result = plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=_ROW_LAYOUT)
        return self._inline(build, result, ring[-1:], [()], slot, _known(bounds))

    def _inline(
        self, build: Any, result: Any, refs: Sequence[Any], transforms: Any, slot: Any, scalars: Any
    ) -> Any:
        """Calls a lane program on one tile of a ring."""
        types = tuple(plgpu.RefType(t) for t in transforms)
        types += (plgpu.Layout.WG_SPLAT(()),) * len(scalars)
        call = plgpu.inline_mgpu(arg_types=types, return_type=result)(build)
        return call(*(ref.at[slot] for ref in refs), *scalars)

    def _tile_values(
        self, ring: Sequence[Any], slot: Any
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Interpreted only: a tile's planes [64, words] and scales [rows, 64]."""
        planes = tuple(
            ref[slot].reshape(TILE, plane.columns)
            for ref, plane in zip(ring, self.planes, strict=False)
        )
        if not self.scale_rows:
            return planes, None
        scales = ring[-1][slot, :, pl.ds(0, self.scale_rows), :]
        return planes, jnp.swapaxes(scales, 0, 1).reshape(self.scale_rows, TILE)


def _known(bounds: Any) -> tuple[Any, ...]:
    """The bounds that are not None, to pass to a lane program."""
    return tuple(x for x in bounds or () if x is not None)


def _pair(limits: Sequence[Any]) -> tuple[Any, Any]:
    """(low or None, high) of what `_known` passed."""
    return (None, limits[0]) if len(limits) == 1 else (limits[0], limits[1])


def _f16_to_f32_vector(word: Any) -> Any:
    """The f16 in the low half of a register as a vector of one f32."""
    f32 = ir.F32Type.get()
    half = arith.trunci(ir.IntegerType.get_signless(16), word)
    value = arith.extf(f32, arith.bitcast(ir.F16Type.get(), half))
    return vector.broadcast(ir.VectorType.get((1,), f32), value)
