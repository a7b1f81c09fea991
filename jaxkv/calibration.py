"""Calibration: what a model's keys and values look like, measured before it serves.

Most of the energy of keys after RoPE is one constant vector per layer and head. A softmax does not
see a vector that is added to every key, so a cache may store keys without it: the error of every
scaled format falls with what has to be encoded, and nothing is added back when keys are read. The
same pass over a few thousand tokens finds the scales that fp8 needs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._buckets import bucket
from jaxkv._forward import feed
from jaxkv.cache import LayerPages, check, init
from jaxkv.codecs.floats import E4M3_MAX
from jaxkv.codecs.rows import FP8_SATURATED
from jaxkv.config import CacheConfig

# Largest value of E4M3, and from where on a value is lost to more than rounding.
_KIND, _VERSION = "jaxkv calibration", 1
_CHUNK, _MIN_CHUNK = 512, 16

TokenBatch = np.ndarray | jax.Array | Sequence[Sequence[int]] | Sequence[int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Calibration:
    """What `calibrate` found. A pytree; `jaxkv.init(config, calibration=...)` takes it.

    Scales are amax * headroom / 448, keys taken without their mean.

    Attributes:
      k_means: f32 [kv_heads, head_dim] of each layer, the mean key after RoPE and normalisation;
        None: keys are not centered.
      k_scales: f32 [layers], fp8 scales of the (centered) keys.
      v_scales: f32 [layers], of the values.
      k_amax: f32 [layers], largest magnitude of the (centered) keys.
      v_amax: f32 [layers], of the values.
      k_saturated: int32 [layers], key elements of every batch but the first that a scale frozen on
        the batches before it would have clipped. Many of them mean too little data or headroom.
      v_saturated: likewise for values.
      tokens: int32, tokens seen.
      headroom: how far beyond amax the scales reach.
    """

    k_means: tuple[jax.Array, ...] | None
    k_scales: jax.Array
    v_scales: jax.Array
    k_amax: jax.Array
    v_amax: jax.Array
    k_saturated: jax.Array
    v_saturated: jax.Array
    tokens: jax.Array
    headroom: float = dataclasses.field(default=2.0, metadata={"static": True})

    def __repr__(self) -> str:
        keys = "as they come" if self.k_means is None else "centered"
        return (
            f"Calibration({self.k_scales.shape[0]} layers, {int(self.tokens):,} tokens, keys "
            f"{keys}, headroom {self.headroom:g})"
        )

    def check_fits(self, config: CacheConfig) -> None:
        """Raises ValueError, naming what differs, where the geometry is not the config's."""
        layers = self.k_scales.shape[0]
        if layers != config.num_layers:
            raise ValueError(
                f"calibration: made for {layers} layers, the config has {config.num_layers}"
            )
        for layer, mean in enumerate(self.k_means or ()):
            spec = config.layer(layer)
            expected = (spec.num_kv_heads, spec.head_dim)
            if mean.shape != expected:
                raise ValueError(
                    f"calibration: the key mean of layer {layer} is {list(mean.shape)}, the config "
                    f"has {list(expected)} (kv_heads, head_dim)"
                )

    def save(self, path: str | Path) -> None:
        """Writes one .npz file, whole or not at all."""
        header = {"kind": _KIND, "version": _VERSION, "headroom": self.headroom}
        arrays: dict[str, Any] = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        for layer, mean in enumerate(self.k_means or ()):
            arrays[f"k_mean_{layer}"] = np.asarray(mean)
        partial = Path(f"{path}.partial")
        with partial.open("wb") as file:
            np.savez(file, header=np.array(json.dumps(header)), **arrays)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what `save` wrote.

        Raises:
          ValueError: not a calibration, or one of a later version.
        """
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"])) if "header" in file else {}
            if header.get("kind") != _KIND:
                raise ValueError(f"calibration: {path} is not a file that Calibration.save wrote")
            if header["version"] > _VERSION:
                raise ValueError(
                    f"calibration: {path} has version {header['version']}, this jaxkv reads up to "
                    f"{_VERSION}"
                )
            arrays = {name: jnp.asarray(file[name]) for name in _ARRAYS}
            names = [f"k_mean_{i}" for i in range(arrays["k_scales"].shape[0])]
            means = tuple(jnp.asarray(file[n]) for n in names) if names[0] in file else None
        return cls(k_means=means, headroom=header["headroom"], **arrays)


_ARRAYS = ("k_scales", "v_scales", "k_amax", "v_amax", "k_saturated", "v_saturated", "tokens")


def calibrate(
    model: Any,
    config: CacheConfig,
    token_batches: Iterable[TokenBatch],
    *,
    headroom: float = 2.0,
    center_keys: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Measures a model's keys and values on sample text.

    The model runs over a bf16 cache of the config's geometry, and the statistics come from the
    pages it has filled, so they are of what a cache is given: keys after normalisation and RoPE. A
    few thousand tokens are enough; any text but the one to be evaluated on will do.

    Args:
      model: as `jaxkv.generate.generate` takes it.
      config: the cache's config; its layers, heads, dims and block size are used.
      token_batches: batches of sequences: int [B, T], lists of token ids, or one list.
      headroom: the fp8 scales hold `headroom` times the largest magnitude seen.
      center_keys: whether the cache shall store keys without their mean.
      on_progress: called with the tokens done so far.

    Returns:
      The calibration.

    Raises:
      ValueError: no tokens, a negative token, or a headroom that is not positive and finite.
      CacheError: the model produced NaN or infinity.
    """
    if not (math.isfinite(headroom) and headroom > 0):
        raise ValueError(f"headroom: got {headroom}, expected a positive finite number")
    totals = _Totals(config.num_layers, headroom, center_keys)
    for batch in token_batches:
        for moments, tokens in _batch_moments(model, config, _rows(batch), totals):
            totals.add(moments, tokens)
            if on_progress is not None:
                on_progress(totals.tokens)
        totals.freeze()
    if not totals.tokens:
        raise ValueError("token_batches: got no tokens")
    return totals.result()


def _rows(batch: TokenBatch) -> list[np.ndarray]:
    """A batch as its sequences, empty ones left out."""
    is_single = hasattr(batch, "ndim") and batch.ndim == 1
    is_single |= not hasattr(batch, "ndim") and len(batch) > 0 and np.ndim(batch[0]) == 0
    rows = [np.asarray(row) for row in ([batch] if is_single else batch)]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"token_batches: got {row.dtype}{list(row.shape)} for a sequence, expected ints [T]"
            )
        if row.size and row.min() < 0:
            raise ValueError(f"token_batches: token ids are not negative, got {row.min()}")
    return [row for row in rows if row.size]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Moments:
    """Of one layer and chunk: f32 [heads, dim] of the keys, f32 scalar of the values."""

    k_sum: jax.Array
    k_low: jax.Array
    k_high: jax.Array
    v_amax: jax.Array
    k_saturated: jax.Array
    v_saturated: jax.Array


def _batch_moments(
    model: Any, config: CacheConfig, rows: list[np.ndarray], totals: _Totals
) -> Iterator[tuple[list[_Moments], int]]:
    """Runs a batch; yields (moments of every layer, tokens) of each chunk."""
    if not rows:
        return
    longest = max(map(len, rows))
    chunk = min(_CHUNK, bucket(longest, _MIN_CHUNK))
    columns = -(-longest // chunk) * -(-chunk // config.block_size)
    cache = init(
        CacheConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            layer_dims=config.layer_dims,
            block_size=config.block_size,
            num_blocks=len(rows) * columns,
            max_sequences=len(rows),
            max_blocks_per_sequence=columns,
            format="bf16",
        )
    )
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), -(-longest // chunk) * chunk), np.int32)
    for padded, row in zip(tokens, rows):
        padded[: len(row)] = row
    for start in range(0, longest, chunk):
        counts = np.clip(lengths - start, 0, chunk)
        _, cache, plan = feed(model, cache, tokens[:, start : start + chunk], counts)
        yield (
            [
                _moments(pages, plan.slots.reshape(-1), *limits)
                for pages, limits in zip(cache.layers, totals.limits())
            ],
            int(counts.sum()),
        )
    check(cache)


@jax.jit
def _moments(
    pages: LayerPages, slots: jax.Array, k_mean: jax.Array, k_limit: jax.Array, v_limit: jax.Array
) -> _Moments:
    """Statistics of the rows at `slots`, int32 [N], -1 for none."""
    k, v = (_gather(side.data[0], slots) for side in (pages.k, pages.v))
    held = (slots >= 0)[:, None, None]
    return _Moments(
        k_sum=jnp.where(held, k, 0).sum(0),
        k_low=jnp.where(held, k, jnp.inf).min(0),
        k_high=jnp.where(held, k, -jnp.inf).max(0),
        v_amax=jnp.where(held, jnp.abs(v), 0).max(),
        k_saturated=(held & (jnp.abs(k - k_mean) > k_limit)).sum(),
        v_saturated=(held & (jnp.abs(v) > v_limit)).sum(),
    )


def _gather(pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows f32 [N, heads, dim] of pages [blocks, heads, block_size, dim]."""
    block, offset = jnp.divmod(jnp.maximum(slots, 0), pages.shape[2])
    return pages[block, :, offset].astype(jnp.float32)


class _Totals:
    """Moments of all layers so far, on the host in double precision."""

    def __init__(self, num_layers: int, headroom: float, center_keys: bool):
        self.tokens = 0
        self._headroom = headroom
        self._center = center_keys
        self._layers: list[_Moments] | None = None
        none = (np.float32(0), np.float32(np.inf), np.float32(np.inf))
        self._limits: list[tuple[Any, ...]] = [none] * num_layers

    def limits(self) -> list[tuple[Any, ...]]:
        """(key mean, largest key, largest value) of each layer before anything is clipped."""
        return self._limits

    def add(self, moments: Sequence[_Moments], tokens: int) -> None:
        """Takes the moments of a chunk."""
        new = [jax.tree.map(functools.partial(np.asarray, dtype=np.float64), m) for m in moments]
        self.tokens += tokens
        if self._layers is None:
            self._layers = new
            return
        self._layers = [
            _Moments(
                k_sum=a.k_sum + b.k_sum,
                k_low=np.minimum(a.k_low, b.k_low),
                k_high=np.maximum(a.k_high, b.k_high),
                v_amax=np.maximum(a.v_amax, b.v_amax),
                k_saturated=a.k_saturated + b.k_saturated,
                v_saturated=a.v_saturated + b.v_saturated,
            )
            for a, b in zip(self._layers, new)
        ]

    def freeze(self) -> None:
        """Makes the scales so far those that the next batch is held against."""
        if self._layers is not None:
            self._limits = [
                (
                    np.asarray(mean, np.float32),
                    np.float32(float(FP8_SATURATED) * self._scale(k_amax)),
                    np.float32(float(FP8_SATURATED) * self._scale(v_amax)),
                )
                for mean, k_amax, v_amax in map(self._layer, self._layers)
            ]

    def _layer(self, layer: _Moments) -> tuple[Any, float, float]:
        """(key mean, amax of the keys without it, amax of the values)."""
        mean = np.asarray(layer.k_sum / self.tokens if self._center else 0 * layer.k_sum)
        mean = mean.astype(np.float32)
        k_amax = float(np.maximum(layer.k_high - mean, mean - layer.k_low).max())
        return mean, k_amax, float(layer.v_amax)

    def _scale(self, amax: float) -> float:
        # A layer of zeros says nothing about its scale.
        return amax * self._headroom / float(E4M3_MAX) if amax else 1.0

    def result(self) -> Calibration:
        """The calibration of everything seen."""
        assert self._layers is not None
        means, k_amax, v_amax = zip(*map(self._layer, self._layers))

        def array(values: Any, dtype: Any = jnp.float32) -> jax.Array:
            return jnp.asarray(np.array(list(values)), dtype)

        return Calibration(
            k_means=tuple(map(jnp.asarray, means)) if self._center else None,
            k_scales=array(map(self._scale, k_amax)),
            v_scales=array(map(self._scale, v_amax)),
            k_amax=array(k_amax),
            v_amax=array(v_amax),
            k_saturated=array((m.k_saturated for m in self._layers), jnp.int32),
            v_saturated=array((m.v_saturated for m in self._layers), jnp.int32),
            tokens=jnp.int32(self.tokens),
            headroom=self._headroom,
        )
