"""Correctly rounded division and square root.

The GPU compiler of XLA turns f32 division into `div.full.f32`, 2 ulp wide, and square roots into
`sqrt.approx.f32`. A code decided by such a quotient would differ from the codec's now and then, so
these two are written as PTX. The interpreter, which cannot run PTX, rounds correctly by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import fragmented_array, ir, llvm, plgpu, vector
from pallas_kernels.write.tiles import Tile

# Applies one instruction to the registers of one thread.
Emit = Callable[..., Any]


def divide(x: jax.Array, y: jax.Array, tile: Tile) -> jax.Array:
    """X / y rounded to nearest; both f32 of the tile's shape, or of one value per group."""
    return x / y if tile.interpreted else _elementwise("div.rn.f32", tile, x, y)


def sqrt(x: jax.Array, tile: Tile) -> jax.Array:
    """The square root of x rounded to nearest; f32, one value per group."""
    return jnp.sqrt(x) if tile.interpreted else _elementwise("sqrt.rn.f32", tile, x)


def _elementwise(instruction: str, tile: Tile, *operands: jax.Array) -> jax.Array:
    shape = operands[0].shape
    layout = tile.grouped if len(shape) == len(tile.shape) else tile.grouped.reduce(3)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(operands),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype("float32"), layout=layout),
    )
    def build(ctx: Any, *arrays: Any) -> Any:
        del ctx
        emit = _emit_ptx(instruction, len(arrays))
        return fragmented_array(map_registers(emit, [a.registers for a in arrays]), layout)

    return build(*operands)


def map_registers(emit: Emit, operands: list[np.ndarray]) -> np.ndarray:
    """Applies an instruction to corresponding registers of the operands."""
    result = np.empty_like(operands[0])
    for index in np.ndindex(result.shape):
        result[index] = emit(*(registers[index] for registers in operands))
    return result


def _emit_ptx(instruction: str, operands: int) -> Emit:
    text = f"{instruction} " + ", ".join(f"${i}" for i in range(operands + 1)) + ";"
    constraints = ",".join(["=f"] + ["f"] * operands)

    def emit(*registers: Any) -> Any:
        scalar = ir.F32Type.get()
        values = [vector.extract(r, [], [0]) for r in registers]
        result = llvm.inline_asm(scalar, values, text, constraints)
        return vector.broadcast(ir.VectorType.get((1,), scalar), result)

    return emit
