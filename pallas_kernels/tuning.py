"""Static choices of the attention kernels, one table of defaults, checked when made."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxkv.formats import SideSpec

Path = Literal["wgmma", "mma"]

ROWS = (8, 16, 32, 64, 128)
# Shared memory that one CTA may use on Hopper, less what the compiler reserves.
SHARED_BYTES = 227 * 1024 - 2048
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
        `default_split_tokens`.
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


def default_tuning(k_spec: SideSpec, v_spec: SideSpec, query_rows: int) -> Tuning:
    """The tuning of these formats and this many query rows of one sequence and KV head."""
    widest = max(k_spec.head_dim, v_spec.head_dim)
    most = 32 if widest > 128 else 64
    rows = next((rows for rows in ROWS if query_rows <= rows <= most), most)
    return Tuning(rows=rows, key_in_registers=rows <= 16)
