"""`PrefixCache`: prompts that start alike share their blocks.

A radix tree over full blocks of exact tokens lives on the host and holds one reference to each of
its blocks (Zheng et al., "SGLang", 2024; Kwon et al., "PagedAttention", 2023). A node's key chains
its parent's, and the root's carries format, model and adapter; the tokens themselves are compared
on every hit. Device work is bookkeeping alone: no verb touches a pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv import blocks, online
from jaxkv._buckets import padded
from jaxkv.blocks import BlockPool
from jaxkv.cache import PagedCache
from jaxkv.config import CacheConfig
from jaxkv.faults import CacheError
from jaxkv.sequences import Sequences


@dataclasses.dataclass(eq=False)
class _Node:
    """One full block of tokens below its parent."""

    key: bytes
    tokens: bytes
    block: int
    parent: _Node | None
    children: dict[bytes, _Node] = dataclasses.field(default_factory=dict)
    last_use: int = 0


@dataclasses.dataclass
class PrefixStatistics:
    """What a prefix cache has done.

    Attributes:
      hits: attached prompts that found at least one token.
      misses: attached prompts that found none.
      tokens_reused: tokens that did not have to be computed.
      evictions: blocks given back to make room.
      forgotten: blocks in use that later prompts no longer find, for one above them was evicted.
    """

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    evictions: int = 0
    forgotten: int = 0


class PrefixCache:
    """Blocks of earlier prompts, by their tokens. Lives on the host.

    It follows one line of caches: pass the newest to each call and use what comes back.

    Attributes:
      statistics: counters.
    """

    def __init__(self, config: CacheConfig, *, model: str = "", adapter: str = ""):
        """An empty tree.

        Args:
          config: the config of the caches it follows.
          model: what produced the keys and values; other models never share blocks.
          adapter: likewise for a fine-tuning adapter.
        """
        self.config = config
        self.statistics = PrefixStatistics()
        fields = (config.to_json(), model, adapter)
        digest = hashlib.blake2b(digest_size=16)
        for field in fields:
            # Lengths delimit, so that no two triples read alike.
            digest.update(len(field.encode()).to_bytes(8, "little") + field.encode())
        self._root = _Node(digest.digest(), b"", -1, None)
        self._nodes: dict[bytes, _Node] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """Blocks that the tree holds."""
        return len(self._nodes)

    def __repr__(self) -> str:
        s = self.statistics
        return (
            f"PrefixCache({len(self)} blocks, {s.hits} hits, {s.misses} misses, "
            f"{s.tokens_reused} tokens reused, {s.evictions} evictions)"
        )

    def match(self, tokens: ArrayLike | Sequence[int]) -> int:
        """How many tokens of a prompt, int [n], `attach` would find. Asks no device.

        Raises:
          ValueError: no tokens.
        """
        prompt = _as_prompt(tokens)
        known = sum(1 for _ in self._walk(prompt)) * self.config.block_size
        return min(known, len(prompt) - 1)

    def attach(
        self, cache: PagedCache, slot: int, tokens: ArrayLike | Sequence[int]
    ) -> tuple[PagedCache, int]:
        """Gives an empty slot the blocks of the longest known prefix of a prompt.

        At least one token is left to compute, so a fully known prompt ends inside its last block;
        that block is copied when the sequence first appends.

        Args:
          cache: the newest cache.
          slot: an empty sequence slot.
          tokens: int [n], the prompt.

        Returns:
          The cache with the slot's table and length set, and how many tokens it now holds.

        Raises:
          ValueError: no such slot, no tokens, or a slot in use.
          CacheError: the cache is not the one this tree follows; nothing has changed.
        """
        prompt = self._prompt(cache, slot, tokens)
        if int(cache.lengths[slot]) > 0:
            raise ValueError(f"slot: {slot} holds {int(cache.lengths[slot])} tokens, expected none")
        size = self.config.block_size
        path = list(self._walk(prompt))
        matched = min(len(path) * size, len(prompt) - 1)
        path = path[: -(-matched // size)]
        self._require_followed(cache, [node.block for node in path])
        now = next(self._clock)
        for node in path:
            node.last_use = now
        self.statistics.hits += matched > 0
        self.statistics.misses += matched == 0
        self.statistics.tokens_reused += matched
        if not path:
            return cache, 0
        row = np.full(self.config.max_blocks_per_sequence, -1, np.int32)
        row[: len(path)] = [node.block for node in path]
        pool, sequences = _attach(
            cache.pool, cache.sequences, jnp.int32(slot), jnp.asarray(row), jnp.int32(matched)
        )
        return dataclasses.replace(cache, pool=pool, sequences=sequences), matched

    def insert(self, cache: PagedCache, slot: int, tokens: ArrayLike | Sequence[int]) -> PagedCache:
        """Remembers the full blocks of a sequence; the tree takes one reference to each new one.

        A block that the tree knows already stays; the sequence keeps its own copy.

        Args:
          cache: the newest cache.
          slot: the sequence.
          tokens: int [n], the tokens that its blocks hold; those beyond its length are ignored.

        Returns:
          The cache with the new references counted.

        Raises:
          ValueError: no such slot, or no tokens.
          CacheError: the cache is not the one this tree follows, or online calibration has not
            frozen its scales yet; nothing has changed.
        """
        prompt = self._prompt(cache, slot, tokens)
        online.require_frozen(cache, "PrefixCache.insert")
        size = self.config.block_size
        full = min(int(cache.lengths[slot]), len(prompt)) // size
        table = np.asarray(cache.block_tables[slot])[:full]
        if (table < 0).any():
            table = table[: int(np.argmax(table < 0))]
        known = list(self._walk(prompt))[: len(table)]
        self._require_followed(cache, [n.block for n in known] + table[len(known) :].tolist())
        now = next(self._clock)
        for node in known:
            node.last_use = now
        parent = known[-1] if known else self._root
        taken: list[int] = []
        for i in range(len(known), len(table)):
            block_tokens = prompt[i * size : (i + 1) * size].tobytes()
            if _chain(parent.key, block_tokens) in self._nodes:
                break  # a digest collided: these tokens cannot be known
            parent = self._add(parent, block_tokens, int(table[i]), now)
            taken.append(parent.block)
        return self._change(cache, taken, _retain)

    def make_room(self, cache: PagedCache, num_blocks: int) -> PagedCache:
        """Gives back least recently used blocks that nobody else holds, leaves first.

        Where all leaves below such a block are in use, they are forgotten with it: their holders
        keep them, later prompts no longer find them.

        Args:
          cache: the newest cache.
          num_blocks: how many free blocks are wanted; with too few to evict, all of those go.

        Returns:
          The cache with the evicted blocks free.

        Raises:
          ValueError: num_blocks is negative.
          CacheError: the cache is not the one this tree follows; nothing has changed.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks: got {num_blocks}, expected at least 0")
        wanted = num_blocks - int(cache.num_free_blocks)
        if wanted <= 0:
            return cache
        ids = [node.block for node in self._nodes.values()]
        counts = dict(zip(ids, _counts(cache, ids)))
        self._require(counts, ids)
        freed = self._evict_leaves(counts, wanted)
        inner, forgotten = self._evict_inner(counts, wanted - len(freed))
        freed += inner
        self.statistics.evictions += len(freed)
        self.statistics.forgotten += len(forgotten)
        return self._change(cache, [node.block for node in freed + forgotten], _release)

    def shared_blocks(self, cache: PagedCache, slot: int) -> int:
        """How many blocks of a sequence the tree holds too.

        Args:
          cache: the newest cache.
          slot: the sequence.

        Returns:
          The number of its blocks that later prompts may find.

        Raises:
          ValueError: no such slot.
          CacheError: the config of the cache is not this tree's.
        """
        self._require_slot(cache, slot)
        held = [node.block for node in self._nodes.values()]
        return int(np.isin(np.asarray(cache.block_tables[slot]), held).sum())

    def _evict_leaves(self, counts: dict[int, int], wanted: int) -> list[_Node]:
        """Removes unheld leaves, and what becomes one, least recently used first."""
        leaves = [(n.last_use, n.key) for n in self._nodes.values() if not n.children]
        heapq.heapify(leaves)
        evicted: list[_Node] = []
        while leaves and len(evicted) < wanted:
            node = self._nodes[heapq.heappop(leaves)[1]]
            if counts[node.block] > 1:
                continue
            evicted.append(node)
            parent = self._remove(node)
            if parent is not self._root and not parent.children:
                heapq.heappush(leaves, (parent.last_use, parent.key))
        return evicted

    def _evict_inner(self, counts: dict[int, int], wanted: int) -> tuple[list[_Node], list[_Node]]:
        """Removes nodes that nobody else holds, and all below them; returns the two apart.

        A sequence with its own copy of the first blocks, after a swap say, may hold later blocks of
        the tree and not those above: where all leaves are held, these would never be free.
        """
        evicted: list[_Node] = []
        forgotten: list[_Node] = []
        # Children are never used later than their parent, nor added earlier: the deepest lead.
        unheld = [n for n in reversed(self._nodes.values()) if counts[n.block] == 1]
        for top in heapq.nsmallest(wanted, unheld, key=lambda n: n.last_use):
            evicted.append(top)
            forgotten += _below(top)
            for node in [*_below(top), top]:
                self._remove(node)
        return evicted, forgotten

    def clear(self, cache: PagedCache) -> PagedCache:
        """Forgets everything and gives back every reference.

        Raises:
          CacheError: the cache is not the one this tree follows; nothing has changed.
        """
        held = [node.block for node in self._nodes.values()]
        self._require_followed(cache, held)
        self._root.children.clear()
        self._nodes.clear()
        return self._change(cache, held, _release)

    def _prompt(
        self, cache: PagedCache, slot: int, tokens: ArrayLike | Sequence[int]
    ) -> np.ndarray:
        self._require_slot(cache, slot)
        return _as_prompt(tokens)

    def _require_slot(self, cache: PagedCache, slot: int) -> None:
        if cache.config != self.config:
            raise CacheError("cache: its config is not the one this prefix cache was made for")
        if not 0 <= slot < self.config.max_sequences:
            raise ValueError(f"slot: got {slot}, expected 0 to {self.config.max_sequences - 1}")

    def _walk(self, prompt: np.ndarray) -> Iterator[_Node]:
        """Nodes of the prompt's full blocks, from the root, as far as the tree knows them."""
        size, node = self.config.block_size, self._root
        for i in range(len(prompt) // size):
            tokens = prompt[i * size : (i + 1) * size].tobytes()
            child = node.children.get(_chain(node.key, tokens))
            # A digest may collide; tokens may not.
            if child is None or child.tokens != tokens:
                return
            yield child
            node = child

    def _add(self, parent: _Node, tokens: bytes, block: int, now: int) -> _Node:
        node = _Node(_chain(parent.key, tokens), tokens, block, parent, last_use=now)
        parent.children[node.key] = node
        self._nodes[node.key] = node
        return node

    def _remove(self, node: _Node) -> _Node:
        """Takes a node without children out of the tree; returns its parent."""
        assert node.parent is not None and not node.children
        del node.parent.children[node.key]
        del self._nodes[node.key]
        return node.parent

    def _require_followed(self, cache: PagedCache, ids: Sequence[int]) -> None:
        self._require(dict(zip(ids, _counts(cache, ids))), ids)

    def _require(self, counts: dict[int, int], ids: Sequence[int]) -> None:
        for block in ids:
            if counts[block] < 1:
                raise CacheError(
                    f"block {block} has no holder in this cache, but the prefix cache or the "
                    "sequence refers to it: pass the newest cache of the line it follows"
                )

    def _change(
        self,
        cache: PagedCache,
        ids: Sequence[int] | np.ndarray,
        verb: Callable[[BlockPool, np.ndarray], BlockPool],
    ) -> PagedCache:
        if len(ids) == 0:
            return cache
        return dataclasses.replace(cache, pool=verb(cache.pool, padded(ids, -1)))


def _below(top: _Node) -> list[_Node]:
    """All nodes below one, children before their parents."""
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes[:0:-1]


def _as_prompt(tokens: ArrayLike | Sequence[int]) -> np.ndarray:
    prompt = np.asarray(tokens)
    if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(
            f"tokens: got {prompt.dtype}{list(prompt.shape)}, expected integers [n], n >= 1"
        )
    return prompt.astype(np.int64)


def _chain(parent: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


def _counts(cache: PagedCache, ids: Sequence[int]) -> list[int]:
    """Reference counts of blocks, fetched together."""
    if len(ids) == 0:
        return []
    counts = _gather(cache.pool.counts, padded(ids, -1))
    return np.asarray(counts)[: len(ids)].tolist()


@jax.jit
def _gather(counts: jax.Array, ids: jax.Array) -> jax.Array:
    return counts[jnp.maximum(ids, 0)]


_retain = jax.jit(blocks.retain)
_release = jax.jit(blocks.release)


@jax.jit
def _attach(
    pool: BlockPool, sequences: Sequences, slot: jax.Array, row: jax.Array, length: jax.Array
) -> tuple[BlockPool, Sequences]:
    return blocks.retain(pool, row), Sequences(
        block_tables=sequences.block_tables.at[slot].set(row),
        lengths=sequences.lengths.at[slot].set(length),
    )
