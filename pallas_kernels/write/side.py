"""One side (K or V) of a write kernel: encode a tile, then store its rows at their slots."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.codecs import Audit, Pages
from jaxkv.formats import SideSpec
from pallas_kernels._compat import plgpu, store
from pallas_kernels.write import encode, rotation, tiles
from pallas_kernels.write.staging import Staging

# Rows whose slot and words are read before any of them is stored, to hide the reads' latency.
_ROWS_IN_FLIGHT = 4
# Bit fields of a token's audit word.
_SATURATED_BITS = 12
_FLUSHED_BITS = 8


@dataclasses.dataclass(frozen=True)
class Side:
    """The static part of one side's work.

    Attributes:
      spec: format, head_dim, encoding, rotation.
      block_size: tokens of a block.
      portable: as in `WriteTuning`.
      interpreted: whether the kernel runs in the interpreter.
    """

    spec: SideSpec
    block_size: int
    portable: bool
    interpreted: bool

    @property
    def staging(self) -> Staging:
        """How rows are staged in shared memory."""
        return Staging(self.spec, self.interpreted)

    @property
    def tile(self) -> tiles.Tile:
        """The tile."""
        return self.staging.tile

    @property
    def is_rotated(self) -> bool:
        """Whether values are rotated here."""
        return self.spec.rotation != "none"

    @property
    def input_layout(self) -> Any:
        """The register layout in which `write` takes values."""
        return self.tile.transposed if self.is_rotated else self.tile.grouped

    def sync(self) -> None:
        """Makes shared memory stores visible to the whole tile."""
        if not self.portable:
            plgpu.commit_smem()

    def view(self, pages: Pages) -> list[jax.Array]:
        """The pages' arrays, rows split as the kernel stores them."""
        planes = [
            array.reshape(*array.shape[:-1], *plane.row)
            for array, plane in zip(pages.data, self.staging.planes)
        ]
        if pages.scales is None:
            return planes
        scales = pages.scales
        if self.spec.format.scale == "group_bf16":
            blocks, heads, groups, size = scales.shape
            scales = scales.reshape(blocks, heads, groups // 4, 4, size)
        return [*planes, scales]

    def unview(self, arrays: list[jax.Array], pages: Pages) -> Pages:
        """Inverse of `view`."""
        leaves, tree = jax.tree.flatten(pages)
        return jax.tree.unflatten(tree, [a.reshape(x.shape) for a, x in zip(arrays, leaves)])

    def write(
        self,
        values: jax.Array,
        start: Any,
        head: Any,
        slots: Any,
        scale: Any,
        pages: list[Any],
        audit: Any,
        scratch: dict[str, Any],
    ) -> None:
        """Encodes and stores one tile.

        Args:
          values: f32 of the tile's shape, in `input_layout`.
          start: the tile's first token.
          head: which head.
          slots: int32 [N] reference.
          scale: f32 [1] reference, the layer's scale.
          pages: references to the arrays of `view`.
          audit: int32 [heads, N] reference.
          scratch: shared memory of `Staging.scratch`.
        """
        tile, staging = self.tile, self.staging
        if self.is_rotated:
            values = rotation.rotate(values, self.spec, tile, scratch["exchange"], self.sync)
        layer_scale = scale[0] if self.spec.format.has_layer_scale else None
        stored, non_finite = encode.encode(values, self.spec, tile, layer_scale)
        staging.stage_codes(scratch["codes"], stored.codes)
        if stored.scales is not None:
            staging.stage_scales(scratch["scales"], stored.scales)
        tokens = pl.ds(start, tile.tokens)
        stores = self._is_slot(tiles.load(slots.at[tokens], tile.token_layout), pages)
        word = jnp.where(stores, _audit_word(stored, non_finite), jnp.int32(0))
        store(audit.at[head, tokens], word)
        self.sync()
        self._store_rows(start, head, slots, pages, scratch)

    def _is_slot(self, slot: Any, pages: list[Any]) -> Any:
        """Whether a slot is one: not -1, and inside the pool."""
        num_slots = min(pages[0].shape[0] * self.block_size, 2**31 - 1)
        return (slot >= 0) & (slot < np.int32(num_slots))

    def _store_rows(
        self, start: Any, head: Any, slots: Any, pages: list[Any], scratch: dict[str, Any]
    ) -> None:
        """Stores the staged rows of a tile, a few in flight at a time."""
        num_planes = len(self.staging.planes)

        def load_row(row: Any) -> tuple[Any, ...]:
            words = [self.staging.load_row(scratch["codes"], p, row) for p in self.staging.planes]
            scales = self._load_scales(scratch.get("scales"), row)
            return slots[start + row], words, scales

        def store_row(slot: Any, words: list[jax.Array], scales: list[Any]) -> None:
            block = lax.div(slot, np.int32(self.block_size))
            offset = lax.rem(slot, np.int32(self.block_size))
            for ref, value in zip(pages[:num_planes], words):
                store(ref.at[block, head, offset], value)
            for ref in pages[num_planes:]:
                self._store_scales(ref, scales, block, head, offset)

        def store_few(index: Any, carry: None) -> None:
            loaded = [load_row(index * _ROWS_IN_FLIGHT + i) for i in range(_ROWS_IN_FLIGHT)]
            for slot, words, scales in loaded:
                stores = self._is_slot(slot, pages)
                pl.when(stores)(functools.partial(store_row, slot, words, scales))
            return carry

        lax.fori_loop(0, self.tile.tokens // _ROWS_IN_FLIGHT, store_few, None)

    def _load_scales(self, staged: Any, row: Any) -> list[Any]:
        """One row's scales: scalars, or one array for turbo8."""
        match self.spec.format.scale:
            case "group_e4m3":
                return [staged[row, word] for word in range(self.tile.words)]
            case "group_bf16":
                layout = tiles.row_layout((1, self.tile.words, tiles.GROUPS_PER_WORD))
                return [tiles.load(staged.at[pl.ds(row, 1)], layout)]
            case "token_f16":
                return [staged[row]]
        return []

    def _store_scales(
        self, ref: Any, scales: list[Any], block: Any, head: Any, offset: Any
    ) -> None:
        match self.spec.format.scale:
            case "group_e4m3":
                for word, value in enumerate(scales):
                    ref[block, head, word, offset] = value
            case "group_bf16":
                store(ref.at[block, pl.ds(head, 1), :, :, offset], scales[0])
            case "token_f16":
                ref[block, head, offset] = scales[0]


def _audit_word(stored: encode.Stored, non_finite: jax.Array) -> jax.Array:
    """One int32 per token: saturated, then flushed, then non-finite, from the low bits up."""
    word = jnp.where(non_finite > 0, jnp.int32(1 << (_SATURATED_BITS + _FLUSHED_BITS)), 0)
    if stored.saturated is not None:
        word = word | stored.saturated
    if stored.flushed is not None:
        word = word | (stored.flushed << np.int32(_SATURATED_BITS))
    return word


def unpack_audit(word: jax.Array) -> Audit:
    """Audit words int32 [heads, N] to counts [N, heads]."""
    word = word.T
    return Audit(
        saturated=word & (2**_SATURATED_BITS - 1),
        flushed=(word >> _SATURATED_BITS) & (2**_FLUSHED_BITS - 1),
        non_finite=word >> (_SATURATED_BITS + _FLUSHED_BITS),
    )


def scratch_types(sides: dict[str, Side]) -> dict[str, Any]:
    """Shared memory of several sides, each name prefixed by its side's."""
    return {
        f"{name}_{key}": value
        for name, side in sides.items()
        for key, value in side.staging.scratch().items()
    }


def own_scratch(name: str, scratch: dict[str, Any]) -> dict[str, Any]:
    """What belongs to one side."""
    prefix = f"{name}_"
    return {k.removeprefix(prefix): v for k, v in scratch.items() if k.startswith(prefix)}
