"""The one place that knows what differs between jax versions in the Mosaic GPU front end.

It also gathers the lower-level names (MLIR dialects, fragmented arrays) that inline kernel code
needs, so that no other module imports them by path.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as _mgpu
from jax.experimental.mosaic.gpu import utils as _utils
from jax.experimental.pallas import mosaic_gpu as _plgpu
from jaxlib.mlir import ir as _ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import gpu as _gpu
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import vector as _vector

# Untyped: their stubs lag behind what they accept.
arith: Any = _arith
gpu_dialect: Any = _gpu
ir: Any = _ir
llvm: Any = _llvm
mgpu: Any = _mgpu
plgpu: Any = _plgpu
vector: Any = _vector

__all__ = [
    "arith",
    "compute_capability",
    "fragmented_array",
    "gpu_dialect",
    "ir",
    "llvm",
    "mgpu",
    "plgpu",
    "shared_pointer",
    "store",
    "vector",
    "warpgroup_barrier",
]


def store(ref: Any, value: jax.Array) -> None:
    """Stores registers to global or shared memory in whatever access width their layout allows."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # 0.11.2 has only the indexed form.
        ref[...] = value


def shared_pointer(ref: Any) -> Any:
    """The LLVM pointer to the first byte of a shared-memory reference."""
    return _utils.memref_ptr(ref)


def warpgroup_barrier() -> None:
    """Inside a lane program: waits for the four warps of the warpgroup."""
    _utils.warpgroup_barrier()


def fragmented_array(registers: np.ndarray, layout: Any, is_signed: bool | None = None) -> Any:
    """A register array from its registers, in a layout of `plgpu.Layout`."""
    return _mgpu.FragmentedArray(
        _registers=registers, _layout=layout.to_mgpu(), _is_signed=is_signed
    )


def compute_capability() -> tuple[int, int]:
    """The compute capability that kernels are being lowered for."""
    major, minor = _utils._infer_arch()
    return major, minor
