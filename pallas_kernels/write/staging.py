"""Packing: codes go to shared memory as bytes in dim order, rows leave it as planar words.

A plane of b bits has 8 / b fields; field k holds the dims [k * W, (k + 1) * W), where W is the
bytes of a row. Staged as one code per byte, a field is a contiguous slice of the row, and the
plane's words are the slices shifted and or-ed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.formats import GROUP_SIZE, SideSpec
from pallas_kernels._compat import plgpu, store
from pallas_kernels.write import tiles
from pallas_kernels.write.rotation import PADDED_GROUP
from pallas_kernels.write.tiles import GROUPS_PER_WORD, Tile


@dataclasses.dataclass(frozen=True)
class Plane:
    """One array of codes of a side.

    Attributes:
      bits: bits of the plane's codes.
      shift: position of these bits in the whole code.
      row: one row's words as [words, groups, words per group] of the staged codes.
    """

    bits: int
    shift: int
    row: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Staging:
    """How the rows of a side lie in shared memory between encoding and storing.

    Attributes:
      spec: the side.
      interpreted: as in `Tile`.
    """

    spec: SideSpec
    interpreted: bool = False

    @property
    def tile(self) -> Tile:
        """The tile."""
        return Tile(self.spec.head_dim, self.interpreted)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.spec.format.bits

    @property
    def dtype(self) -> Any:
        """Element type of the staged words, which is that of the pages."""
        if self.bits == 16:
            return jnp.bfloat16 if self.spec.format.name == "bf16" else jnp.float16
        return {8: jnp.uint8, 4: jnp.uint32, 3: jnp.uint16, 2: jnp.uint32}[self.bits]

    @property
    def codes_per_word(self) -> int:
        """Codes staged in one word, a byte each."""
        return 1 if self.bits >= 8 else np.dtype(self.dtype).itemsize

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes, in the order of `Pages.data`."""
        if self.bits >= 8:
            return (Plane(self.bits, 0, self._row(1)),)
        widths = {4: (4,), 3: (2, 1), 2: (2,)}[self.bits]
        return tuple(Plane(b, s, self._row(8 // b)) for b, s in zip(widths, (0, 2)))

    def _row(self, fields: int) -> tuple[int, int, int]:
        """The slice of a staged row that one of `fields` fields takes."""
        words = self.tile.words
        per_group = GROUP_SIZE // self.codes_per_word
        if fields <= words:
            return (words // fields, GROUPS_PER_WORD, per_group)
        fields //= words
        if fields <= GROUPS_PER_WORD:
            return (1, GROUPS_PER_WORD // fields, per_group)
        return (1, 1, per_group * GROUPS_PER_WORD // fields)

    def scratch(self) -> dict[str, Any]:
        """Shared memory of the side's stages."""
        tile = self.tile
        lead = tile.shape[:3]
        shapes = {
            "codes": plgpu.SMEM((*lead, GROUP_SIZE // self.codes_per_word), self.dtype),
        }
        match self.spec.format.scale:
            case "group_e4m3":
                shapes["scales"] = plgpu.SMEM((tile.tokens, tile.words), jnp.uint32)
            case "group_bf16":
                shapes["scales"] = plgpu.SMEM(lead, jnp.bfloat16)
            case "token_f16":
                shapes["scales"] = plgpu.SMEM((tile.tokens,), jnp.float16)
        if self.spec.rotation != "none":
            shapes["exchange"] = plgpu.SMEM((*lead, PADDED_GROUP), jnp.float32)
        return shapes

    def stage_codes(self, ref: Any, codes: jax.Array) -> None:
        """Stores a tile's codes: uint32 (or native floats), the tile's shape."""
        if self.bits >= 8:
            store(ref, codes.astype(self.dtype))
            return
        per_word = self.codes_per_word
        shifted = codes << ((self.tile.iota(3) % np.uint32(per_word)) * np.uint32(8))
        for index in range(GROUP_SIZE // per_word):
            part = tiles.slice_axis(shifted, 3, index * per_word, (index + 1) * per_word)
            store(ref.at[:, :, :, index], jnp.sum(part, axis=3).astype(self.dtype))

    def stage_scales(self, ref: Any, scales: jax.Array) -> None:
        """Stores a tile's scales."""
        if self.spec.format.scale == "group_e4m3":
            index = plgpu.broadcasted_iota(
                jnp.uint32, scales.shape, 2, layout=self.tile.grouped.reduce(3)
            )
            scales = jnp.sum(scales << (index * np.uint32(8)), axis=2)
        store(ref, scales)

    def load_row(self, ref: Any, plane: Plane, row: Any) -> jax.Array:
        """The words of one row of a plane, shape `plane.row`."""
        layout = tiles.row_layout(plane.row)
        if self.bits >= 8:
            return tiles.load(ref.at[row], layout)
        mask = sum(((1 << plane.bits) - 1) << (8 * i) for i in range(self.codes_per_word))
        words = None
        for field in range(8 // plane.bits):
            part = tiles.load(self._field(ref, plane, row, field), layout)
            if len(self.planes) > 1:
                part = (part >> self._word(plane.shift)) & self._word(mask)
            part = part << self._word(field * plane.bits) if field else part
            words = part if words is None else words | part
        assert words is not None
        return words

    def _word(self, value: int) -> Any:
        return np.dtype(self.dtype).type(value)

    def _field(self, ref: Any, plane: Plane, row: Any, field: int) -> Any:
        """The staged codes of one field of a row."""
        words, groups, size = plane.row
        per_group = GROUP_SIZE // self.codes_per_word
        start = field * words * groups * size
        word, start = divmod(start, GROUPS_PER_WORD * per_group)
        group, offset = divmod(start, per_group)
        return ref.at[row, word : word + words, group : group + groups, offset : offset + size]
