"""Which head dim each matrix-multiply column holds when a lane decodes the bytes it loaded.

A lane of a wgmma operand holds columns 8 t + 2 q + n of its rows (t the column tile, q its place
among the four lanes of a row, n = 0 or 1). A lane loads a contiguous run of a row's bytes instead
of the bytes of its columns, so columns and head dims differ by a static permutation. It is applied
to q and to the output; pages never move.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxkv.formats import SideSpec

# Bytes of shared memory after which the banks repeat.
_BANK_BYTES = 128


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """How one row of codes is spread over the four lanes that decode it.

    Attributes:
      bits: bits of a code; 16 is not decoded and keeps its order.
      head_dim: elements of a row.
    """

    bits: int
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the first plane."""
        plane_bits = 2 if self.bits == 3 else self.bits
        return self.head_dim * plane_bits // 8

    @property
    def fields(self) -> int:
        """Codes that share a byte of the first plane."""
        return self.head_dim // self.row_bytes if self.bits < 8 else 1

    @property
    def pieces(self) -> int:
        """Contiguous runs that one lane loads from a row."""
        return max(1, self.row_bytes // _BANK_BYTES)

    @property
    def lane_bytes(self) -> int:
        """Bytes of the first plane that one lane decodes in each of its rows."""
        return self.row_bytes // 4

    @property
    def piece_bytes(self) -> int:
        """Bytes of one contiguous run."""
        return self.lane_bytes // self.pieces

    @property
    def is_swizzled(self) -> bool:
        """Whether rows fill all banks, so that the copy must swizzle them."""
        return self.row_bytes % _BANK_BYTES == 0

    def byte(self, quad: Any, index: Any) -> Any:
        """Position in the row of a lane's byte `index` (integers or integer arrays)."""
        piece, rest = index // self.piece_bytes, index % self.piece_bytes
        return piece * (self.row_bytes // self.pieces) + quad * self.piece_bytes + rest

    def dim(self, column: Any) -> Any:
        """Head dim that a column holds (integers or integer arrays)."""
        if self.bits == 16:
            return column
        tile, quad, n = column // 8, column % 8 // 2, column % 2
        if self.bits == 8:
            return self.byte(quad, 2 * tile + n)
        passes = self.fields // 2
        # A half word yields `passes` times two columns of one byte each.
        half_word, rest = tile // (2 * passes), tile % (2 * passes)
        which, k = rest // 2, rest % 2
        return (which + passes * n) * self.row_bytes + self.byte(quad, 2 * half_word + k)


@functools.cache
def _dims(bits: int, head_dim: int) -> tuple[int, ...]:
    dims = RowOrder(bits, head_dim).dim(np.arange(head_dim))
    assert sorted(dims) == list(range(head_dim))
    return tuple(int(d) for d in dims)


def dims_of_columns(spec: SideSpec) -> np.ndarray:
    """int32 [head_dim]: the head dim in each column of a decoded tile."""
    return np.asarray(_dims(spec.format.bits, spec.head_dim), np.int32)


def columns_of_dims(spec: SideSpec) -> np.ndarray:
    """int32 [head_dim]: the column of a decoded tile that holds each head dim."""
    return np.argsort(dims_of_columns(spec)).astype(np.int32)
