"""Static choices of the attention kernels, one table of defaults, checked when made."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from pallas_kernels.sides import Side

Path = Literal["wgmma", "mma"]

ROWS = (8, 16, 32, 64)
# Shared memory that one CTA may use, less what the compiler reserves: Hopper, and the A100.
_SHARED_BYTES = {"wgmma": 227 * 1024 - 1024, "mma": 163 * 1024 - 1024}
# By path and the larger head_dim: the most query rows whose accumulators leave registers for
# decoding. 64 rows on Hopper take the prefill kernel; at head_dim 256 its outputs would spill.
_MOST_ROWS = {
    "wgmma": {64: 64, 128: 64, 256: 32},
    "mma": {64: 64, 128: 32, 256: 16},
}
_STAGES = (3, 2)
PREFILL_ROWS = 64
# Decoded keys of that many rows and fewer fit beside the accumulators.
_KEYS_IN_REGISTERS_ROWS = 16
# CTAs that fill a large GPU twice over; what a batch of one is split for.
_TARGET_CTAS = 256
_MIN_SPLIT_TOKENS = 512
_TILE = 64


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How an attention kernel is built.

    Attributes:
      path: "wgmma" (Hopper) or "mma" (Ampere and later).
      rows: query rows (tokens times group) of one CTA.
      stages: tiles in the ring of copies in flight.
      split_tokens: context tokens of one CTA, a multiple of 64; None follows
        `splits_of`.
      key_in_registers: whether decoded keys go to the matrix multiply from registers rather than
        through shared memory.
    """

    path: Path = "wgmma"
    rows: int = 8
    stages: int = 3
    split_tokens: int | None = None
    key_in_registers: bool = True

    def __post_init__(self) -> None:
        if self.path not in ("wgmma", "mma"):
            raise ValueError(f"path: got {self.path!r}, expected 'wgmma' or 'mma'")
        if self.rows not in ROWS:
            raise ValueError(f"rows: got {self.rows}, expected one of {ROWS}")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}, expected at least 2")
        if self.split_tokens is not None and (self.split_tokens <= 0 or self.split_tokens % _TILE):
            raise ValueError(
                f"split_tokens: got {self.split_tokens}, expected a positive multiple of {_TILE}"
            )


def splits_of(
    tuning: Tuning, table_tokens: int, num_kv_heads: int, window: int | None, is_decode: bool
) -> tuple[int, int]:
    """How a context is split over CTAs: (parts, 64-token tiles of a part).

    A function of table width, heads and window, never of the batch, so that a sequence's result
    does not depend on what else is in the step.

    Args:
      tuning: may fix the tokens of a part.
      table_tokens: tokens that a row of the block table can hold.
      num_kv_heads: KV heads.
      window: keys that a query sees, or None.
      is_decode: whether there are few queries a sequence; many fill the GPU by themselves.
    """
    table_tiles = -(-table_tokens // _TILE)
    if not is_decode and tuning.split_tokens is None:
        return 1, table_tiles
    tiles = table_tiles
    if window is not None:
        # The windows of a row block begin one token after another, and anywhere in a tile.
        tiles = min(tiles, -(-(window + tuning.rows) // _TILE) + 1)
    if tuning.split_tokens is not None:
        split_tiles = tuning.split_tokens // _TILE
    else:
        wanted = min(-(-_TARGET_CTAS // num_kv_heads), tiles * _TILE // _MIN_SPLIT_TOKENS)
        split_tiles = -(-tiles // max(1, wanted))
    return -(-tiles // split_tiles), split_tiles


def shared_bytes(k: Side, v: Side, tuning: Tuning) -> int:
    """Shared memory of a CTA of these sides, in bytes, before alignment."""
    arrays = k.scratch_shapes(tuning.stages) + v.scratch_shapes(tuning.stages)
    itemsize = 2
    total = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    total += tuning.rows * itemsize * (k.spec.head_dim + _TILE)
    if tuning.path == "wgmma" and tuning.rows < PREFILL_ROWS:
        total += tuning.rows * v.spec.head_dim * 4
    tiles = [v] * v.is_decoded + [k] * (k.is_decoded and not tuning.key_in_registers)
    return total + sum(_TILE * side.spec.head_dim * itemsize for side in tiles)


def check_tuning(k: Side, v: Side, tuning: Tuning) -> None:
    """Raises ValueError where a CTA would need more shared memory than there is."""
    need, have = shared_bytes(k, v, tuning), _SHARED_BYTES[tuning.path]
    if need > have:
        raise ValueError(f"tuning: needs {need} bytes of shared memory, {have} are there: {tuning}")


def default_tuning(k: Side, v: Side, query_rows: int, path: Path) -> Tuning:
    """The tuning of these sides and this many query rows of one sequence and KV head."""
    most = _MOST_ROWS[path][max(k.spec.head_dim, v.spec.head_dim)]
    fewest = 16 if path == "mma" else 8  # cp.async spreads four 8-row tiles over the warps.
    wanted = next((rows for rows in ROWS if max(query_rows, fewest) <= rows <= most), most)
    for rows in (r for r in reversed(ROWS) if r <= wanted):
        # A prefill tile is worked on for long: two hide the copies, and leave room for a CTA more.
        for stages in _STAGES[1:] if rows == PREFILL_ROWS else _STAGES:
            tuning = Tuning(path, rows, stages, None, rows <= _KEYS_IN_REGISTERS_ROWS)
            if shared_bytes(k, v, tuning) <= _SHARED_BYTES[path]:
                return tuning
    raise NotImplementedError(f"no tuning of {k.spec} and {v.spec} fits shared memory")
