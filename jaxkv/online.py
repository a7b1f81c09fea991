"""Online fp8 calibration: a cache sets its fp8 scales from the first tokens that it stores.

Until a window of tokens has been seen, over all sequences, they are stored under a provisional
scale and also staged as they came. The step that fills the window sets each layer's scale from the
largest staged magnitude, encodes the staged tokens anew wherever a sequence holds them, and from
then on the scales stay. All of it happens inside the step, without a word from the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import codecs
from jaxkv.codecs import Pages
from jaxkv.codecs.floats import E4M3_MAX
from jaxkv.config import CacheConfig, LayerSpec
from jaxkv.faults import CacheError
from jaxkv.formats import SideSpec
from jaxkv.sequences import StepPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StagedRows:
    """Staged tokens of one layer: f32 [window, heads, dim] of each side; None if it is not fp8."""

    k: jax.Array | None
    v: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staging:
    """What online calibration has seen. One order of tokens serves all layers.

    Attributes:
      layers: staged tokens of each layer.
      index: int32 [S, window], which staged token is the one at a position of a slot.
      begin: int32, tokens staged before the newest step.
      count: int32, tokens staged with it; the scales are frozen once this is the window.
    """

    layers: tuple[StagedRows, ...]
    index: jax.Array
    begin: jax.Array
    count: jax.Array

    @property
    def window(self) -> int:
        """Tokens that the scales are set from."""
        return self.index.shape[1]

    @property
    def is_frozen(self) -> jax.Array:
        """Bool scalar, whether the scales are set for good."""
        return self.count >= self.window


def create(config: CacheConfig) -> Staging | None:
    """Nothing seen yet; None where the config does not calibrate online."""
    if config.online_calibration is None:
        return None
    window = config.online_calibration.window

    def rows(spec: LayerSpec, side: SideSpec) -> jax.Array | None:
        if not side.format.has_layer_scale:
            return None
        return jnp.zeros((window, spec.num_kv_heads, side.head_dim), jnp.float32)

    specs = [config.layer(i) for i in range(config.num_layers)]
    return Staging(
        layers=tuple(StagedRows(rows(s, s.k), rows(s, s.v)) for s in specs),
        index=jnp.zeros((config.max_sequences, window), jnp.int32),
        begin=jnp.int32(0),
        count=jnp.int32(0),
    )


def advance(staging: Staging, plan: StepPlan) -> Staging:
    """Gives the tokens of the step of `plan` their places."""
    begin, window = staging.count, staging.window
    place = _places(plan, begin, window)
    slot = jnp.where(place < window, plan.rows.reshape(-1), staging.index.shape[0])
    index = staging.index.at[slot, plan.positions.reshape(-1)].set(place, mode="drop")
    count = jnp.minimum(begin + jnp.sum(plan.new_tokens, dtype=jnp.int32), window)
    return dataclasses.replace(staging, index=index, begin=begin, count=count)


def _places(plan: StepPlan, begin: jax.Array, window: int) -> jax.Array:
    """Where each token of a step is staged, int32 [n]; `window` for nowhere."""
    is_stored = plan.rows.reshape(-1) >= 0
    place = begin + jnp.cumsum(is_stored, dtype=jnp.int32) - 1
    return jnp.where(is_stored & (place < window), place, window)


def take_slots(staging: Staging, rows: jax.Array) -> Staging:
    """Slot s takes what slot rows[s] had; a negative one leaves anything there."""
    return dataclasses.replace(staging, index=staging.index[jnp.maximum(rows, 0)])


def copy_slots(staging: Staging, source: jax.Array, destination: jax.Array) -> Staging:
    """Slot destination[i] takes what slot source[i] had; a destination of S or more is skipped."""
    index = staging.index.at[destination].set(staging.index[source], mode="drop")
    return dataclasses.replace(staging, index=index)


@dataclasses.dataclass(frozen=True)
class StagingStore:
    """A store that stages a step's tokens first, and in the step that freezes sets the scales.

    It takes ((k, v), StagedRows, Staging, plan) and returns (StagedRows, scales) beside.
    """

    inner: Callable[..., Any]
    headroom: float

    def __call__(
        self,
        pages: Any,
        operands: Any,
        slots: jax.Array,
        scales: tuple[jax.Array, jax.Array],
        spec: LayerSpec,
    ) -> Any:
        """Stages, freezes if it is time, and stores under the scales that then hold."""
        sides, staged, staging, plan = operands
        is_open = staging.begin < staging.window
        staged = jax.lax.cond(
            is_open, lambda old: _stage(old, sides, staging, plan), lambda old: old, staged
        )

        def freeze(old: Any) -> Any:
            new = tuple(
                _scale(rows, scale, self.headroom)
                for rows, scale in zip((staged.k, staged.v), scales)
            )
            return _encode_again(old[0], staged, new, staging, plan, spec), new

        pages, scales = jax.lax.cond(
            is_open & staging.is_frozen, freeze, lambda old: old, (pages, scales)
        )
        pages, audits, _ = self.inner(pages, sides, slots, scales, spec)
        return pages, audits, (staged, scales)


def _stage(
    staged: StagedRows, sides: tuple[jax.Array, jax.Array], staging: Staging, plan: StepPlan
) -> StagedRows:
    place = _places(plan, staging.begin, staging.window)

    def put(rows: jax.Array | None, x: jax.Array) -> jax.Array | None:
        if rows is None:
            return None
        return rows.at[place].set(x.reshape(-1, *x.shape[-2:]).astype(rows.dtype), mode="drop")

    return StagedRows(put(staged.k, sides[0]), put(staged.v, sides[1]))


def _scale(rows: jax.Array | None, scale: jax.Array, headroom: float) -> jax.Array:
    """The scale under which `headroom` times the largest finite magnitude still fits."""
    if rows is None:
        return scale
    largest = jnp.max(jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0))
    fitting = largest * np.float32(headroom / E4M3_MAX)
    is_usable = (fitting > 0) & jnp.isfinite(fitting)
    return jnp.where(is_usable, fitting, scale)


def _encode_again(
    pages: Any,
    staged: StagedRows,
    scales: tuple[jax.Array, ...],
    staging: Staging,
    plan: StepPlan,
    spec: LayerSpec,
) -> Any:
    """Stores the staged tokens anew, in every block in which a sequence holds them."""
    k_rows, v_rows = (
        None if rows is None else codecs.encode_rows(rows, side, scale)[0]
        for rows, side, scale in zip((staged.k, staged.v), (spec.k, spec.v), scales)
    )
    block_size, num_blocks = pages.k.block_size, pages.k.num_blocks
    position = jnp.arange(staging.window, dtype=jnp.int32)

    def visit(slot: jax.Array, pages: Any) -> Any:
        block = plan.block_tables.at[slot, position // block_size].get(mode="fill", fill_value=-1)
        is_held = (position < plan.starts[slot]) & (block >= 0)
        target = jnp.where(is_held, block, num_blocks)

        def put(side: Pages, rows: codecs.Encoded | None) -> Pages:
            if rows is None:
                return side
            own = jax.tree.map(lambda x: x[staging.index[slot]], rows.data)
            rows = dataclasses.replace(rows, data=own)
            return codecs.scatter_rows(side, rows, target, position % block_size)

        return dataclasses.replace(pages, k=put(pages.k, k_rows), v=put(pages.v, v_rows))

    return jax.lax.fori_loop(0, plan.starts.shape[0], visit, pages)


def is_frozen(cache: Any) -> bool:
    """Whether the scales of a cache are set for good, on the host."""
    return cache.staging is None or bool(cache.staging.is_frozen)


def require_frozen(cache: Any, what: str) -> None:
    """Raises while the bytes of a cache's blocks may still change.

    Raises:
      CacheError: online calibration has not seen its window of tokens.
    """
    if not is_frozen(cache):
        staging = cache.staging
        raise CacheError(
            f"{what}: online calibration has seen {int(staging.count)} of {staging.window} tokens; "
            "blocks can be shared and moved once it has frozen the fp8 scales"
        )
