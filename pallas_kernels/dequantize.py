"""Decoding pages in registers: the lane program of each storage format.

This is what a GPU runs. It is written against `Lanes` and checked in an emulator; `twin` computes
the same values with array operations for interpreted kernels. Both return columns in register
order (`register_order`), in units that leave constant factors to `unit`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxkv.formats import E2M1_MAGNITUDES, GROUP_SIZE, SideSpec
from pallas_kernels.lanes import Buffer, Lanes, Word, by_quad
from pallas_kernels.register_order import RowOrder

TILE = 64

# The bits of an E4M3 number in a bf16 read as the number times 2^-120. Half of that is given back
# through the group scale, half through `unit`, so that neither product leaves the normal range.
TURBO8_UNIT = 2.0**60


@dataclasses.dataclass(frozen=True)
class ScaleTile:
    """Where a tile's scales lie in shared memory: [pages, padded rows of scales, page tokens].

    Attributes:
      page_tokens: tokens that one page contributes to the tile.
      rows: scale rows a page reserves; its scales come first.
      itemsize: bytes of one scale word.
    """

    page_tokens: int
    rows: int
    itemsize: int

    def offset(self, lanes: Lanes, index: Word, row: Word) -> Word:
        """Byte offset of scale row `index` of the token in tile row `row`."""
        log = self.page_tokens.bit_length() - 1
        page = lanes.shift_right(row, log)
        token = lanes.bit_and(row, lanes.const(self.page_tokens - 1))
        line = lanes.add(lanes.mul(page, lanes.const(self.rows)), index)
        word = lanes.add(lanes.shift_right(line, -log), token)
        return lanes.opaque(lanes.mul(word, lanes.const(self.itemsize)))


def compute_dtype(spec: SideSpec) -> Any:
    """The 16-bit type in which a side is multiplied."""
    return jnp.bfloat16 if spec.format.name in ("bf16", "turbo8") else jnp.float16


def unit(spec: SideSpec) -> float:
    """What a decoded value must be multiplied by, beside the layer scale."""
    if spec.format.is_codebook:
        return 1.0 / spec.codebook.divisor
    return TURBO8_UNIT if spec.format.name == "turbo8" else 1.0


def has_row_scale(spec: SideSpec) -> bool:
    """Whether a token has one scale, applied to scores (K) or weights (V)."""
    return spec.format.scale == "token_f16"


def levels(spec: SideSpec) -> np.ndarray:
    """f32 [2 ** bits]: the value of each code before its scale."""
    if spec.format.is_codebook:
        return np.asarray(spec.codebook.levels, np.float32)
    magnitudes = np.asarray(E2M1_MAGNITUDES, np.float32)
    return np.concatenate([magnitudes, -magnitudes])


def _fit_e4m3(values: np.ndarray) -> bool:
    as_e4m3 = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return bool(np.array_equal(as_e4m3, values))


@dataclasses.dataclass(frozen=True)
class _LaneProgram:
    """Decodes the two rows that a lane holds of a 64-token tile."""

    lanes: Lanes
    spec: SideSpec
    scale_tile: ScaleTile | None
    data: tuple[Buffer, ...]
    scales: Buffer | None

    @property
    def order(self) -> RowOrder:
        return RowOrder(self.spec.format.bits, self.spec.head_dim)

    def row_words(self, half: int) -> list[Word]:
        """The lane's bytes of its row in the first plane, in load order."""
        order = self.order
        step = min(16, order.piece_bytes)
        words = []
        for piece in range(order.pieces):
            for first in range(0, order.piece_bytes, step):
                offset = self._data_offset(half, piece, first)
                words += self.lanes.load(self.data[0], offset, step)
        return words

    def _data_offset(self, half: int, piece: int, first: int) -> Word:
        """Byte offset in the first plane of byte `first` of a piece."""
        lanes, order = self.lanes, self.order
        row = lanes.row(half)
        run_start = lanes.mul(lanes.quad(), lanes.const(order.piece_bytes))
        if not order.is_swizzled:
            static = piece * (order.row_bytes // order.pieces) + first
            line = lanes.mul(row, lanes.const(order.row_bytes))
            return lanes.add(lanes.add(line, run_start), lanes.const(static))
        # Eight rows of 128 bytes are one swizzle atom; wider rows continue in the next atom.
        row_in_atom = lanes.bit_and(row, lanes.const(7))
        atom = lanes.mul(lanes.shift_right(row, 3), lanes.const(8 * order.row_bytes))
        line = lanes.add(atom, lanes.shift_right(row_in_atom, -7))
        column = lanes.bit_xor(
            lanes.add(run_start, lanes.const(first)), lanes.shift_right(row_in_atom, -4)
        )
        return lanes.add(lanes.add(line, lanes.const(1024 * piece)), column)

    def top_words(self, half: int) -> list[Word]:
        """3 bits: the top plane's bytes of the lane's codes, one word for each of `row_words`.

        Byte j of the low plane shares byte j mod (head_dim / 8) of the top plane with the byte
        half a row away; the upper half's bits are one place higher, and are moved down here.
        """
        lanes, run = self.lanes, self.order.lane_bytes
        line = lanes.mul(lanes.row(half), lanes.const(2 * run))
        start = lanes.mul(lanes.bit_and(lanes.quad(), lanes.const(1)), lanes.const(run))
        is_upper = lanes.shift_right(lanes.quad(), 1)
        words = lanes.load(self.data[1], lanes.add(line, start), run)
        return [lanes.shift_right(word, is_upper) for word in words]

    def scale_words(self, half: int, indices: tuple[int, ...], nbytes: int) -> Word:
        """One scale of a row; `indices` are the scale row for each position in the quad."""
        assert self.scale_tile is not None
        index = by_quad(self.lanes, indices)
        offset = self.scale_tile.offset(self.lanes, index, self.lanes.row(half))
        return self.lanes.load(self.scales, offset, nbytes)[0]

    def groups(self, byte_index: int, field: int) -> tuple[int, ...]:
        """The group of a code for each position in the quad."""
        order = self.order
        return tuple(
            (field * order.row_bytes + order.byte(q, byte_index)) // GROUP_SIZE for q in range(4)
        )

    def decode(self, half: int, mask: Word | None) -> list[Word]:
        """Registers of one row, two columns each, in column order."""
        name = self.spec.format.name
        if name == "fp8":
            return self._fp8(half, mask)
        if name == "int8":
            return self._int8(half)
        if name == "turbo8":
            return self._turbo8(half, mask)
        return self._codes(half, mask)

    def _fp8(self, half: int, mask: Word | None) -> list[Word]:
        out: list[Word] = []
        for word in self.row_words(half):
            masked = word if mask is None else self.lanes.bit_and(word, mask)
            out += self.lanes.e4m3_to_f16(masked)
        return out

    def _int8(self, half: int) -> list[Word]:
        """A byte with its sign flipped, under the exponent of 1024, is 1152 more than the code."""
        lanes = self.lanes
        out = []
        for word in self.row_words(half):
            biased = lanes.bit_xor(word, lanes.const(0x80808080))
            for selector in (0x4140, 0x4342):
                pair = lanes.permute(biased, lanes.const(0x64646464), lanes.const(selector))
                out.append(lanes.add_f16(pair, lanes.const(0xE480E480)))
        return out

    def _turbo8(self, half: int, mask: Word | None) -> list[Word]:
        lanes = self.lanes
        scales: dict[tuple[int, ...], Word] = {}
        out = []
        for w, word in enumerate(self.row_words(half)):
            groups = self.groups(4 * w, 0)
            if groups not in scales:
                scales[groups] = self._turbo8_scale(half, groups, mask)
            for selector in (0x1404, 0x3424):
                spread = lanes.permute(word, lanes.const(0), lanes.const(selector))
                sign = lanes.bit_and(spread, lanes.const(0x80008000))
                rest = lanes.bit_and(lanes.shift_right(spread, 4), lanes.const(0x07F007F0))
                out.append(lanes.mul_bf16(lanes.bit_or(sign, rest), scales[groups]))
        return out

    def _turbo8_scale(self, half: int, groups: tuple[int, ...], mask: Word | None) -> Word:
        lanes = self.lanes
        scale = self.scale_words(half, groups, 2)
        if mask is not None:
            scale = lanes.bit_and(scale, mask)
        pair = lanes.permute(scale, scale, lanes.const(0x1010))
        return lanes.mul_bf16(pair, lanes.const(0x5D805D80))  # 2^60, twice

    def _codes(self, half: int, mask: Word | None) -> list[Word]:
        """Codes by byte permutes, times the scales of the two groups in each register."""
        lanes, order = self.lanes, self.order
        scales: dict[tuple[tuple[int, ...], tuple[int, ...]], Word] = {}
        words: dict[tuple[int, ...], Word] = {}
        top = self.top_words(half) if self.spec.format.bits == 3 else []
        passes = order.fields // 2
        out = []
        for w, word in enumerate(self.row_words(half)):
            lookups = [
                self._lookup(word, top[w] if top else None, which) for which in range(passes)
            ]
            for k in range(0, 4, 2):
                for which in range(passes):
                    for i in range(2):
                        key = (
                            self.groups(4 * w + k, which),
                            self.groups(4 * w + k, which + passes),
                        )
                        if key not in scales:
                            scales[key] = self._scale_pair(half, key, words, mask)
                        out.append(lanes.mul_f16(lookups[which][k + i], scales[key]))
        return out

    def _scale_pair(
        self,
        half: int,
        groups: tuple[tuple[int, ...], tuple[int, ...]],
        words: dict[tuple[int, ...], Word],
        mask: Word | None,
    ) -> Word:
        """The f16 scales of a register's two groups."""
        lanes = self.lanes
        for side in groups:
            key = tuple(g // 4 for g in side)
            if key not in words:
                word = self.scale_words(half, key, 4)
                words[key] = word if mask is None else lanes.bit_and(word, mask)
        first, second = (words[tuple(g // 4 for g in side)] for side in groups)
        selector = by_quad(
            lanes, tuple(a % 4 | (4 + b % 4) << 4 for a, b in zip(*groups, strict=True))
        )
        return lanes.e4m3_to_f16(lanes.permute(first, second, selector))[0]

    def _lookup(self, word: Word, top: Word | None, which: int) -> list[Word]:
        """The levels of pass `which` over a word: one register for each of its four bytes."""
        lanes = self.lanes
        bits = self.spec.format.bits
        high = None
        if bits == 4:
            select = lanes.bit_and(word, lanes.const(0x77777777))
            sign = lanes.bit_and(lanes.shift_right(word, 1), lanes.const(0x44444444))
            high = lanes.bit_or(sign, lanes.const(0x32103210))
        else:
            select = lanes.bit_and(lanes.shift_right(word, 2 * which), lanes.const(0x33333333))
        if top is not None:
            bit = lanes.shift_right(top, 2 * which - 2)
            select = lanes.bit_or(select, lanes.bit_and(bit, lanes.const(0x44444444)))
        return self._levels(select, high) + self._levels(
            lanes.shift_right(select, 16),
            None if high is None else lanes.shift_right(high, 16),
        )

    def _levels(self, select: Word, high: Word | None) -> list[Word]:
        """The levels of four codes, as two registers of f16."""
        lanes, values = self.lanes, levels(self.spec)
        if lanes.has_e4m3 and _fit_e4m3(values):
            table = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            return list(lanes.e4m3_to_f16(self._table(table, select, high)))
        halves = values.astype(np.float16).view(np.uint16)
        low_bytes = self._table((halves & 255).astype(np.uint8), select, high)
        high_bytes = self._table((halves >> 8).astype(np.uint8), select, high)
        return [
            lanes.permute(low_bytes, high_bytes, lanes.const(selector))
            for selector in (0x5140, 0x7362)
        ]

    def _table(self, table: np.ndarray, select: Word, high: Word | None) -> Word:
        """Four table bytes: `select` picks among eight, `high` between the two eights of 16."""
        lanes = self.lanes
        padded = np.resize(table, -(-len(table) // 8) * 8).view(np.uint32)
        words = [lanes.opaque(lanes.const(int(w))) for w in padded]
        low = lanes.permute(words[0], words[1], select)
        if high is None:
            return low
        return lanes.permute(low, lanes.permute(words[2], words[3], select), high)


def decode_tile(
    lanes: Lanes,
    spec: SideSpec,
    scale_tile: ScaleTile | None,
    data: tuple[Buffer, ...],
    scales: Buffer | None,
    bounds: tuple[Word | None, Word] | None,
) -> list[list[Word]]:
    """Decodes the lane's two rows of a 64-token tile.

    Args:
      lanes: the instructions.
      spec: the side; not a 16-bit format.
      scale_tile: how the scales lie.
      data: planes in shared memory, tile rows contiguous (swizzled where rows fill the banks).
      scales: scales in shared memory, or None.
      bounds: (low, high) rows of the tile to keep; others decode to zero whatever they hold
        (int8 leaves that to its row scales). A low of None is 0; None keeps all.

    Returns:
      Two rows of head_dim / 8 registers, each two 16-bit floats of `compute_dtype`.
    """
    program = _LaneProgram(lanes, spec, scale_tile, data, scales)
    return [program.decode(half, row_mask(lanes, half, bounds)) for half in range(2)]


def row_mask(lanes: Lanes, half: int, bounds: tuple[Word | None, Word] | None) -> Word | None:
    """All ones where the lane's row is inside the bounds, else zero."""
    if bounds is None:
        return None
    low, high = bounds
    return lanes.mask_between(low, lanes.row(half), high)


def row_scale_bits(
    lanes: Lanes,
    scale_tile: ScaleTile,
    scales: Buffer,
    bounds: tuple[Word | None, Word] | None,
) -> list[Word]:
    """The f16 scale bits of the lane's two rows; zero outside the bounds."""
    out = []
    for half in range(2):
        offset = scale_tile.offset(lanes, lanes.const(0), lanes.row(half))
        word = lanes.load(scales, offset, 2)[0]
        mask = row_mask(lanes, half, bounds)
        out.append(word if mask is None else lanes.bit_and(word, mask))
    return out
