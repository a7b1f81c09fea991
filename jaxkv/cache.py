"""`PagedCache`: pools of every layer, block pool and sequences as one immutable pytree.

Verbs are pure functions that return the new cache first. A step is `reserve` once, then `write` and
`attend` per layer; the plan is all that passes between bookkeeping and arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv import attention, blocks, codecs, exact, online, sequences
from jaxkv.blocks import BlockPool
from jaxkv.codecs import Audit, Pages
from jaxkv.config import CacheConfig, LayerSpec
from jaxkv.dispatch import Implementation, choose_implementation, unsupported
from jaxkv.exact import ExactTokens
from jaxkv.faults import (
    CORRUPTION,
    CacheError,
    FaultKind,
    Faults,
    explain,
    record_kinds,
)
from jaxkv.formats import Format
from jaxkv.online import Staging
from jaxkv.sequences import Sequences, StepPlan
from jaxkv.store import BlockStore

if TYPE_CHECKING:
    from jaxkv.calibration import Calibration

Audits = tuple[Audit, Audit]

# Blocks of more tokens are copied in parts of so many.
_PART_TOKENS = 512
# Up to so many tokens, as in a decode step, both sides are encoded together.
_FEW_ROWS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPages:
    """Pages of both sides of one layer."""

    k: Pages
    v: Pages


# (pages, operands, slots int32 [N], (k_scale, v_scale), spec) -> (pages, audits, anything else)
Store = Callable[
    [LayerPages, Any, jax.Array, tuple[jax.Array, jax.Array], LayerSpec],
    tuple[LayerPages, Audits, Any],
]


@dataclasses.dataclass(frozen=True)
class LayerView:
    """What a layer's attention may know of its cache.

    Attributes:
      lengths: int32 [S], tokens in each sequence.
      capacity: tokens that a sequence can hold.
      block_size: tokens of a block; 0 in a contiguous cache.
      num_kv_heads: key/value heads.
      head_dim: elements of a key head.
      v_head_dim: elements of a value head.
      format: storage formats of both sides.
    """

    lengths: jax.Array
    capacity: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    format: Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """State of a paged cache. Immutable: every verb returns a new one.

    Attributes:
      layers: the pages of each layer; empty once the cache is closed.
      k_scales: f32 [num_layers], fp8 scale of each layer's keys (1 where unused).
      v_scales: f32 [num_layers], likewise for values.
      pool: free blocks, reference counts, fault counters.
      sequences: block tables and lengths.
      config: the static geometry.
      k_means: f32 [kv_heads, head_dim] of each layer, what `write` takes off every key; None where
        keys are stored as they come.
      recent: exact copies of first and recent tokens; None where the config keeps none.
      staging: what online calibration has seen; None where the config has none.
    """

    layers: tuple[LayerPages, ...]
    k_scales: jax.Array
    v_scales: jax.Array
    pool: BlockPool
    sequences: Sequences
    config: CacheConfig = dataclasses.field(metadata={"static": True})
    k_means: tuple[jax.Array, ...] | None = None
    recent: ExactTokens | None = None
    staging: Staging | None = None

    @property
    def lengths(self) -> jax.Array:
        """int32 [S], tokens in each sequence."""
        return self.sequences.lengths

    @property
    def block_tables(self) -> jax.Array:
        """int32 [S, M], block ids; -1 for none."""
        return self.sequences.block_tables

    @property
    def num_free_blocks(self) -> jax.Array:
        """int32 scalar, blocks nobody holds."""
        return self.pool.num_free

    @property
    def faults(self) -> Faults:
        """Counters of what went wrong; see `jaxkv.check` and `jaxkv.report`."""
        return self.pool.faults

    @property
    def nbytes(self) -> int:
        """Bytes of all pages with their scales, exact tokens and staged ones."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(_rows(self)))

    @property
    def is_closed(self) -> bool:
        """Whether `close` gave the pages back."""
        return not self.layers

    def layer(self, index: int) -> LayerView:
        """A read-only view of one layer, the same for paged and contiguous caches."""
        spec = self.config.layer(index)
        return LayerView(
            lengths=self.lengths,
            capacity=self.config.max_tokens_per_sequence,
            block_size=self.config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            format=spec.format,
        )

    def __repr__(self) -> str:
        c = self.config
        state = "closed" if self.is_closed else f"{self.nbytes / 2**20:.1f} MiB"
        return (
            f"PagedCache({c.format}, {c.num_layers} layers, {c.num_blocks} blocks of "
            f"{c.block_size} tokens, {c.max_sequences} slots, {state})"
        )


def _rows(cache: PagedCache) -> Any:
    """All arrays of a cache that hold keys and values."""
    beside = (cache.recent, cache.staging)
    return cache.layers, tuple(rows.layers for rows in beside if rows is not None)


def init(
    config: CacheConfig,
    *,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    calibration: Calibration | None = None,
) -> PagedCache:
    """An empty cache.

    Args:
      config: geometry and formats.
      k_scales: fp8 scale of the keys, a scalar or f32 [num_layers]; by default the calibration's,
        else 1.
      v_scales: likewise for the values.
      calibration: from `jaxkv.calibrate`: key means to center by, and scales.

    Returns:
      The cache; every leaf has a buffer of its own, so all of it can be donated.

    Raises:
      ValueError: scales of a wrong shape, or not positive and finite; a calibration of another
        geometry.
    """
    k_means = None
    if calibration is not None:
        calibration.check_fits(config)
        k_scales = calibration.k_scales if k_scales is None else k_scales
        v_scales = calibration.v_scales if v_scales is None else v_scales
        if calibration.k_means is not None:
            k_means = tuple(jnp.array(mean, jnp.float32) for mean in calibration.k_means)
    layers = []
    for index in range(config.num_layers):
        spec = config.layer(index)
        pages = functools.partial(
            codecs.init_pages, config.num_blocks, spec.num_kv_heads, config.block_size
        )
        layers.append(LayerPages(pages(spec.k), pages(spec.v)))
    return PagedCache(
        layers=tuple(layers),
        k_scales=_layer_scales("k_scales", k_scales, config.num_layers),
        v_scales=_layer_scales("v_scales", v_scales, config.num_layers),
        pool=BlockPool.create(config.num_blocks, trace_events=config.trace_events),
        sequences=Sequences.create(config.max_sequences, config.max_blocks_per_sequence),
        config=config,
        k_means=k_means,
        recent=exact.create(config),
        staging=online.create(config),
    )


def _layer_scales(name: str, scales: ArrayLike | None, num_layers: int) -> jax.Array:
    values = np.asarray(1.0 if scales is None else scales, np.float32)
    if values.shape not in ((), (num_layers,)):
        raise ValueError(
            f"{name}: got shape {list(values.shape)}, expected a scalar or [{num_layers}]"
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name}: expected positive finite scales, got {values.tolist()}")
    return jnp.array(np.broadcast_to(values, (num_layers,)))


def reserve(
    cache: PagedCache,
    new_tokens: ArrayLike,
    *,
    max_new_tokens: int | None = None,
    total_tokens: int | None = None,
) -> tuple[PagedCache, StepPlan]:
    """Plans a step: blocks and positions of the new tokens, once for all layers.

    Args:
      cache: the cache.
      new_tokens: int32 [S], tokens to append to each sequence; 0 leaves a slot alone.
      max_new_tokens: T of a padded step with tensors [S, T, heads, dim]; 1 by default.
      total_tokens: N of a packed step with tensors [N, heads, dim], sequence after sequence at
        offsets cumsum(new_tokens); None plans a padded step.

    Returns:
      The cache with its lengths advanced, and the plan. `plan.granted` is bool [S]: False means
      that the sequence is exactly as it was, and `plan.refusal` says why.

    Raises:
      TypeError: new_tokens does not hold integers.
      ValueError: a wrong shape, or a static number out of range; with exact_recent, a padded step
        of more than max_step_tokens.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    config = cache.config
    if config.exact_recent:
        if total_tokens is not None:
            most = total_tokens if max_new_tokens is None else max_new_tokens
            max_new_tokens = min(most, config.max_step_tokens)
        elif (max_new_tokens or 1) > config.max_step_tokens:
            raise ValueError(
                f"max_new_tokens: got {max_new_tokens}, expected at most max_step_tokens = "
                f"{config.max_step_tokens} with exact_recent = {config.exact_recent}"
            )
    pool, seqs, plan = sequences.reserve(
        cache.pool,
        cache.sequences,
        new_tokens,
        block_size=cache.config.block_size,
        max_new_tokens=max_new_tokens,
        total_tokens=total_tokens,
        resident_blocks=cache.config.resident_blocks_per_sequence,
        window=cache.config.window,
        keep_first=cache.config.keep_first,
    )
    recent, staging = cache.recent, cache.staging
    if recent is not None:
        recent = exact.advance(recent, plan, config)
    if staging is not None:
        staging = online.advance(staging, plan)
    return _with_bookkeeping(cache, pool, seqs, recent, staging), plan


def release(cache: PagedCache, mask: ArrayLike) -> PagedCache:
    """Empties sequences and drops their block references.

    Args:
      cache: the cache.
      mask: bool [S], the slots to empty.

    Returns:
      The cache; a block that nobody else holds is free again.

    Raises:
      TypeError: the mask is not boolean.
      ValueError: the mask does not have one entry per slot.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    pool, seqs = sequences.release(cache.pool, cache.sequences, mask)
    return _with_bookkeeping(cache, pool, seqs, _shortened(cache, seqs), cache.staging)


def trim(cache: PagedCache, new_lengths: ArrayLike) -> PagedCache:
    """Shortens sequences, as if the tokens beyond had never been appended.

    Args:
      cache: the cache.
      new_lengths: int32 [S]; -1 leaves a slot alone; longer than the length is ignored and counted,
        and so is a cut back to where `CacheConfig(window=W)` has dropped blocks.

    Returns:
      The cache; a block that no token is left in is dropped.

    Raises:
      TypeError: new_lengths does not hold integers.
      ValueError: new_lengths does not have one entry per slot.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    pool, seqs = sequences.trim(
        cache.pool,
        cache.sequences,
        new_lengths,
        block_size=cache.config.block_size,
        window=cache.config.window,
    )
    return _with_bookkeeping(cache, pool, seqs, _shortened(cache, seqs), cache.staging)


def _shortened(cache: PagedCache, seqs: Sequences) -> ExactTokens | None:
    return None if cache.recent is None else exact.shorten(cache.recent, seqs.lengths)


def fork(cache: PagedCache, source: ArrayLike, destination: ArrayLike) -> PagedCache:
    """Makes each destination slot share all blocks of its source slot.

    Args:
      cache: the cache.
      source: int32 [n] slots, all read and retained first; a pair with a negative one is skipped.
      destination: int32 [n] distinct slots, likewise; those in use are released afterwards. A slot
        past S or a second pair with the same destination is skipped and counted as bad id.

    Returns:
      The cache; a shared block is copied once one of its holders appends to it.

    Raises:
      TypeError: slots that are not integers.
      ValueError: source and destination do not have one axis of the same length.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    pool, seqs = sequences.fork(cache.pool, cache.sequences, source, destination)
    recent, staging = cache.recent, cache.staging
    if recent is not None or staging is not None:
        slots, _ = sequences.fork_slots(source, destination, cache.config.max_sequences)
        source = jnp.maximum(jnp.asarray(source), 0)
        recent = None if recent is None else exact.copy_slots(recent, source, slots)
        staging = None if staging is None else online.copy_slots(staging, source, slots)
    return _with_bookkeeping(cache, pool, seqs, recent, staging)


def reorder(cache: PagedCache, rows: ArrayLike) -> PagedCache:
    """Slot s takes what slot rows[s] held; -1 empties it; duplicates share their blocks.

    Args:
      cache: the cache.
      rows: int32 [S], as in beam search; another entry out of range leaves its slot as it was and
        is counted as bad id.

    Returns:
      The cache, every slot with the tokens it took.

    Raises:
      TypeError: rows does not hold integers.
      ValueError: rows does not have one entry per slot.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    pool, seqs = sequences.reorder(cache.pool, cache.sequences, rows)
    recent, staging = cache.recent, cache.staging
    if recent is not None or staging is not None:
        taken, _ = sequences.reorder_rows(jnp.asarray(rows))
        recent = None if recent is None else exact.take_slots(recent, taken)
        staging = None if staging is None else online.take_slots(staging, taken)
    return _with_bookkeeping(cache, pool, seqs, recent, staging)


def _with_bookkeeping(
    cache: PagedCache,
    pool: BlockPool,
    seqs: Sequences,
    recent: ExactTokens | None,
    staging: Staging | None,
) -> PagedCache:
    new = dataclasses.replace(cache, pool=pool, sequences=seqs, recent=recent, staging=staging)
    return _raise_in_debug(cache, new)


def write(
    cache: PagedCache,
    layer: int,
    k: jax.Array,
    v: jax.Array,
    plan: StepPlan,
    *,
    implementation: Implementation | None = None,
) -> PagedCache:
    """Stores a step's keys and values of one layer.

    Blocks that the plan copies on write are copied first. Rows of padding and of refused sequences
    are skipped; nothing else is touched.

    Args:
      cache: the cache, after `reserve`.
      layer: which layer, a static int.
      k: [S, T, num_kv_heads, head_dim] or [N, num_kv_heads, head_dim], any float dtype.
      v: likewise with v_head_dim.
      plan: the step's plan.
      implementation: "xla", "pallas_gpu", or None for the best that serves.

    Returns:
      The cache with this layer written, and its saturated, flushed and non-finite counted.

    Raises:
      TypeError: a dtype that is not floating, or a layer that is not an int.
      ValueError: no such layer, a shape that does not fit the plan or the config, an unknown
        implementation, or a closed cache.
      NotImplementedError: the named implementation cannot serve; the message says why.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.
    """
    spec = cache.config.layer(layer)
    _check_rows("k", k, plan, spec.num_kv_heads, spec.head_dim)
    _check_rows("v", v, plan, spec.num_kv_heads, spec.v_head_dim)
    if cache.k_means is not None:
        k = k.astype(jnp.float32) - cache.k_means[layer]
    chosen = choose_implementation(cache.config, implementation, layer=layer)
    store = _store_xla if chosen == "xla" else _store_pallas_gpu
    if cache.staging is None or not spec.has_layer_scale:
        cache = store_rows(cache, layer, (k, v), plan, store)[0]
    else:
        cache = _store_and_stage(cache, layer, k, v, plan, store)
    if cache.recent is None:
        return cache
    recent = exact.store(cache.recent, layer, k, v, plan, cache.config)
    return dataclasses.replace(cache, recent=recent)


def _store_and_stage(
    cache: PagedCache, layer: int, k: jax.Array, v: jax.Array, plan: StepPlan, store: Store
) -> PagedCache:
    """As `store_rows`, under online calibration."""
    staging, calibration = cache.staging, cache.config.online_calibration
    assert staging is not None and calibration is not None
    staged = staging.layers[layer]
    operands = ((k, v), staged, dataclasses.replace(staging, layers=()), plan)
    store = online.StagingStore(store, calibration.headroom)
    cache, (staged, (k_scale, v_scale)) = store_rows(cache, layer, operands, plan, store)
    layers = (*staging.layers[:layer], staged, *staging.layers[layer + 1 :])
    return dataclasses.replace(
        cache,
        k_scales=cache.k_scales.at[layer].set(k_scale),
        v_scales=cache.v_scales.at[layer].set(v_scale),
        staging=dataclasses.replace(staging, layers=layers),
    )


def store_rows(
    cache: PagedCache, layer: int, operands: Any, plan: StepPlan, store: Store
) -> tuple[PagedCache, Any]:
    """One layer's part of a step: copy on write, then `store`, then the count of what did not fit.

    Args:
      cache: the cache, after `reserve`.
      layer: which layer.
      operands: what `store` takes to the pages; a pytree of arrays.
      plan: the step's plan.
      store: encodes and stores; hashable, equal for layers that may share a computation.

    Returns:
      The cache with this layer written, and what else `store` returned.

    Raises:
      ValueError: a closed cache.
    """
    require_open(cache)
    pages, counts, where, extra = _write_layer(
        cache.layers[layer],
        operands,
        plan,
        cache.k_scales[layer],
        cache.v_scales[layer],
        spec=cache.config.layer(layer),
        store=store,
    )
    faults = record_kinds(cache.faults, counts, step=plan.step, layer=layer, where=where)
    new = dataclasses.replace(
        cache,
        layers=(*cache.layers[:layer], pages, *cache.layers[layer + 1 :]),
        pool=dataclasses.replace(cache.pool, faults=faults),
    )
    return _raise_in_debug(cache, new), extra


def require_open(cache: PagedCache) -> None:
    """Raises ValueError if `close` gave the pages back."""
    if cache.is_closed:
        raise ValueError("cache: closed; its pages were given back by jaxkv.close")


def _check_rows(name: str, x: jax.Array, plan: StepPlan, num_heads: int, head_dim: int) -> None:
    expected = (*plan.token_shape, num_heads, head_dim)
    if x.shape != expected:
        layout = "packed [N, heads, dim]" if plan.is_packed else "padded [S, T, heads, dim]"
        raise ValueError(
            f"{name}: got shape {list(x.shape)}, expected {list(expected)} ({layout} plan)"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {x.dtype}, expected a floating dtype")


# One inner jit: layers of equal geometry are traced and lowered once, however many there are.
@functools.partial(jax.jit, static_argnames=("spec", "store"))
def _write_layer(
    pages: LayerPages,
    operands: Any,
    plan: StepPlan,
    k_scale: jax.Array,
    v_scale: jax.Array,
    *,
    spec: LayerSpec,
    store: Store,
) -> tuple[LayerPages, jax.Array, jax.Array, Any]:
    pages = _copy_on_write(pages, plan)
    slots = plan.slots.reshape(-1)
    pages, audits, extra = store(pages, operands, slots, (k_scale, v_scale), spec)
    counts, where = _count_faults(audits, plan.rows.reshape(-1))
    return pages, counts, where, extra


def _copy_on_write(pages: LayerPages, plan: StepPlan) -> LayerPages:
    """Copies the plan's blocks; nothing moves in a step without copies."""
    num_blocks, block_size = pages.k.num_blocks, pages.k.block_size
    if block_size > _PART_TOKENS:
        # A block may be a whole sequence, and its copy is to need no memory of its size.
        parts = -(-block_size // _PART_TOKENS)

        def copy_part(i: jax.Array, pages: LayerPages) -> LayerPages:
            pair, first = i // parts, i % parts * _PART_TOKENS
            where = plan.copy_from[pair], plan.copy_to[pair], first, _PART_TOKENS
            k, v = (codecs.copy_tokens(side, *where) for side in (pages.k, pages.v))
            return LayerPages(k, v)

        return jax.lax.fori_loop(0, plan.num_copies * parts, copy_part, pages)
    source = jnp.maximum(plan.copy_from, 0)
    target = jnp.where(plan.copy_to < 0, num_blocks, plan.copy_to)

    def copy(pages: LayerPages) -> LayerPages:
        k, v = (codecs.copy_blocks(side, source, target) for side in (pages.k, pages.v))
        return LayerPages(k, v)

    return jax.lax.cond(plan.num_copies > 0, copy, lambda pages: pages, pages)


def _store_xla(
    pages: LayerPages,
    rows: tuple[jax.Array, jax.Array],
    slots: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    spec: LayerSpec,
) -> tuple[LayerPages, Audits, None]:
    block_size, num_blocks = pages.k.block_size, pages.k.num_blocks
    target = jnp.where(slots >= 0, slots // block_size, num_blocks)
    offset = jnp.maximum(slots, 0) % block_size

    k, v = (x.reshape(-1, *x.shape[-2:]) for x in rows)
    (k_rows, k_audit), (v_rows, v_audit) = _encode_both(k, v, spec, scales)
    new_k = codecs.scatter_rows(pages.k, k_rows, target, offset)
    new_v = codecs.scatter_rows(pages.v, v_rows, target, offset)
    return LayerPages(new_k, new_v), (k_audit, v_audit), None


def _encode_both(
    k: jax.Array, v: jax.Array, spec: LayerSpec, scales: tuple[jax.Array, jax.Array]
) -> tuple[tuple[codecs.Encoded, Audit], tuple[codecs.Encoded, Audit]]:
    """Encoded rows and audit of either side.

    Two sides alike go as one where few rows make the program, not the data, the cost: a smaller
    program compiles faster.
    """
    n = len(k)
    if n > _FEW_ROWS or spec.k != spec.v or spec.k.format.has_layer_scale:
        return codecs.encode_rows(k, spec.k, scales[0]), codecs.encode_rows(v, spec.v, scales[1])
    both = codecs.encode_rows(jnp.concatenate([k, v]), spec.k, None)
    return jax.tree.map(lambda x: x[:n], both), jax.tree.map(lambda x: x[n:], both)


def _store_pallas_gpu(
    pages: LayerPages,
    rows: tuple[jax.Array, jax.Array],
    slots: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    spec: LayerSpec,
) -> tuple[LayerPages, Audits, None]:
    import pallas_kernels

    k, v = (x.reshape(-1, *x.shape[-2:]) for x in rows)
    new_k, new_v, audits = pallas_kernels.paged_write(
        k,
        v,
        pages.k,
        pages.v,
        slots,
        k_spec=spec.k,
        v_spec=spec.v,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    return LayerPages(new_k, new_v), audits, None


def _count_faults(audits: Audits, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts per fault kind, int32 [8], and the sequence slot of each kind's first, int32 [8]."""
    counts = jnp.zeros((len(FaultKind),), jnp.int32)
    where = jnp.full((len(FaultKind),), -1, jnp.int32)
    if rows.size == 0:
        return counts, where
    stored = (rows >= 0).astype(jnp.int32)
    k, v = audits
    for kind, per_head in (
        (FaultKind.SATURATED, (k.saturated, v.saturated)),
        (FaultKind.FLUSHED, (k.flushed, v.flushed)),
        (FaultKind.NON_FINITE, (k.non_finite, v.non_finite)),
    ):
        per_token = stored * sum(x.sum(-1) for x in per_head)
        counts = counts.at[kind].set(per_token.sum())
        where = where.at[kind].set(rows[jnp.argmax(per_token > 0)])
    return counts, where


def attend(
    cache: PagedCache,
    layer: int,
    q: jax.Array,
    plan: StepPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    store: BlockStore | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of a step's queries over what their sequences have stored.

    Queries are aligned with the end of their sequence: the query of position p sees keys 0 to p,
    this step's included. Softmax and sums are f32.

    Args:
      cache: the cache, after this layer's `write`.
      layer: which layer, a static int.
      q: [S, T, q_heads, head_dim] or [N, q_heads, head_dim]; q_heads a multiple of the layer's
        num_kv_heads.
      plan: the step's plan.
      scale: factor of the scores; 1 / sqrt(head_dim) by default.
      window: W sees keys p - W + 1 to p only, at the cost of the window. With
        `CacheConfig(window=...)` at most that one, and the `keep_first` first keys are seen too.
      soft_cap: scores become cap * tanh(score / cap), before the mask (Gemma 2).
      sinks: f32 [q_heads], a learned logit per head that joins the denominator (gpt-oss).
      return_lse: also return the log-sum-exp.
      implementation: "xla", "pallas_gpu", or None for the best that serves.
      store: where `jaxkv.offload` put blocks; needed with `resident_blocks_per_sequence`. Stored
        blocks are streamed back in tiles, and the answer is exact. Only "xla" reads them.

    Returns:
      [..., q_heads, v_head_dim] in q's dtype; with `return_lse` also f32 [..., q_heads], natural
      log, sinks included. Rows without a stored token are 0, their lse -inf.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape or option, a closed cache, or a store that is missing or useless.
      NotImplementedError: the named implementation cannot serve; the message says why.
    """
    spec = cache.config.layer(layer)
    require_open(cache)
    _check_store(cache.config, store)
    _check_window(cache.config, window)
    pages = cache.layers[layer]
    # No kernel caps the scores of centered keys or by an array, reads stored blocks or keeps first
    # tokens.
    is_cap_known = soft_cap is None or isinstance(soft_cap, (int, float))
    is_centered = soft_cap is not None and cache.k_means is not None
    needs_xla = is_centered or not is_cap_known or store is not None or cache.config.keep_first
    if implementation is None and needs_xla:
        implementation = "xla"
    return attention.attend_pages(
        q,
        pages.k,
        pages.v,
        plan,
        k_spec=spec.k,
        v_spec=spec.v,
        k_scale=cache.k_scales[layer],
        v_scale=cache.v_scales[layer],
        k_mean=None if cache.k_means is None else cache.k_means[layer],
        exact=None if cache.recent is None else cache.recent.layer(layer, cache.config),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        implementation=choose_implementation(cache.config, implementation, layer=layer),
        stored=store,
        layer=layer,
        keep_first=cache.config.keep_first,
    )


def _check_store(config: CacheConfig, store: BlockStore | None) -> None:
    limit = config.resident_blocks_per_sequence
    if limit is not None and store is None:
        raise ValueError(
            f"store: got None, expected a BlockStore: with resident_blocks_per_sequence = {limit} "
            "older blocks of a sequence may lie there"
        )
    if limit is None and store is not None:
        raise ValueError(
            "store: got one, expected None: without CacheConfig(resident_blocks_per_sequence=N) "
            "every block is on the device"
        )


def _check_window(config: CacheConfig, window: int | None) -> None:
    if config.window is not None and (window is None or window > config.window):
        raise ValueError(
            f"window: got {window}, expected at most CacheConfig's window = {config.window}: older "
            "blocks may be gone"
        )


def supports(config: CacheConfig, implementation: Implementation) -> list[str]:
    """Why an implementation cannot serve a config on this machine.

    Args:
      config: geometry and formats.
      implementation: "xla" or "pallas_gpu".

    Returns:
      The reasons, each once over all layers; an empty list means that it can.

    Raises:
      ValueError: an unknown implementation.
    """
    reasons: list[str] = []
    for layer in range(config.num_layers):
        reasons += [r for r in unsupported(config, implementation, layer) if r not in reasons]
    return reasons


def check(cache: PagedCache, *, strict: bool = False) -> None:
    """Raises if the cache counted faults that mean corruption: wrong ids, NaN, and the like.

    Waits for the cache's arrays. What was refused left the cache exactly as it was.

    Args:
      cache: the cache.
      strict: also raise on backpressure and lost precision (exhausted, full, saturated, flushed).

    Raises:
      CacheError: says what, where first, and what to do.
    """
    kinds = frozenset(FaultKind) if strict else CORRUPTION
    if lines := explain(cache.faults, kinds):
        raise CacheError("\n".join(lines))


def report(cache: PagedCache) -> str:
    """All fault counters in words, one line per kind that occurred."""
    return "\n".join(explain(cache.faults)) or "no faults"


def clear_faults(cache: PagedCache) -> PagedCache:
    """The same cache with all fault counters at zero."""
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, faults=Faults.create()))


def trace(cache: PagedCache, block: int) -> list[tuple[str, int, int]]:
    """The last events of a block, oldest first.

    Returns:
      (what, reference count after, step) of each event.

    Raises:
      ValueError: tracing is off, or there is no such block.
    """
    return blocks.read_trace(cache.pool, block)


def _raise_in_debug(old: PagedCache, new: PagedCache) -> PagedCache:
    """With `CacheConfig(debug=True)`: raises on corruption that a verb has just counted."""
    if not new.config.debug:
        return new

    def raise_new(before: np.ndarray, counts: np.ndarray, first: np.ndarray) -> None:
        kinds = {kind for kind in CORRUPTION if counts[kind] > before[kind]}
        if lines := explain(Faults(counts, first), kinds):  # type: ignore[arg-type]
            raise CacheError("\n".join(lines))

    arrays = (old.faults.counts, new.faults.counts, new.faults.first)
    if any(isinstance(a, jax.core.Tracer) for a in arrays):
        jax.debug.callback(raise_new, *arrays)
    else:
        raise_new(*map(np.asarray, arrays))
    return new


def close(cache: PagedCache) -> PagedCache:
    """Deletes every pool array, now.

    Goes on past errors and raises the first of them at the end.

    Returns:
      A cache without pages that grants nothing; write and attend refuse it as closed.
    """
    first_error: Exception | None = None
    for leaf in jax.tree.leaves(_rows(cache)):
        try:
            leaf.delete()
        except Exception as error:  # a failing device must not keep the other pages alive
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    config = cache.config
    pool = dataclasses.replace(cache.pool, num_free=jnp.zeros_like(cache.pool.num_free))
    empty = Sequences.create(config.max_sequences, config.max_blocks_per_sequence)
    return dataclasses.replace(
        cache, layers=(), pool=pool, sequences=empty, recent=None, staging=None
    )


def export_block(cache: PagedCache, layer: int, block: int) -> tuple[bytes, bytes]:
    """The canonical bytes of one block of a layer.

    All codes of the block come first, then all its scales; each ordered by token, KV head, dim,
    packed least significant bit first, multi-byte values little-endian. fp8's layer scale is not
    part of it.

    Args:
      cache: the cache.
      layer: which layer.
      block: which block.

    Returns:
      (K bytes, V bytes), as long as `config.block_bytes(layer)` says.

    Raises:
      TypeError: a layer that is not an int.
      ValueError: no such layer or block, or a closed cache.
      CacheError: online calibration has not frozen the scales yet.
    """
    spec = cache.config.layer(layer)
    require_open(cache)
    online.require_frozen(cache, "export_block")
    _check_block(cache.config, block)
    pages = cache.layers[layer]
    return _side_bytes(pages.k, spec.k, block), _side_bytes(pages.v, spec.v, block)


def _side_bytes(pages: Pages, spec: codecs.SideSpec, block: int) -> bytes:
    rows = codecs.rows_of_block(pages, block)
    data, scales = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), rows)
    codes, scale_bytes = codecs.to_canonical_bytes(data, scales, spec)
    return codes.tobytes() + scale_bytes.tobytes()


def import_block(
    cache: PagedCache, layer: int, block: int, k_bytes: bytes, v_bytes: bytes
) -> PagedCache:
    """Stores what `export_block` returned. Donates the cache: use only what this returns.

    Args:
      cache: the cache.
      layer: which layer.
      block: which block; its reference count does not change.
      k_bytes: canonical bytes of the keys.
      v_bytes: canonical bytes of the values.

    Returns:
      The cache with these bytes in the block.

    Raises:
      TypeError: a layer that is not an int.
      ValueError: no such layer or block, a wrong number of bytes, or a closed cache.
      CacheError: online calibration has not frozen the scales yet.
    """
    spec = cache.config.layer(layer)
    require_open(cache)
    online.require_frozen(cache, "import_block")
    _check_block(cache.config, block)
    expected = cache.config.block_bytes(layer)
    for name, raw, size in zip(("k_bytes", "v_bytes"), (k_bytes, v_bytes), expected):
        if len(raw) != size:
            raise ValueError(f"{name}: got {len(raw)} bytes, expected {size}")
    pages = cache.layers[layer]
    new = LayerPages(
        _import_side(pages.k, spec.k, spec.num_kv_heads, block, k_bytes),
        _import_side(pages.v, spec.v, spec.num_kv_heads, block, v_bytes),
    )
    layers = (*cache.layers[:layer], new, *cache.layers[layer + 1 :])
    return dataclasses.replace(cache, layers=layers)


def _import_side(
    pages: Pages, spec: codecs.SideSpec, num_heads: int, block: int, raw: bytes
) -> Pages:
    elements = pages.block_size * num_heads * spec.head_dim
    split = spec.format.data_bytes(elements)
    everything = np.frombuffer(raw, np.uint8)
    data, scales = codecs.from_canonical_bytes(
        everything[:split], everything[split:], (pages.block_size, num_heads), spec
    )
    data, scales = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (data, scales))
    if scales is not None and scales.ndim == 3:
        scales = jnp.swapaxes(scales, -1, -2)
    return _set_block(pages, Pages(data, scales), jnp.int32(block))


@functools.partial(jax.jit, donate_argnums=0)
def _set_block(pages: Pages, new: Pages, block: jax.Array) -> Pages:
    return jax.tree.map(lambda pool, one: pool.at[block].set(one), pages, new)


def _check_block(config: CacheConfig, block: int) -> None:
    if not 0 <= int(block) < config.num_blocks:
        raise ValueError(f"block: got {block}, expected 0 to {config.num_blocks - 1}")
