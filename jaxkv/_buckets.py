"""Sizes rounded up to powers of two, so that few shapes are compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bucket(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def padded(ids: Sequence[int] | np.ndarray, fill: int, least: int = 1) -> np.ndarray:
    """Ids as int32, filled up to the next bucket."""
    filled = np.full(bucket(len(ids), least), fill, np.int32)
    filled[: len(ids)] = ids
    return filled
