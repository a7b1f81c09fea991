"""`Lanes` on numpy: 128 lanes of a warpgroup, register for register."""

from __future__ import annotations

import ml_dtypes
import numpy as np

Word = np.ndarray


class NumpyLanes:
    """Runs a lane program on the CPU. A buffer is its bytes in shared memory, uint8 [n]."""

    def __init__(self, has_e4m3: bool = True) -> None:
        self.has_e4m3 = has_e4m3
        thread = np.arange(128, dtype=np.uint32)
        self._lane, self._warp = thread % 32, thread // 32

    def quad(self) -> Word:
        return self._lane % 4

    def row(self, half: int) -> Word:
        return 16 * self._warp + self._lane // 4 + 8 * half

    def const(self, value: int) -> Word:
        return np.full(128, value, np.uint32)

    def opaque(self, word: Word) -> Word:
        return word

    def add(self, a: Word, b: Word) -> Word:
        return a + b

    def mul(self, a: Word, b: Word) -> Word:
        return a * b

    def bit_and(self, a: Word, b: Word) -> Word:
        return a & b

    def bit_or(self, a: Word, b: Word) -> Word:
        return a | b

    def bit_xor(self, a: Word, b: Word) -> Word:
        return a ^ b

    def shift_right(self, a: Word, count: Word | int) -> Word:
        if isinstance(count, int) and count < 0:
            return a << np.uint32(-count)
        return a >> np.asarray(count, np.uint32)

    def mask_between(self, low: Word | None, a: Word, high: Word) -> Word:
        signed = a.astype(np.int32)
        inside = signed < high.astype(np.int32)
        if low is not None:
            inside &= signed >= low.astype(np.int32)
        return np.where(inside, np.uint32(0xFFFFFFFF), np.uint32(0))

    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        source = np.concatenate([_bytes(a), _bytes(b)], axis=1)
        out = np.zeros((128, 4), np.uint8)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)) & 15
            byte = source[np.arange(128), nibble & 7]
            replicated = np.where(byte & 0x80, 0xFF, 0).astype(np.uint8)
            out[:, i] = np.where(nibble & 8, replicated, byte)
        return out.view(np.uint32)[:, 0]

    def e4m3_to_f16(self, word: Word) -> tuple[Word, Word]:
        if not self.has_e4m3:
            from pallas_kernels.lanes import emulated_e4m3_to_f16

            return emulated_e4m3_to_f16(self, word)
        halves = _bytes(word).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
        words = np.ascontiguousarray(halves).view(np.uint32)
        return words[:, 0], words[:, 1]

    def mul_f16(self, a: Word, b: Word) -> Word:
        return _pairwise(np.multiply, np.float16, a, b)

    def add_f16(self, a: Word, b: Word) -> Word:
        return _pairwise(np.add, np.float16, a, b)

    def mul_bf16(self, a: Word, b: Word) -> Word:
        return _pairwise(np.multiply, ml_dtypes.bfloat16, a, b)

    def load(self, buffer: np.ndarray, offset: Word, nbytes: int) -> list[Word]:
        assert (offset % nbytes == 0).all(), "misaligned load"
        index = offset[:, None].astype(np.int64) + np.arange(nbytes)
        loaded = buffer[index]
        if nbytes == 2:
            return [loaded.view(np.uint16)[:, 0].astype(np.uint32)]
        return list(np.ascontiguousarray(loaded).view(np.uint32).T)


def _bytes(word: Word) -> np.ndarray:
    return np.ascontiguousarray(word)[:, None].view(np.uint8)


def _pairwise(op, dtype, a: Word, b: Word) -> Word:
    with np.errstate(all="ignore"):
        result = op(*(np.ascontiguousarray(x)[:, None].view(dtype) for x in (a, b)))
    return np.ascontiguousarray(result.astype(dtype)).view(np.uint32)[:, 0]


def gather_rows(rows: list[list[Word]], dim: int, dtype) -> np.ndarray:
    """The [64, dim] array whose wgmma registers `rows` are: two rows of dim / 8 registers."""
    out = np.zeros((64, dim), dtype)
    lanes = NumpyLanes()
    for half, registers in enumerate(rows):
        row = lanes.row(half)
        for tile, word in enumerate(registers):
            pair = np.ascontiguousarray(word)[:, None].view(dtype)
            for n in range(2):
                out[row, 8 * tile + 2 * lanes.quad() + n] = pair[:, n]
    return out


def shared_plane(plane: np.ndarray, is_swizzled: bool) -> np.ndarray:
    """The bytes of a [64, words] tile in shared memory, as the copy engine lays them out.

    Swizzled tiles are 8 rows by 128 bytes; 16-byte chunk c of row r goes to place c xor r.
    """
    raw = np.ascontiguousarray(plane).view(np.uint8).reshape(64, -1)
    if not is_swizzled:
        return raw.reshape(-1)
    atoms = raw.shape[1] // 128
    chunks = raw.reshape(8, 8, atoms, 8, 16).transpose(0, 2, 1, 3, 4)
    out = np.zeros_like(chunks)
    for r in range(8):
        for c in range(8):
            out[:, :, r, c ^ r] = chunks[:, :, r, c]
    return out.reshape(-1)
