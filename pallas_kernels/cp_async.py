"""Copies from device to shared memory on GPUs before Hopper (cp.async), placed as TMA places them.

A tile's rows go 16 bytes at a time, in the swizzle that decoding and matrix products expect.
Groups of copies are waited for by count.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import (
    arith,
    fragmented_array,
    ir,
    llvm,
    plgpu,
    shared_pointer,
    warpgroup_barrier,
)
from pallas_kernels.lanes import MlirLanes

_CHUNK = 16
_THREADS = 128


def copy_rows(
    source: Any, target: Any, transforms: tuple[Any, ...], first_row: int, rows: int, columns: int
) -> None:
    """Starts copying rows of a page into rows of a tile.

    Args:
      source: reference to [rows, columns] in device memory, rows contiguous or not.
      target: reference to a tile in shared memory; its rows are `columns` wide.
      transforms: of the target; swizzled over 128 bytes where there are any.
      first_row: row of the tile at which to begin.
      rows: rows to copy.
      columns: elements of a row, a multiple of 16 bytes.
    """
    row_bytes = columns * np.dtype(source.dtype).itemsize
    chunks = row_bytes // _CHUNK

    def build(context: Any, source: Any, target: Any) -> Any:
        del context
        lanes = MlirLanes(has_e4m3=False)
        stride = _row_stride_bytes(source, row_bytes)
        thread = lanes.thread()
        for first in range(0, rows * chunks, _THREADS):
            index = lanes.add(thread, lanes.const(first))
            row, chunk = _divide(lanes, index, chunks)
            place = _place(
                lanes, lanes.add(row, lanes.const(first_row)), chunk, row_bytes, transforms
            )
            offset = lanes.add(
                lanes.mul(row, lanes.const(stride)), lanes.mul(chunk, lanes.const(_CHUNK))
            )
            limit = rows * chunks if first + _THREADS > rows * chunks else None
            _copy_chunk(lanes, source, offset, target, place, index, limit)
        return _nothing()

    types = (plgpu.RefType(), plgpu.RefType(transforms))
    plgpu.inline_mgpu(arg_types=types, return_type=_NOTHING)(build)(source, target)


def commit_group() -> None:
    """Ends a group of copies."""
    _emit("cp.async.commit_group;")


def wait_groups(in_flight: int) -> None:
    """Waits until at most `in_flight` groups are unfinished, and for all warps."""
    _emit(f"cp.async.wait_group {in_flight};", barrier=True)


def barrier() -> None:
    """Waits for all warps."""
    _emit(None, barrier=True)


# Lane programs must return something.
_NOTHING = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))


def _nothing() -> Any:
    i32 = ir.IntegerType.get_signless(32)
    zero = arith.constant(i32, ir.IntegerAttr.get(i32, 0))
    registers = np.empty((), dtype=object)
    registers[()] = zero
    return fragmented_array(registers, plgpu.Layout.WG_SPLAT(()), is_signed=True)


def _emit(text: str | None, barrier: bool = False) -> None:
    def build(context: Any) -> Any:
        del context
        if text is not None:
            _asm(text, [], "~{memory}")
        if barrier:
            warpgroup_barrier()
        return _nothing()

    plgpu.inline_mgpu(arg_types=(), return_type=_NOTHING)(build)()


def _asm(text: str, operands: list[Any], constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True)


def _row_stride_bytes(source: Any, row_bytes: int) -> int:
    strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
    itemsize = row_bytes // ir.MemRefType(source.type).shape[-1]
    return int(strides[0]) * itemsize


def _divide(lanes: Any, index: Any, divisor: int) -> tuple[Any, Any]:
    """(quotient, remainder) by a power of two."""
    log = divisor.bit_length() - 1
    assert divisor == 1 << log, f"rows of {divisor} chunks"
    return lanes.shift_right(index, log), lanes.bit_and(index, lanes.const(divisor - 1))


def _place(lanes: Any, row: Any, chunk: Any, row_bytes: int, transforms: tuple[Any, ...]) -> Any:
    """Byte offset in the tile of a 16-byte chunk of a row."""
    if not transforms:
        return lanes.add(
            lanes.mul(row, lanes.const(row_bytes)), lanes.mul(chunk, lanes.const(_CHUNK))
        )
    row_in_atom = lanes.bit_and(row, lanes.const(7))
    atom = lanes.add(
        lanes.mul(lanes.shift_right(row, 3), lanes.const(8 * row_bytes)),
        lanes.mul(lanes.shift_right(chunk, 3), lanes.const(1024)),
    )
    column = lanes.bit_xor(lanes.bit_and(chunk, lanes.const(7)), row_in_atom)
    line = lanes.add(lanes.shift_right(row_in_atom, -7), lanes.shift_right(column, -4))
    return lanes.add(atom, line)


def _copy_chunk(
    lanes: Any, source: Any, offset: Any, target: Any, place: Any, index: Any, limit: int | None
) -> None:
    i64 = ir.IntegerType.get_signless(64)
    start = llvm.ptrtoint(i64, shared_pointer(source))
    address = arith.addi(start, arith.extui(i64, offset))
    i32 = ir.IntegerType.get_signless(32)
    to = arith.addi(llvm.ptrtoint(i32, shared_pointer(target)), place)
    copy = "cp.async.cg.shared.global [$0], [$1], 16;"
    if limit is None:
        _asm(copy, [to, address], "r,l,~{memory}")
        return
    guarded = f"{{ .reg .pred p; setp.lt.u32 p, $2, $3; @p {copy} }}"
    _asm(guarded, [to, address, index, lanes.const(limit)], "r,l,r,r,~{memory}")
