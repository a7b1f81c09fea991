"""Lane-level instructions: what one thread of a warpgroup does with 32-bit registers.

Dequantization is written against `Lanes`, one method an instruction, so that the same builder
emits PTX through `MlirLanes` and runs, register for register, in the emulator of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, override

import numpy as np

from pallas_kernels._compat import arith, gpu_dialect, ir, llvm, shared_pointer, vector

# A 32-bit register: an MLIR value, or a uint32 array of 128 lanes in the emulator.
Word = Any
# A buffer in shared memory, opaque to the builder.
Buffer = Any


class Lanes(Protocol):
    """Instructions of one lane. Rows and columns follow the wgmma register layout.

    Attributes:
      has_e4m3: whether the target converts E4M3 in hardware (sm_89 and later).
    """

    has_e4m3: bool

    def quad(self) -> Word:
        """Position among the four lanes that share a row, 0 to 3."""

    def row(self, half: int) -> Word:
        """Row of the 64-row tile whose registers this lane holds; half 1 is 8 rows below half 0."""

    def const(self, value: int) -> Word:
        """A 32-bit constant."""

    def opaque(self, word: Word) -> Word:
        """The same word, in a way that keeps a loop invariant in a register.

        The compiler would rather compute it again in every iteration.
        """

    def add(self, a: Word, b: Word) -> Word:
        """Integer sum."""

    def mul(self, a: Word, b: Word) -> Word:
        """Low 32 bits of the integer product."""

    def bit_and(self, a: Word, b: Word) -> Word:
        """Bitwise and."""

    def bit_or(self, a: Word, b: Word) -> Word:
        """Bitwise or."""

    def bit_xor(self, a: Word, b: Word) -> Word:
        """Bitwise exclusive or."""

    def shift_right(self, a: Word, count: Word | int) -> Word:
        """Logical shift; a negative static count shifts left."""

    def mask_between(self, low: Word | None, a: Word, high: Word) -> Word:
        """All ones where low <= a < high (signed; no low, no lower bound), else 0."""

    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        """PTX prmt: byte i is byte (selector nibble i) of the eight bytes b:a."""

    def e4m3_to_f16(self, word: Word) -> tuple[Word, Word]:
        """Four E4M3 bytes as two registers of two f16, lowest bytes first."""

    def mul_f16(self, a: Word, b: Word) -> Word:
        """Product of two f16 pairs."""

    def add_f16(self, a: Word, b: Word) -> Word:
        """Sum of two f16 pairs."""

    def mul_bf16(self, a: Word, b: Word) -> Word:
        """Product of two bf16 pairs."""

    def load(self, buffer: Buffer, offset: Word, nbytes: int) -> list[Word]:
        """Loads 2 (zero-extended), 4, 8 or 16 aligned bytes at a byte offset as 32-bit words."""


class MlirLanes(Lanes):
    """`Lanes` that emit MLIR, with one-instruction PTX where MLIR has no name for it."""

    def __init__(self, has_e4m3: bool, opaque_zero: Word | None = None) -> None:
        """Starts emitting at the current insertion point.

        Args:
          has_e4m3: whether the target converts E4M3 in hardware (sm_89 and later).
          opaque_zero: a register that holds 0, unknown to the compiler.
        """
        self._zero = opaque_zero
        self._i32 = ir.IntegerType.get_signless(32)
        self.has_e4m3 = has_e4m3
        thread = arith.index_cast(self._i32, gpu_dialect.thread_id(gpu_dialect.Dimension.x))
        self._thread = self.bit_and(thread, self.const(127))
        self._lane = self.bit_and(thread, self.const(31))
        self._warp = self.bit_and(self.shift_right(thread, 5), self.const(3))

    def thread(self) -> Word:
        """Position in the warpgroup, 0 to 127."""
        return self._thread

    @override
    def quad(self) -> Word:
        return self.bit_and(self._lane, self.const(3))

    @override
    def row(self, half: int) -> Word:
        first = self.add(self.shift_right(self._warp, -4), self.shift_right(self._lane, 2))
        return self.add(first, self.const(8)) if half else first

    @override
    def const(self, value: int) -> Word:
        signed = int(np.uint32(value).view(np.int32))
        return arith.constant(self._i32, ir.IntegerAttr.get(self._i32, signed))

    @override
    def opaque(self, word: Word) -> Word:
        return word if self._zero is None else self.bit_xor(word, self._zero)

    @override
    def add(self, a: Word, b: Word) -> Word:
        return arith.addi(a, b)

    @override
    def mul(self, a: Word, b: Word) -> Word:
        return arith.muli(a, b)

    @override
    def bit_and(self, a: Word, b: Word) -> Word:
        return arith.andi(a, b)

    @override
    def bit_or(self, a: Word, b: Word) -> Word:
        return arith.ori(a, b)

    @override
    def bit_xor(self, a: Word, b: Word) -> Word:
        return arith.xori(a, b)

    @override
    def shift_right(self, a: Word, count: Word | int) -> Word:
        if not isinstance(count, int):
            return arith.shrui(a, count)
        if count == 0:
            return a
        shift = arith.shrui if count > 0 else arith.shli
        return shift(a, self.const(abs(count)))

    @override
    def mask_between(self, low: Word | None, a: Word, high: Word) -> Word:
        inside = arith.cmpi(arith.CmpIPredicate.slt, a, high)
        if low is not None:
            inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sge, a, low))
        return arith.select(inside, self.const(0xFFFFFFFF), self.const(0))

    @override
    def permute(self, a: Word, b: Word, selector: Word) -> Word:
        return llvm.inline_asm(self._i32, [a, b, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")

    @override
    def e4m3_to_f16(self, word: Word) -> tuple[Word, Word]:
        if not self.has_e4m3:
            return emulated_e4m3_to_f16(self, word)
        pair = llvm.StructType.get_literal([self._i32, self._i32])
        both = llvm.inline_asm(
            pair,
            [word],
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
            "=r,=r,r",
        )
        return tuple(llvm.extractvalue(self._i32, both, (k,)) for k in range(2))

    @override
    def mul_f16(self, a: Word, b: Word) -> Word:
        return self._binary(arith.mulf, ir.F16Type.get(), a, b)

    @override
    def add_f16(self, a: Word, b: Word) -> Word:
        return self._binary(arith.addf, ir.F16Type.get(), a, b)

    @override
    def mul_bf16(self, a: Word, b: Word) -> Word:
        return self._binary(arith.mulf, ir.BF16Type.get(), a, b)

    @override
    def load(self, buffer: Buffer, offset: Word, nbytes: int) -> list[Word]:
        base = shared_pointer(buffer)
        dynamic = int(np.int32(-(2**31)))
        i8 = ir.IntegerType.get_signless(8)
        pointer = llvm.getelementptr(base.type, base, [offset], [dynamic], i8, None)
        if nbytes == 2:
            i16 = ir.IntegerType.get_signless(16)
            return [arith.extui(self._i32, llvm.load(i16, pointer, alignment=2))]
        words = nbytes // 4
        loaded = llvm.load(ir.VectorType.get((words,), self._i32), pointer, alignment=nbytes)
        return [vector.extract(loaded, [], [i]) for i in range(words)]

    def as_pair(self, word: Word, element: Any) -> Any:
        """A register as a vector of two 16-bit floats."""
        one = ir.VectorType.get((1,), self._i32)
        return vector.bitcast(ir.VectorType.get((2,), element), vector.broadcast(one, word))

    def _binary(self, op: Any, element: Any, a: Word, b: Word) -> Word:
        result = op(self.as_pair(a, element), self.as_pair(b, element))
        one = ir.VectorType.get((1,), self._i32)
        return vector.extract(vector.bitcast(one, result), [], [0])


def emulated_e4m3_to_f16(lanes: Lanes, word: Word) -> tuple[Word, Word]:
    """E4M3 to f16 by bits, exactly, subnormals and NaN included.

    The bits of an E4M3 number, moved to the top of an f16, read as the number times 2^-8.
    """
    exponent_gap = lanes.const(0x5C005C00)  # 2^8, twice
    magnitude = lanes.bit_and(word, lanes.const(0x7F7F7F7F))
    carry = lanes.add(magnitude, lanes.const(0x01010101))
    is_nan = lanes.bit_and(carry, lanes.const(0x80808080))
    out = []
    for selector in (0x1404, 0x3424):
        spread = lanes.permute(word, lanes.const(0), lanes.const(selector))
        sign = lanes.bit_and(spread, lanes.const(0x80008000))
        rest = lanes.bit_and(lanes.shift_right(spread, 1), lanes.const(0x3F803F80))
        value = lanes.mul_f16(lanes.bit_or(sign, rest), exponent_gap)
        nan = lanes.permute(is_nan, lanes.const(0), lanes.const(selector))
        nan_bits = lanes.mul(lanes.shift_right(nan, 9), lanes.const(0x1F8))  # 0x8000 to 0x7E00
        out.append(lanes.bit_or(value, nan_bits))
    return out[0], out[1]


def by_quad(lanes: Lanes, values: Sequence[int]) -> Word:
    """The value of this lane's position in its quad, from four static values below 256."""
    if len(set(values)) == 1:
        return lanes.const(values[0])
    packed = sum(v << (8 * i) for i, v in enumerate(values))
    shift = lanes.shift_right(lanes.quad(), -3)
    return lanes.bit_and(lanes.shift_right(lanes.const(packed), shift), lanes.const(255))
