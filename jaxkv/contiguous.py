"""The contiguous twin: every sequence owns one run of memory.

A contiguous cache is a paged cache whose blocks are as long as the capacity and whose block table
has one column. The same verbs, formats, faults and attention therefore serve both; what differs is
how it is made, and that it can grow.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.cache import LayerPages, LayerView, PagedCache, init, require_open
from jaxkv.codecs import Pages
from jaxkv.config import CacheConfig

if TYPE_CHECKING:
    from jaxkv.calibration import Calibration

# Capacities are multiples of this, so that runs start at whole vectors.
_CAPACITY_MULTIPLE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache(PagedCache):
    """State of a contiguous cache. Immutable; all verbs of `PagedCache` take it.

    Arrays are head-major: codes [batch, heads, capacity, words], scales token-minor. `config` is
    the derived one: `block_size` is the capacity, `num_blocks` the batch.
    """

    @property
    def capacity(self) -> int:
        """Tokens that each sequence can hold."""
        return self.config.block_size

    def layer(self, index: int) -> LayerView:
        """A read-only view of one layer; its block_size is 0."""
        return dataclasses.replace(super().layer(index), block_size=0)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"ContiguousCache({c.format}, {c.num_layers} layers, {c.max_sequences} sequences of "
            f"{self.capacity} tokens, {self.nbytes / 2**20:.1f} MiB)"
        )


def init_contiguous(
    config: CacheConfig,
    *,
    batch: int = 1,
    capacity: int = 512,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    calibration: Calibration | None = None,
) -> ContiguousCache:
    """An empty contiguous cache.

    Args:
      config: as in `jaxkv.init`, but for its block geometry, window and resident limit, which are
        not used: a contiguous cache drops and moves nothing.
      batch: sequences.
      capacity: tokens that each can hold, rounded up to a multiple of 16.
      k_scales: as in `jaxkv.init`.
      v_scales: as in `jaxkv.init`.
      calibration: as in `jaxkv.init`.

    Returns:
      The cache. `reserve` refuses and counts as full what would outgrow the capacity; `grow` makes
      room.

    Raises:
      ValueError: batch or capacity below 1, or too large together; a config with keep_first; or as
        in `jaxkv.init`.
    """
    if config.keep_first:
        raise ValueError(
            f"config: got keep_first = {config.keep_first}, expected 0: it belongs to a window "
            "that drops blocks, and a contiguous cache drops none"
        )
    for name, value in (("batch", batch), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    derived = dataclasses.replace(
        config,
        block_size=_round_up(capacity),
        num_blocks=batch,
        max_sequences=batch,
        max_blocks_per_sequence=1,
        resident_blocks_per_sequence=None,
        window=None,
        keep_first=0,
    )
    paged = init(derived, k_scales=k_scales, v_scales=v_scales, calibration=calibration)
    return ContiguousCache(**{f.name: getattr(paged, f.name) for f in dataclasses.fields(paged)})


def _round_up(capacity: int) -> int:
    return -(-capacity // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


def grow(cache: ContiguousCache, capacity: int) -> ContiguousCache:
    """Makes room for longer sequences, on the host.

    Growing at least doubles, so that a sequence that grows token by token moves each token a
    bounded number of times; a capacity that is there already moves nothing and returns `cache`.
    Functions jitted over the cache compile anew for the new shape.

    Args:
      cache: the cache; it stays valid.
      capacity: tokens that each sequence must be able to hold.

    Returns:
      A cache of at least that capacity with the same contents.

    Raises:
      TypeError: not a contiguous cache.
      ValueError: a closed cache.
    """
    if not isinstance(cache, ContiguousCache):
        raise TypeError(
            f"cache: got {type(cache).__name__}, expected a ContiguousCache (a paged cache grows "
            "by blocks)"
        )
    require_open(cache)
    old = cache.capacity
    if capacity <= old:
        return cache
    new = max(_round_up(capacity), 2 * old)
    layers = tuple(
        LayerPages(_widen(pages.k, new - old), _widen(pages.v, new - old)) for pages in cache.layers
    )
    config = dataclasses.replace(cache.config, block_size=new)
    return dataclasses.replace(cache, config=config, layers=layers)


def _widen(pages: Pages, tokens: int) -> Pages:
    """Room for more tokens: axis 2 of codes, the last axis of scales."""
    codes = ((0, 0), (0, 0), (0, tokens), (0, 0))
    data = tuple(jnp.pad(plane, codes) for plane in pages.data)
    if pages.scales is None:
        return Pages(data, None)
    lead = ((0, 0),) * (pages.scales.ndim - 1)
    return Pages(data, jnp.pad(pages.scales, (*lead, (0, tokens))))
