"""Runs compiled kernels without a GPU: an emulator of the PTX that the write kernels use.

Warps run one after another from barrier to barrier, in a chosen order, and shared memory that no
warp has written yet must not be used, so that a missing barrier shows. Misaligned and out-of-range
accesses raise. Instructions follow the PTX ISA
manual; an unknown one raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

LANES, WARPS = 32, 4
_SHARED_BYTES = 228 * 1024
_SYMBOLS = "__dynamic_shmem__0"
_TYPES = {
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "bf16": ml_dtypes.bfloat16,
}  # fmt: skip
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b), "gtu": lambda a, b: ~(a <= b),
}  # fmt: skip
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


class Instruction:
    """One PTX instruction: guard, opcode parts, operands."""

    def __init__(self, text: str) -> None:
        self.text = text
        guard = re.match(r"@(!?)(%\w+)\s+", text)
        self.guard = (guard[2], guard[1] == "!") if guard else None
        body = text[guard.end() :] if guard else text
        name, _, rest = body.partition(" ") if " " in body else body.partition("\t")
        self.parts = name.strip().split(".")
        self.operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int], int]:
    """(instructions, labels, number of parameters) of the one kernel in a module."""
    parameters = len(re.findall(r"^\s*\.param .*_param_\d+", ptx, re.M))
    body = ptx[ptx.index("\n{\n") + 3 : ptx.rindex("\n}")]
    body = re.sub(r"//.*", "", body)
    body = re.sub(r"^\s*\.(?:loc|file|reg|shared|pragma|section).*$", "", body, flags=re.M)
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in re.split(r";|(?<=:)\s*\n", body):
        text = " ".join(statement.split())
        while label := re.match(r"(\$\w+):\s*", text):
            labels[label[1]] = len(program)
            text = text[label.end() :]
        if text.endswith(":"):
            labels[text[:-1]] = len(program)
        elif text:
            program.append(Instruction(text))
    return program, labels, parameters


class Memory:
    """Global buffers at distinct addresses, with guards between them."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.bases: list[int] = []
        address = 1 << 20
        for array in arrays:
            self.bases.append(address)
            address += -(-array.nbytes // 256) * 256 + 4096
        self.bytes = np.zeros(address - (1 << 20), np.uint8)
        self.valid = np.zeros(self.bytes.size, bool)
        self.sizes = [(a.nbytes, a.dtype, a.shape) for a in arrays]
        for base, array in zip(self.bases, arrays):
            at = slice(base - (1 << 20), base - (1 << 20) + array.nbytes)
            self.bytes[at] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.valid[at] = True

    def array(self, index: int) -> np.ndarray:
        """A buffer's contents."""
        size, dtype, shape = self.sizes[index]
        start = self.bases[index] - (1 << 20)
        return self.bytes[start : start + size].view(dtype).reshape(shape)


class Warp:
    """32 lanes of one CTA."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.registers: dict[str, np.ndarray] = {}
        # Registers loaded from shared memory that nothing had written, and by what.
        self.undefined: dict[str, str] = {}
        self.pc = np.zeros(LANES, np.int64)
        self.done = False

    def run(self) -> None:
        """Runs to the next barrier or to the end."""
        program = self.cta.program
        while True:
            at = int(self.pc.min())
            mask = self.pc == at
            instruction = program[at]
            if instruction.parts[0] == "ret":
                assert mask.all(), "lanes left at different places"
                self.done = True
                return
            active = mask
            if instruction.guard:
                name, negate = instruction.guard
                active = mask & (self.registers[name].astype(bool) ^ negate)
            if instruction.parts[0] == "bra":
                self.pc[mask] = at + 1
                self.pc[active] = self.cta.labels[instruction.operands[0]]
                continue
            self.pc[mask] = at + 1
            if instruction.parts[0] == "bar":
                assert active.all(), "a barrier in divergent code"
                return
            self._execute(instruction, active)

    def _execute(self, instruction: Instruction, active: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            handler: Callable = getattr(self, "_" + instruction.parts[0])
            handler(instruction, active)

    # Operands.

    def _read(self, operand: str, type_: str) -> np.ndarray:
        dtype = _TYPES[type_]
        if operand.startswith("%"):
            if operand in self.cta.special:
                return np.full(LANES, self.cta.special[operand], dtype)
            if operand == "%tid.x":
                return (np.arange(LANES) + LANES * self.index).astype(dtype)
            self._check_defined(operand)
            raw = self.registers[operand]
            width = np.dtype(dtype).itemsize
            return raw.astype(_BITS[width]).view(dtype)
        if operand == _SYMBOLS:
            return np.zeros(LANES, dtype)
        if operand.startswith("0f"):
            return np.full(LANES, int(operand[2:], 16), np.uint32).view(dtype)
        if operand.startswith("0x") and np.issubdtype(dtype, np.inexact):
            width = np.dtype(dtype).itemsize
            return np.full(LANES, int(operand, 16), _BITS[width]).view(dtype)
        width = np.dtype(dtype).itemsize
        value = int(operand.rstrip("U"), 0) & ((1 << (8 * width)) - 1)
        return np.full(LANES, value, _BITS[width]).view(dtype)

    def _write(self, operand: str, value: np.ndarray, active: np.ndarray) -> None:
        if operand == "_":
            return
        self.undefined.pop(operand, None)
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(_BITS[value.dtype.itemsize]).astype(np.uint64)
        old = self.registers.get(operand)
        self.registers[operand] = (
            value if old is None or active.all() else np.where(active, value, old)
        )

    def _predicate(self, operand: str) -> np.ndarray:
        if not operand.lstrip("!").startswith("%"):
            return np.full(LANES, bool(int(operand, 0)))
        if operand.startswith("!"):
            return ~self.registers[operand[1:]].astype(bool)
        return self.registers[operand].astype(bool)

    # Arithmetic.

    def _binary(self, i: Instruction, active: np.ndarray, function: Callable) -> None:
        a, b = (self._read(o, i.parts[-1]) for o in i.operands[1:])
        self._write(i.operands[0], np.asarray(function(a, b), a.dtype), active)

    def _unary(self, i: Instruction, active: np.ndarray, function: Callable) -> None:
        a = self._read(i.operands[1], i.parts[-1])
        self._write(i.operands[0], np.asarray(function(a), a.dtype), active)

    def _logic(self, i: Instruction, active: np.ndarray, function: Callable) -> None:
        if i.parts[-1] == "pred":
            values = [self._predicate(o) for o in i.operands[1:]]
            self._write(i.operands[0], function(*values), active)
        else:
            self._binary(i, active, function)

    def _add(self, i, active):
        self._binary(i, active, np.add)

    def _sub(self, i, active):
        self._binary(i, active, np.subtract)

    def _and(self, i, active):
        self._logic(i, active, np.bitwise_and)

    def _or(self, i, active):
        self._logic(i, active, np.bitwise_or)

    def _xor(self, i, active):
        self._logic(i, active, np.bitwise_xor)

    def _not(self, i, active):
        if i.parts[-1] == "pred":
            self._write(i.operands[0], ~self._predicate(i.operands[1]), active)
        else:
            self._unary(i, active, np.invert)

    def _neg(self, i, active):
        self._unary(i, active, np.negative)

    def _abs(self, i, active):
        self._unary(i, active, np.abs)

    def _extreme(self, i, active, quiet, propagating):
        nan = "NaN" in i.parts or not np.issubdtype(_TYPES[i.parts[-1]], np.inexact)
        self._binary(i, active, propagating if nan else quiet)

    def _max(self, i, active):
        self._extreme(i, active, np.fmax, np.maximum)

    def _min(self, i, active):
        self._extreme(i, active, np.fmin, np.minimum)

    def _div(self, i, active):
        assert i.parts[1] == "rn", i.text
        self._binary(i, active, np.divide)

    def _sqrt(self, i, active):
        assert i.parts[1] == "rn", i.text
        self._unary(i, active, np.sqrt)

    def _rsqrt(self, i, active):
        self._unary(i, active, lambda a: 1 / np.sqrt(a.astype(np.float64)))

    def _shift(self, i, active, function):
        a = self._read(i.operands[1], i.parts[-1])
        count = np.minimum(self._read(i.operands[2], "b32"), 255).astype(np.int64)
        bits = 8 * a.dtype.itemsize
        wide = a.astype(np.int64 if np.issubdtype(a.dtype, np.signedinteger) else np.uint64)
        shifted = function(wide, np.minimum(count, 63).astype(wide.dtype))
        if np.issubdtype(a.dtype, np.unsignedinteger):
            shifted = np.where(count >= bits, 0, shifted)
        mask = np.uint64((1 << bits) - 1)
        raw = shifted.astype(np.uint64) & mask
        self._write(i.operands[0], raw.astype(_BITS[a.dtype.itemsize]), active)

    def _shl(self, i, active):
        self._shift(i, active, np.left_shift)

    def _shr(self, i, active):
        self._shift(i, active, np.right_shift)

    def _bfe(self, i, active):
        """Bit field extract; the signed form extends the field's top bit."""
        a = self._read(i.operands[1], "u32").astype(np.int64)
        start, length = (self._read(o, "u32").astype(np.int64) & 255 for o in i.operands[2:])
        start, length = np.minimum(start, 32), np.minimum(length, 32)
        field = (a >> start) & ((np.int64(1) << length) - 1)
        if i.parts[-1] == "s32":
            top = np.minimum(start + length - 1, 31)
            negative = (length > 0) & (((a >> np.maximum(top, 0)) & 1) == 1)
            taken = np.clip(32 - start, 0, length)
            field = np.where(negative, field | (np.int64(-1) << taken), field)
        self._write(i.operands[0], (field & 0xFFFFFFFF).astype(np.uint32), active)

    def _product(self, i: Instruction) -> np.ndarray:
        type_ = i.parts[-1]
        a, b = (self._read(o, type_) for o in i.operands[1:3])
        if "wide" in i.parts:
            wide = {"u32": np.uint64, "s32": np.int64, "u16": np.uint32, "s16": np.int32}[type_]
            return a.astype(wide) * b.astype(wide)
        return a * b

    def _mul(self, i, active):
        assert "hi" not in i.parts, i.text
        self._write(i.operands[0], self._product(i), active)

    def _mad(self, i, active):
        product = self._product(i)
        third = self._read(i.operands[3], f"b{8 * product.dtype.itemsize}").view(product.dtype)
        self._write(i.operands[0], product + third, active)

    def _fma(self, i, active):
        a, b, c = (self._read(o, "f32").astype(np.float64) for o in i.operands[1:])
        self._write(i.operands[0], (a * b + c).astype(np.float32), active)

    def _setp(self, i, active):
        a, b = (self._read(o, i.parts[-1]) for o in i.operands[1:3])
        result = _COMPARE[i.parts[1]](a, b)
        if i.parts[2] in _JOIN:
            result = _JOIN[i.parts[2]](result, self._predicate(i.operands[3]))
        self._write(i.operands[0], np.asarray(result, bool), active)

    def _selp(self, i, active):
        a, b = (self._read(o, i.parts[-1]) for o in i.operands[1:3])
        self._write(i.operands[0], np.where(self._predicate(i.operands[3]), a, b), active)

    def _prmt(self, i, active):
        a, b, selector = (self._read(o, "b32") for o in i.operands[1:])
        pool = np.stack([(w >> np.uint32(8 * k)) & 255 for w in (a, b) for k in range(4)])
        result = np.zeros(LANES, np.uint32)
        for k in range(4):
            nibble = (selector >> np.uint32(4 * k)) & 15
            byte = np.take_along_axis(pool, (nibble & 7)[None].astype(np.int64), 0)[0]
            byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
            result |= byte << np.uint32(8 * k)
        self._write(i.operands[0], result, active)

    def _cvt(self, i, active):
        source = i.parts[-1]
        target = i.parts[-2]
        if target == "bf16x2":
            high, low = (self._read(o, "f32").astype(ml_dtypes.bfloat16) for o in i.operands[1:])
            halves = [x.view(np.uint16).astype(np.uint32) for x in (high, low)]
            self._write(i.operands[0], (halves[0] << 16) | halves[1], active)
            return
        a = self._read(i.operands[1], source)
        if "rni" in i.parts:
            a = np.rint(a)
        elif "rzi" in i.parts:
            a = np.trunc(a)
        self._write(i.operands[0], a.astype(_TYPES[target]), active)

    def _cvta(self, i, active):
        self._mov(i, active)

    def _mov(self, i, active):
        to, value = i.operands
        if i.parts[-1] == "pred":
            self._write(to, self._predicate(value), active)
            return
        size = np.dtype(_TYPES[i.parts[-1]]).itemsize
        if to.startswith("{"):
            names = _names(to)
            part = 8 * size // len(names)
            raw = self._read(value, f"b{8 * size}")
            for k, name in enumerate(names):
                piece = (raw >> np.asarray(part * k, raw.dtype)).astype(_BITS[part // 8])
                self._write(name, piece, active)
        elif value.startswith("{"):
            names = _names(value)
            part = 8 * size // len(names)
            raw = np.zeros(LANES, _BITS[size])
            for k, name in enumerate(names):
                piece = self._read(name, f"b{part}").astype(raw.dtype)
                raw |= piece << np.asarray(part * k, raw.dtype)
            self._write(to, raw, active)
        else:
            self._write(to, self._read(value, i.parts[-1]), active)

    # Warp-wide.

    def _elect(self, i, active):
        leader, predicate = i.operands[0].split("|")
        first = int(np.flatnonzero(active)[0])
        self._write(leader, np.full(LANES, first, np.uint32), active)
        self._write(predicate, np.arange(LANES) == first, active)

    def _shfl(self, i, active):
        assert active.all(), "a shuffle in divergent code"
        value, by = self._read(i.operands[1], "b32"), self._read(i.operands[2], "b32")
        lane = np.arange(LANES)
        source = {"bfly": lane ^ by, "idx": by}[i.parts[2]]
        self._write(i.operands[0].split("|")[0], value[source.astype(np.int64) % LANES], active)

    def _fence(self, i, active):
        pass

    # Memory.

    def _address(self, operand: str) -> tuple[str, np.ndarray]:
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        raw = self._read(base, "b64").astype(np.int64)
        return base, raw + (int(offset, 0) if offset else 0)

    def _space(self, i: Instruction) -> tuple[np.ndarray, np.ndarray, int]:
        if "shared" in i.parts:
            return self.cta.shared, self.cta.shared_valid, 0
        return self.cta.memory.bytes, self.cta.memory.valid, 1 << 20

    def _reach(self, i, addresses, size, active):
        """Index of each byte [lanes, size], after checks."""
        _, valid, origin = self._space(i)
        used = addresses[active]
        assert not (used % size).any(), f"misaligned: {i.text}"
        index = (used - origin)[:, None] + np.arange(size)
        assert (index >= 0).all() and (index < valid.size).all() and valid[index].all(), (
            f"out of range: {i.text}"
        )
        return index

    def _check_defined(self, name):
        assert name not in self.undefined, f"read before it was written: {self.undefined[name]}"

    def _mark_undefined(self, i, index, names):
        """jax 0.11 loads what a store replaces and drops it: only a use is an error."""
        if "shared" in i.parts and not self.cta.shared_written[index].all():
            self.undefined.update(dict.fromkeys(names, i.text))

    def _ld(self, i, active):
        width = np.dtype(_TYPES[i.parts[-1]]).itemsize
        if any(part.startswith("param") for part in i.parts):
            number = int(re.search(r"_param_(\d+)", i.operands[1])[1])
            base = np.full(LANES, self.cta.memory.bases[number], np.uint64)
            self._write(i.operands[0], base, active)
            return
        names = _names(i.operands[0])
        _, addresses = self._address(i.operands[1])
        index = self._reach(i, addresses, width * len(names), active)
        data = self._space(i)[0][index]
        for k, name in enumerate(names):
            value = np.zeros(LANES, _BITS[width])
            piece = np.ascontiguousarray(data[:, k * width : (k + 1) * width])
            value[active] = piece.view(_BITS[width])[:, 0]
            self._write(name, value, active)
        self._mark_undefined(i, index, names)

    def _st(self, i, active):
        width = np.dtype(_TYPES[i.parts[-1]]).itemsize
        names = _names(i.operands[1])
        _, addresses = self._address(i.operands[0])
        index = self._reach(i, addresses, width * len(names), active)
        for k, name in enumerate(names):
            value = self._read(name, f"b{8 * width}")[active]
            piece = np.ascontiguousarray(value).view(np.uint8).reshape(-1, width)
            self._space(i)[0][index[:, k * width : (k + 1) * width]] = piece
        if "shared" in i.parts:
            self.cta.shared_written[index] = True

    def _ldmatrix(self, i, active):
        assert active.all() and "trans" not in i.parts, i.text
        _, addresses = self._address(i.operands[1])
        for k, name in enumerate(_names(i.operands[0])):
            rows = addresses[8 * k : 8 * k + 8]
            index = self._reach(i, rows, 16, np.ones(8, bool))
            self._write(name, self.cta.shared[index].reshape(-1).view(np.uint32), active)
            self._mark_undefined(i, index, [name])

    def _stmatrix(self, i, active):
        assert active.all() and "trans" not in i.parts, i.text
        _, addresses = self._address(i.operands[0])
        for k, name in enumerate(_names(i.operands[1])):
            rows = addresses[8 * k : 8 * k + 8]
            index = self._reach(i, rows, 16, np.ones(8, bool))
            value = np.ascontiguousarray(self._read(name, "b32")).view(np.uint8)
            self.cta.shared[index] = value.reshape(8, 16)
            self.cta.shared_written[index] = True


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


class Cta:
    """One program of the grid."""

    def __init__(
        self,
        program: list[Instruction],
        labels: dict[str, int],
        memory: Memory,
        index: tuple[int, int, int],
    ) -> None:
        self.program, self.labels, self.memory = program, labels, memory
        self.shared = np.zeros(_SHARED_BYTES, np.uint8)
        self.shared_valid = np.ones(_SHARED_BYTES, bool)
        self.shared_written = np.zeros(_SHARED_BYTES, bool)
        self.special = {f"%ctaid.{axis}": value for axis, value in zip("xyz", index)}

    def run(self, order: Sequence[int]) -> None:
        """Runs the warps in this order between barriers."""
        warps = [Warp(self, w) for w in range(WARPS)]
        while not all(warp.done for warp in warps):
            for w in order:
                if not warps[w].done:
                    warps[w].run()
            assert len({warp.done for warp in warps}) == 1, "warps left at different barriers"


def run_kernel(
    ptx: str, arrays: Sequence[np.ndarray], grid: tuple[int, int, int], order: Sequence[int]
) -> list[np.ndarray]:
    """Runs a kernel.

    Args:
      ptx: a module with one kernel.
      arrays: its buffers, in the order of its parameters.
      grid: programs along x, y and z.
      order: in which warps run between barriers.

    Returns:
      The buffers afterwards.
    """
    program, labels, parameters = parse(ptx)
    assert parameters == len(arrays), (parameters, len(arrays))
    memory = Memory(arrays)
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                Cta(program, labels, memory, (x, y, z)).run(order)
    return [memory.array(i).copy() for i in range(len(arrays))]
