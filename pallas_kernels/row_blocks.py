"""Cutting queries into row blocks, and putting the blocks' outputs back in their places.

A row is one query head of one query token. The rows of a sequence that share a KV head are
numbered token * group + head in the group, and a kernel takes `rows` of them at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Keys that are read from elsewhere.

    Attributes:
      first: int32 [S], keys before this position.
      since: int32 [S]; of the keys from here on, those nearer than `distance` to the query.
      distance: see `since`; 0 leaves out none of them.
    """

    first: jax.Array
    since: jax.Array
    distance: int = dataclasses.field(metadata=dict(static=True))

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """(first, since)."""
        return self.first, self.since


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """Which rows each block holds.

    Attributes:
      sequence: int32 [blocks], sequence slot.
      first_row: int32 [blocks], first row of the block in its sequence.
      num_rows: int32 [blocks], rows of the sequence; what lies beyond is padding.
      first_block: int32 [sequences], first block of each sequence.
      offset: int32 [sequences], packed queries: first token of each sequence.
      rows: rows of a block.
      group: query heads of one KV head.
      max_tokens: query tokens of a padded sequence, or None for packed queries.
    """

    sequence: jax.Array
    first_row: jax.Array
    num_rows: jax.Array
    first_block: jax.Array
    offset: jax.Array
    rows: int = dataclasses.field(metadata=dict(static=True))
    group: int = dataclasses.field(metadata=dict(static=True))
    max_tokens: int | None = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def padded(cls, new_tokens: jax.Array, max_tokens: int, group: int, rows: int) -> RowBlocks:
        """Blocks of queries [S, max_tokens, ...], of which new_tokens [S] are real."""
        num = len(new_tokens)
        per_sequence = -(-max_tokens * group // rows)
        sequence = jnp.repeat(jnp.arange(num, dtype=jnp.int32), per_sequence)
        first_row = jnp.tile(jnp.arange(per_sequence, dtype=jnp.int32) * rows, num)
        first_block = jnp.arange(num, dtype=jnp.int32) * per_sequence
        num_rows = new_tokens.astype(jnp.int32)[sequence] * group
        offset = jnp.arange(num, dtype=jnp.int32) * max_tokens
        return cls(sequence, first_row, num_rows, first_block, offset, rows, group, max_tokens)

    @classmethod
    def packed(
        cls, new_tokens: jax.Array, offsets: jax.Array, total_tokens: int, group: int, rows: int
    ) -> RowBlocks:
        """Blocks of queries [total_tokens, ...], sequence after sequence at `offsets` [S]."""
        num = len(new_tokens)
        all_rows = new_tokens.astype(jnp.int32) * group
        blocks = -(-all_rows // rows)
        ends = jnp.cumsum(blocks)
        first_block = ends - blocks
        # Every sequence may waste the end of one block.
        index = jnp.arange(-(-total_tokens * group // rows) + num, dtype=jnp.int32)
        owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        sequence = jnp.minimum(owner, num - 1)
        first_row = (index - first_block[sequence]) * rows
        num_rows = jnp.where(owner < num, all_rows[sequence], 0)
        return cls(sequence, first_row, num_rows, first_block, offsets, rows, group, None)

    def bounds(
        self, starts: jax.Array, window: int | None, left_out: LeftOut | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What each block and each row sees.

        Args:
          starts: int32 [S], tokens in each sequence before this step's.
          window: keys that a query sees, or None.
          left_out: keys that are not seen for another reason, or None.

        Returns:
          int32 [blocks, 4]: sequence, first and one past the last position seen by any row, 0;
          int32 [blocks, rows]: one past the last position that a row sees, 0 for padding; and
          int32 [blocks, rows]: the first position that it sees.
        """
        row = self.first_row[:, None] + jnp.arange(self.rows, dtype=jnp.int32)
        start = starts.astype(jnp.int32)[self.sequence]
        seen = start[:, None] + row // self.group + 1
        lows = jnp.zeros_like(seen)
        if window is not None:
            lows = jnp.maximum(seen - window, 0)
        if left_out is not None:
            first, since = (x.astype(jnp.int32)[self.sequence][:, None] for x in left_out.arrays)
            lows = jnp.maximum(lows, first)
            if left_out.distance:
                seen = jnp.maximum(seen - left_out.distance, jnp.minimum(seen, since))
        limits = jnp.where(row < self.num_rows[:, None], seen, 0)
        high = limits.max(axis=1)
        # Rows are in the order of their positions.
        low = jnp.minimum(lows[:, 0], high)
        tiles = jnp.stack([self.sequence, low, high, jnp.zeros_like(low)], axis=1)
        return tiles, limits, lows

    def split_queries(self, q: jax.Array) -> jax.Array:
        """Queries [S, T, heads, D] or [N, heads, D] as [blocks, kv_heads, rows, D]."""
        heads, dim = q.shape[-2] // self.group, q.shape[-1]
        if self.max_tokens is not None:
            num = q.shape[0]
            q = q.reshape(num, self.max_tokens, heads, self.group, dim).swapaxes(1, 2)
            q = q.reshape(num, heads, self.max_tokens * self.group, dim)
            per_sequence = len(self.sequence) // num
            missing = per_sequence * self.rows - q.shape[2]
            q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0)))
            q = q.reshape(num, heads, per_sequence, self.rows, dim).swapaxes(1, 2)
            return q.reshape(-1, heads, self.rows, dim)
        row = self.first_row[:, None] + jnp.arange(self.rows, dtype=jnp.int32)
        token = self.offset[self.sequence][:, None] + row // self.group
        token = jnp.clip(token, 0, q.shape[0] - 1)
        q = q.reshape(-1, heads, self.group, dim)[token, :, row % self.group]
        return q.swapaxes(1, 2)

    def join(self, x: jax.Array, total_tokens: int) -> jax.Array:
        """Per-row results [blocks, kv_heads, used rows, ...] in the queries' layout.

        Args:
          x: results; rows beyond `used rows` hold nothing.
          total_tokens: length of packed queries; unused where they are padded.

        Returns:
          [S, T, heads, ...] or [total_tokens, heads, ...]; anything on padding tokens.
        """
        heads, rest = x.shape[1], x.shape[3:]
        if self.max_tokens is not None:
            num = len(self.first_block)
            x = x.reshape(num, -1, *x.shape[1:]).swapaxes(1, 2)
            x = x.reshape(num, heads, -1, *rest)[:, :, : self.max_tokens * self.group]
            x = x.reshape(num, heads, self.max_tokens, self.group, *rest).swapaxes(1, 2)
            return x.reshape(num, self.max_tokens, heads * self.group, *rest)
        token = jnp.arange(total_tokens, dtype=jnp.int32)
        owner = jnp.searchsorted(self.offset, token, side="right").astype(jnp.int32) - 1
        owner = jnp.clip(owner, 0, len(self.offset) - 1)
        row = (token - self.offset[owner])[:, None] * self.group
        row = jnp.maximum(row + jnp.arange(self.group, dtype=jnp.int32), 0)
        block = self.first_block[owner][:, None] + row // self.rows
        block = jnp.clip(block, 0, x.shape[0] - 1)
        x = x[block, :, row % self.rows]  # [N, group, kv_heads, ...]
        return x.swapaxes(1, 2).reshape(total_tokens, heads * self.group, *rest)
