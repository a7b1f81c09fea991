"""`CacheConfig`: the geometry of a cache, and the bytes it takes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Literal

from jaxkv.formats import ENCODINGS, ROTATIONS, Encoding, Format, Rotation, SideSpec

_MAX_EXACT_FIRST = 4
_MAX_EXACT_RECENT = 128
# Tokens that the ring of exact tokens holds beyond its need, so that trims of so many stay exact.
_RING_SLACK = 8


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The static description of one layer of a cache: heads and both sides."""

    num_kv_heads: int
    k: SideSpec
    v: SideSpec

    @property
    def head_dim(self) -> int:
        """Elements of one key head."""
        return self.k.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one value head."""
        return self.v.head_dim

    @property
    def format(self) -> Format:
        """Both storage formats."""
        return Format(self.k.format, self.v.format)

    @property
    def has_layer_scale(self) -> bool:
        """Whether a side is stored under one scale for the whole layer, as fp8 is."""
        return any(side.format.has_layer_scale for side in (self.k, self.v))


@dataclasses.dataclass(frozen=True)
class OnlineCalibration:
    """How a cache sets its own fp8 scales, for want of a calibration set.

    Attributes:
      window: tokens, over all sequences, that are seen before the scales are frozen.
      headroom: at least 1; the frozen scales fit this many times the largest magnitude seen.

    Raises:
      TypeError: the window is not an int.
      ValueError: the window is below 1, or the headroom below 1 or not finite.
    """

    window: int = 256
    headroom: float = 2.0

    def __post_init__(self) -> None:
        _positive("online_calibration: window", self.window)
        if not 1 <= self.headroom < float("inf"):
            raise ValueError(
                f"online_calibration: headroom: got {self.headroom}, expected at least 1"
            )


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected an int")
    if value <= 0:
        raise ValueError(f"{name}: got {value}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Geometry and formats of a cache. Hashable: it is the static part of every cache state.

    Attributes:
      num_layers: layers that hold keys and values.
      num_kv_heads: key/value heads of a layer.
      head_dim: elements of one key head, a multiple of 16.
      v_head_dim: elements of one value head; None means `head_dim`.
      block_size: tokens of one block, a multiple of 8.
      num_blocks: blocks of the pool. One block id addresses the same block in every layer.
      max_sequences: sequence slots, S.
      max_blocks_per_sequence: columns of the block table, M.
      format: a format name or a `Format`.
      layer_formats: formats of the first layers; later layers take `format`.
      layer_dims: (num_kv_heads, head_dim) or (num_kv_heads, head_dim, v_head_dim) of the first
        layers; later layers take the default.
      encoding: "searched" (default) or "reference".
      rotation: "signs" (default) or "hadamard", for rotated formats.
      exact_first: 0 to 4; the first tokens of each sequence are also kept in bf16, and read there.
      exact_recent: 0 to 128; likewise the newest tokens before each query.
      max_step_tokens: with exact_recent, most tokens that one sequence may get in a step.
      online_calibration: the cache sets its fp8 scales from the first tokens it stores; None
        leaves them as `init` was given them.
      trace_events: last events kept per block; 0 keeps none and costs nothing.
      debug: raise on corruption-class faults where they happen.
      resident_blocks_per_sequence: N keeps the newest N blocks of a sequence on the device;
        `jaxkv.offload` moves older ones to a `BlockStore`, and `attend` reads them there. None
        keeps all.
      window: W for models whose every layer attends to keys p - W + 1 to p at most: `reserve` drops
        blocks that no later query can see, for good. None keeps all.
      keep_first: with a window, the first n tokens stay and every query sees them (attention
        sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).

    Raises:
      TypeError: a size, window or limit of resident blocks that is not an int, a format that is
        neither a name nor a `Format`, or an online_calibration of another type.
      ValueError: a number out of range, or for exact_first, exact_recent, trace_events and
        keep_first one that is not an int; a head_dim that is no multiple of 16, a block_size that
        is none of 8; more token slots or positions than int32 can count; an unknown name; more
        layer_formats or layer_dims than layers; keep_first without a window, a window with
        resident_blocks_per_sequence, or online_calibration without an fp8 side.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    block_size: int = 16
    num_blocks: int = 1024
    max_sequences: int = 8
    max_blocks_per_sequence: int = 128
    format: Format | str = "bf16"
    layer_formats: tuple[Format | str, ...] = ()
    layer_dims: tuple[tuple[int, ...], ...] = ()
    encoding: Encoding = "searched"
    rotation: Rotation = "signs"
    exact_first: int = 0
    exact_recent: int = 0
    max_step_tokens: int = 256
    online_calibration: OnlineCalibration | None = None
    trace_events: int = 0
    debug: bool = False
    resident_blocks_per_sequence: int | None = None
    window: int | None = None
    keep_first: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "num_blocks",
            "max_sequences",
            "max_blocks_per_sequence",
            "max_step_tokens",
        ):
            _positive(name, getattr(self, name))
        if self.v_head_dim is not None:
            _positive("v_head_dim", self.v_head_dim)
        for name in ("resident_blocks_per_sequence", "window"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        self._normalize()
        self._check_block_geometry()
        self._check_options()
        specs = [self.layer(layer) for layer in range(self.num_layers)]
        if self.online_calibration is not None:
            self._check_online_calibration(specs)

    def _check_online_calibration(self, specs: list[LayerSpec]) -> None:
        if not isinstance(self.online_calibration, OnlineCalibration):
            raise TypeError(
                f"online_calibration: got {self.online_calibration!r}, expected an "
                "OnlineCalibration or None"
            )
        if not any(spec.has_layer_scale for spec in specs):
            raise ValueError(
                f"online_calibration: format {self.format} has no scale to set, only fp8 has one"
            )

    def _normalize(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("format", Format.parse(self.format))
        put("layer_formats", tuple(Format.parse(f) for f in self.layer_formats))
        put("layer_dims", tuple(tuple(d) for d in self.layer_dims))
        if isinstance(self.online_calibration, Mapping):
            put("online_calibration", OnlineCalibration(**self.online_calibration))
        for name in ("layer_formats", "layer_dims"):
            if len(getattr(self, name)) > self.num_layers:
                raise ValueError(
                    f"{name}: got {len(getattr(self, name))} entries, expected at most "
                    f"num_layers = {self.num_layers}"
                )
        for layer, dims in enumerate(self.layer_dims):
            if len(dims) not in (2, 3):
                raise ValueError(
                    f"layer_dims[{layer}]: got {dims}, expected (num_kv_heads, head_dim) or "
                    "(num_kv_heads, head_dim, v_head_dim)"
                )
            for value in dims:
                _positive(f"layer_dims[{layer}]", value)

    def _check_block_geometry(self) -> None:
        if self.block_size % 8:
            raise ValueError(f"block_size: got {self.block_size}, expected a multiple of 8")
        if self.num_blocks * self.block_size > 2**31 - 1:
            raise ValueError(
                f"num_blocks: got {self.num_blocks}, expected num_blocks * block_size < 2^31 "
                f"(token slots are int32; block_size = {self.block_size})"
            )
        if self.max_blocks_per_sequence * self.block_size > 2**31 - 1:
            raise ValueError(
                f"max_blocks_per_sequence: got {self.max_blocks_per_sequence}, expected "
                "max_blocks_per_sequence * block_size < 2^31 (positions are int32)"
            )

    def _check_options(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding: got {self.encoding!r}, expected one of {ENCODINGS}")
        if self.rotation not in ROTATIONS:
            raise ValueError(f"rotation: got {self.rotation!r}, expected one of {ROTATIONS}")
        for name, most in (("exact_first", _MAX_EXACT_FIRST), ("exact_recent", _MAX_EXACT_RECENT)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ValueError(f"{name}: got {value!r}, expected an int from 0 to {most}")
        if not isinstance(self.trace_events, int) or not 0 <= self.trace_events <= 1024:
            raise ValueError(
                f"trace_events: got {self.trace_events!r}, expected an int from 0 to 1024"
            )

        if not isinstance(self.keep_first, int) or self.keep_first < 0:
            raise ValueError(f"keep_first: got {self.keep_first!r}, expected an int, at least 0")
        if self.keep_first and self.window is None:
            raise ValueError(f"keep_first: got {self.keep_first}, expected 0 without a window")
        if self.window is not None and self.resident_blocks_per_sequence is not None:
            raise ValueError(
                "window: it drops for good what resident_blocks_per_sequence would store, expected "
                "one of them"
            )

    def layer_format(self, layer: int) -> Format:
        """The format of a layer."""
        self._check_layer(layer)
        chosen = self.layer_formats[layer] if layer < len(self.layer_formats) else self.format
        return Format.parse(chosen)

    def layer(self, layer: int) -> LayerSpec:
        """The static description of a layer.

        Raises:
          TypeError: `layer` is not a Python int (a traced layer index is not supported).
          ValueError: there is no such layer, or its head_dim is not a multiple of 16.
        """
        self._check_layer(layer)
        fmt = self.layer_format(layer)
        dims: tuple[int | None, ...] = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        if layer < len(self.layer_dims):
            dims = (*self.layer_dims[layer], None)[:3]
        heads, k_dim, v_dim = dims
        assert heads is not None and k_dim is not None
        side = functools.partial(SideSpec, encoding=self.encoding, rotation=self.rotation)
        return LayerSpec(heads, side(fmt.k, k_dim), side(fmt.v, v_dim or k_dim))

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise TypeError(
                f"layer: got {layer!r} of type {type(layer).__name__}, expected a static Python "
                "int (a traced layer index is not supported: unroll the layers)"
            )
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: got {layer}, expected 0 to {self.num_layers - 1}")

    def block_elements(self, layer: int = 0) -> tuple[int, int]:
        """(K, V) elements of one block of a layer."""
        spec = self.layer(layer)
        tokens = self.block_size * spec.num_kv_heads
        return tokens * spec.head_dim, tokens * spec.v_head_dim

    def block_bytes(self, layer: int = 0) -> tuple[int, int]:
        """(K bytes, V bytes) of one block of a layer, data and scales."""
        spec = self.layer(layer)
        k, v = (
            side.format.data_bytes(n) + side.format.scale_bytes(n, side.head_dim)
            for side, n in zip((spec.k, spec.v), self.block_elements(layer))
        )
        return k, v

    def block_strides(self, layer: int = 0) -> tuple[tuple[int, int], tuple[int, int]]:
        """((K data, K scale), (V data, V scale)): bytes from one block to the next, per section."""
        spec = self.layer(layer)
        k, v = (
            (side.format.data_bytes(n), side.format.scale_bytes(n, side.head_dim))
            for side, n in zip((spec.k, spec.v), self.block_elements(layer))
        )
        return k, v

    @functools.cached_property
    def block_bytes_total(self) -> int:
        """Bytes of one block id over all layers and both sides."""
        return sum(sum(self.block_bytes(i)) for i in range(self.num_layers))

    @functools.cached_property
    def bits_per_element(self) -> float:
        """Mean stored bits per element over all layers and sides, all scales but fp8's counted."""
        elements = sum(sum(self.block_elements(i)) for i in range(self.num_layers))
        return 8 * self.block_bytes_total / elements

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes over all layers."""
        return self.block_bytes_total / self.block_size

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens that one row of the block table can address."""
        return self.max_blocks_per_sequence * self.block_size

    @property
    def has_exact_tokens(self) -> bool:
        """Whether any tokens are also kept in bf16."""
        return bool(self.exact_first or self.exact_recent)

    @property
    def ring_tokens(self) -> int:
        """Tokens of each sequence that its ring of exact recent tokens holds."""
        if not self.exact_recent:
            return 0
        return self.exact_recent + self.max_step_tokens + _RING_SLACK

    @property
    def exact_rows(self) -> int:
        """Tokens of each sequence that are also kept in bf16, first and recent ones."""
        return self.exact_first + self.ring_tokens

    @functools.cached_property
    def exact_bytes_per_sequence(self) -> int:
        """Bytes of one sequence's exact tokens over all layers and both sides."""
        specs = map(self.layer, range(self.num_layers))
        return sum(
            2 * self.exact_rows * s.num_kv_heads * (s.head_dim + s.v_head_dim) for s in specs
        )

    @property
    def exact_bytes(self) -> int:
        """Bytes of the exact tokens of all sequence slots."""
        return self.max_sequences * self.exact_bytes_per_sequence

    def blocks_that_fit(self, budget_bytes: int) -> int:
        """Blocks that fit into a byte budget beside the exact tokens, all layers counted.

        Args:
          budget_bytes: bytes for the cache.

        Returns:
          A number for `num_blocks`; 0 where the exact tokens alone take the budget.

        Raises:
          ValueError: a negative budget.
        """
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes: got {budget_bytes}, expected at least 0")
        return max(int(budget_bytes) - self.exact_bytes, 0) // self.block_bytes_total

    def to_json(self) -> str:
        """A JSON text that `from_json` turns back into an equal config."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["format"] = str(self.format)
        fields["layer_formats"] = [str(f) for f in self.layer_formats]
        if self.online_calibration is not None:
            fields["online_calibration"] = dataclasses.asdict(self.online_calibration)
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> CacheConfig:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: the text is not a config: not an object, or unknown or missing fields.
        """
        fields = json.loads(text)
        if not isinstance(fields, Mapping):
            raise ValueError(f"config: expected a JSON object, got {type(fields).__name__}")
        known = {f.name: f.default for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"config: unknown fields {unknown}, expected some of {sorted(known)}")
        needed = {name for name, default in known.items() if default is dataclasses.MISSING}
        if missing := sorted(needed - set(fields)):
            raise ValueError(f"config: missing fields {missing}")
        return cls(**fields)


def boundary_formats(
    format: Format | str, num_layers: int, high: int | Literal["auto", "all"] = "auto"
) -> tuple[Format, ...]:
    """Formats per layer with the first and last layers in bf16.

    Quality gains little more than in proportion to the bits: `CacheConfig.bits_per_element` says
    what is then stored on average.

    Args:
      format: the format of the layers between.
      num_layers: layers of the model.
      high: how many layers at each end stay in bf16; "all" for every layer. "auto" goes by the
        smaller side: 4 for turbo2, 2 for other turbo formats, 0 for the rest and for models of
        fewer than 12 layers.

    Returns:
      `num_layers` formats, for `CacheConfig(layer_formats=...)`.

    Raises:
      TypeError: num_layers or high of a wrong type.
      ValueError: an unknown format, or a number out of range.
    """
    chosen = Format.parse(format)
    _positive("num_layers", num_layers)
    if high == "auto":
        smaller = min(chosen.k, chosen.v, key=lambda side: side.bits_per_element)
        high = (4 if smaller.bits == 2 else 2) if smaller.is_rotated and num_layers >= 12 else 0
    elif high == "all":
        return (Format.parse("bf16"),) * num_layers
    if not isinstance(high, int) or isinstance(high, bool):
        raise TypeError(f"high: got {high!r}, expected an int, 'auto' or 'all'")
    if not 0 <= 2 * high <= num_layers:
        raise ValueError(f"high: got {high}, expected 0 to {num_layers // 2} (num_layers / 2)")
    ends = (Format.parse("bf16"),) * high
    return ends + (chosen,) * (num_layers - 2 * high) + ends
