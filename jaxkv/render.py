"""`render`: who holds which block, as text in a terminal and as a picture in a notebook."""

from __future__ import annotations

import dataclasses
import html
import string
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxkv.cache import PagedCache

# Owners of a block that are not one sequence slot.
FREE, SHARED, CACHED, WRONG = -1, -2, -3, -4

_COLUMNS = 64
_MOST_ROWS = 24
_MOST_SEQUENCES = 16
_SLOT_SYMBOLS = string.digits + string.ascii_letters
_SYMBOLS = {FREE: "·", SHARED: "+", CACHED: "*", WRONG: "!"}
_SHADES = "·░▒▓█"
_WORDS = {
    FREE: "free",
    SHARED: "shared",
    CACHED: "prefix cache alone",
    WRONG: "counts that do not add up",
}
# Okabe and Ito, "Color Universal Design" (2008): tells apart for all kinds of colour vision.
_SLOT_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_COLORS = {FREE: "#e4e4e4", SHARED: "#555555", CACHED: "#a0a0a0", WRONG: "#ff0000"}


@dataclasses.dataclass(frozen=True)
class SequenceRow:
    """One sequence in use.

    Attributes:
      slot: its slot.
      tokens: its length.
      blocks: blocks in its table.
      shared: how many of them have other holders too.
      stored: columns whose block is in a `BlockStore`.
      dropped: columns before its last block that hold none.
    """

    slot: int
    tokens: int
    blocks: int
    shared: int
    stored: int
    dropped: int

    def __str__(self) -> str:
        extras = [("shared", self.shared), ("stored", self.stored), ("dropped", self.dropped)]
        text = f"slot {self.slot}: {self.tokens:,} tokens in {self.blocks:,} blocks"
        return ", ".join([text, *(f"{n:,} {word}" for word, n in extras if n)])


@dataclasses.dataclass(frozen=True)
class PoolPicture:
    """What `render` returns: print it, or leave it as the last line of a notebook cell.

    Attributes:
      title: the cache in a line.
      owners: int32 [num_blocks], the slot that alone holds a block, or -1 free, -2 several holders,
        -3 the prefix cache (or another caller of `retain`) alone, -4 fewer counted than hold it.
      sequences: the sequences in use, by slot.
    """

    title: str
    owners: np.ndarray
    sequences: tuple[SequenceRow, ...]

    @property
    def blocks_per_cell(self) -> int:
        """Blocks that one cell of the picture stands for."""
        return -(-len(self.owners) // (_COLUMNS * _MOST_ROWS))

    def cells(self) -> Iterator[tuple[int, float]]:
        """Each cell's commonest owner among its blocks in use (or -1), and its share in use."""
        for start in range(0, len(self.owners), self.blocks_per_cell):
            owners = self.owners[start : start + self.blocks_per_cell]
            used = owners[owners != FREE]
            if len(used) == 0:
                yield FREE, 0.0
                continue
            values, counts = np.unique(used, return_counts=True)
            owner = WRONG if WRONG in values else int(values[np.argmax(counts)])
            yield owner, len(used) / len(owners)

    def _rows(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Rows of cells, each with its first block."""
        cells = list(self.cells())
        for start in range(0, len(cells), _COLUMNS):
            yield start * self.blocks_per_cell, cells[start : start + _COLUMNS]

    def _symbol(self, owner: int, share: float) -> str:
        if self.blocks_per_cell > 1 and owner != WRONG:
            # Some in use never look like none.
            return _SHADES[int(np.ceil(share * (len(_SHADES) - 1)))]
        if owner < 0:
            return _SYMBOLS[owner]
        return _SLOT_SYMBOLS[owner] if owner < len(_SLOT_SYMBOLS) else "#"

    def _legend(self) -> str:
        kinds = [k for k in _WORDS if (self.owners == k).any()]
        if self.blocks_per_cell > 1:
            return f"each cell: {self.blocks_per_cell} blocks, {_SHADES} by how many are in use"
        words = [f"{_SYMBOLS[k]} {_WORDS[k]}" for k in kinds]
        return ", ".join([*words, *(["0-9a-Z one slot"] if (self.owners >= 0).any() else [])])

    def _summary(self) -> str:
        alone = int((self.owners >= 0).sum())
        parts = [f"{alone:,} held by one slot"]
        parts += [
            f"{n:,} {word}" for kind, word in _WORDS.items() if (n := (self.owners == kind).sum())
        ]
        return ", ".join(parts)

    def _lines_of_sequences(self) -> list[str]:
        lines = [str(row) for row in self.sequences[:_MOST_SEQUENCES]]
        if (more := len(self.sequences) - _MOST_SEQUENCES) > 0:
            lines.append(f"and {more:,} more sequences")
        return lines

    def __str__(self) -> str:
        width = len(str(len(self.owners) - 1))
        rows = [
            f"{first:>{width}} " + "".join(self._symbol(*cell) for cell in cells)
            for first, cells in self._rows()
        ]
        lines = [self.title, self._summary(), *rows, self._legend()]
        return "\n".join([*lines, *self._lines_of_sequences()])

    __repr__ = __str__

    def __rich__(self) -> Any:
        """The same text in colour, for `rich.print`."""
        from rich.text import Text

        width = len(str(len(self.owners) - 1))
        text = Text(f"{self.title}\n{self._summary()}\n")
        for first, cells in self._rows():
            text.append(f"{first:>{width}} ", style="dim")
            for owner, share in cells:
                text.append(self._symbol(owner, share), style=_color(owner))
            text.append("\n")
        return text.append("\n".join([self._legend(), *self._lines_of_sequences()]))

    def _repr_html_(self) -> str:
        """An SVG of the pool above the sequences; Jupyter shows it."""
        size = 10
        rects = []
        rows = list(self._rows())
        for y, (first, cells) in enumerate(rows):
            for x, (owner, share) in enumerate(cells):
                block = first + x * self.blocks_per_cell
                rects.append(
                    f'<rect x="{x * size}" y="{y * size}" width="{size - 1}" height="{size - 1}" '
                    f'fill="{_color(owner)}" fill-opacity="{0.3 + 0.7 * (share or 1):.2f}">'
                    f"<title>{html.escape(self._tip(block, owner))}</title></rect>"
                )
        width = size * max(len(cells) for _, cells in rows)
        lines = [self.title, self._summary(), *self._lines_of_sequences()]
        words = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        return (
            f'<div style="font-family:monospace">{words}<svg width="{width}" '
            f'height="{size * len(rows)}" xmlns="http://www.w3.org/2000/svg">{"".join(rects)}</svg>'
            "</div>"
        )

    def _tip(self, block: int, owner: int) -> str:
        last = min(block + self.blocks_per_cell, len(self.owners)) - 1
        blocks = f"block {block}" if last == block else f"blocks {block} to {last}"
        return f"{blocks}: {_WORDS[owner] if owner < 0 else f'slot {owner}'}"


def _color(owner: int) -> str:
    return _COLORS[owner] if owner < 0 else _SLOT_COLORS[owner % len(_SLOT_COLORS)]


def render(cache: PagedCache) -> PoolPicture:
    """Draws who holds each block of a cache: a slot alone, several holders, a prefix cache, nobody.

    Waits for the cache's bookkeeping and reads no page. Pools beyond 1536 blocks are drawn with
    several blocks to a cell.

    Args:
      cache: a paged or contiguous cache.

    Returns:
      A picture: text where it is printed, coloured by `rich.print`, SVG in a notebook.
    """
    counts = np.asarray(cache.pool.counts)
    tables = np.asarray(cache.block_tables)
    slots, columns = np.nonzero((tables >= 0) & (tables < len(counts)))
    ids = tables[slots, columns]
    holders = np.bincount(ids, minlength=len(counts))
    owners = np.full(len(counts), FREE, np.int32)
    owners[ids] = slots
    owners[(holders == 0) & (counts > 0)] = CACHED
    owners[(holders > 0) & (counts > 1)] = SHARED
    owners[holders > counts] = WRONG
    return PoolPicture(
        title=repr(cache), owners=owners, sequences=tuple(_sequences(cache, tables, counts))
    )


def _sequences(cache: PagedCache, tables: np.ndarray, counts: np.ndarray) -> Iterator[SequenceRow]:
    lengths = np.asarray(cache.lengths)
    for slot in np.flatnonzero((lengths > 0) | (tables >= 0).any(axis=1)):
        row = tables[slot]
        held = row[(row >= 0) & (row < len(counts))]
        columns = -(-int(lengths[slot]) // cache.config.block_size)
        yield SequenceRow(
            slot=int(slot),
            tokens=int(lengths[slot]),
            blocks=len(held),
            shared=int((counts[held] > 1).sum()),
            stored=int((row < -1).sum()),
            dropped=int((row[:columns] == -1).sum()),
        )
