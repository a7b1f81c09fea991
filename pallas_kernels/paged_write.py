"""Quantized writes into paged KV caches: encode and store, in place.

One program encodes a tile of tokens of one head (see `write.tiles`) and stores each token's row and
scales at its slot. Both sides of a layer are one kernel. It needs nothing that is special to one
GPU generation: it compiles for sm_80, sm_90a and sm_100a.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.codecs import Audit, Pages
from jaxkv.formats import SideSpec
from pallas_kernels._compat import plgpu, store
from pallas_kernels.write import encode, rotation, tiles
from pallas_kernels.write.staging import Staging

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
INPUT_DTYPES = ("bfloat16", "float16", "float32")

# Bit fields of a token's audit word.
_SATURATED_BITS = 12
_FLUSHED_BITS = 8


@dataclasses.dataclass(frozen=True)
class WriteTuning:
    """How the write kernels are compiled.

    Attributes:
      portable: leave synchronization to the compiler instead of naming each exchange; needed on
        GPUs before Hopper.
    """

    portable: bool = False


def write_unsupported_reasons(
    k_spec: SideSpec, v_spec: SideSpec, *, block_size: int, dtype: Any = jnp.bfloat16
) -> list[str]:
    """Why these kernels cannot write such a cache; empty where they can.

    Args:
      k_spec: the keys' side.
      v_spec: the values' side.
      block_size: tokens of a block.
      dtype: of the keys and values that will be written.
    """
    reasons = []
    for name, spec in (("head_dim", k_spec), ("v_head_dim", v_spec)):
        if spec.head_dim not in HEAD_DIMS:
            reasons.append(f"{name}: got {spec.head_dim}, the kernels take {HEAD_DIMS}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"block_size: got {block_size}, the kernels take {BLOCK_SIZES}")
    if jnp.dtype(dtype).name not in INPUT_DTYPES:
        reasons.append(f"dtype: got {jnp.dtype(dtype).name}, the kernels take {INPUT_DTYPES}")
    return reasons


def paged_write(
    x_k: jax.Array,
    x_v: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    slots: jax.Array,
    *,
    k_spec: SideSpec,
    v_spec: SideSpec,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    tuning: WriteTuning | None = None,
    interpret: Any = None,
) -> tuple[Pages, Pages, tuple[Audit, Audit]]:
    """Encodes keys and values and stores them at their slots.

    In place where the pages are donated or loop-carried; nothing but the named slots changes.

    Args:
      x_k: [N, heads, head_dim] bf16, f16 or f32, not yet rotated.
      x_v: [N, heads, v_head_dim], any of these dtypes.
      k_pages: the keys' pages.
      v_pages: the values' pages.
      slots: int32 [N], block * block_size + offset; -1 skips the token. Slots are distinct.
      k_spec: the keys' side.
      v_spec: the values' side.
      k_scale: f32 scalar, fp8 keys only; None means 1.
      v_scale: f32 scalar, fp8 values only; None means 1.
      tuning: how to compile; None means `WriteTuning()`.
      interpret: `InterpretGPUParams` to run on a CPU, or None.

    Returns:
      The keys' pages, the values' pages, and for each side the `Audit` of what did not fit, int32
      [N, heads] each; 0 for skipped tokens.

    Raises:
      NotImplementedError: a head_dim, block_size or dtype that the kernels do not take.
      ValueError: shapes that do not belong together.
    """
    reasons = write_unsupported_reasons(
        k_spec, v_spec, block_size=k_pages.block_size, dtype=x_k.dtype
    )
    if reasons:
        raise NotImplementedError("paged_write: " + "; ".join(reasons))
    _check_shapes(x_k, x_v, slots, k_pages, v_pages, k_spec, v_spec)
    scales = tuple(
        jnp.asarray(1 if scale is None else scale, jnp.float32).reshape(1)
        for scale in (k_scale, v_scale)
    )
    (k_pages, v_pages), audits = _write(
        (x_k, x_v),
        (k_pages, v_pages),
        slots,
        scales,
        specs=(k_spec, v_spec),
        tuning=tuning or WriteTuning(),
        interpret=interpret,
    )
    return k_pages, v_pages, audits


def _check_shapes(
    x_k: jax.Array,
    x_v: jax.Array,
    slots: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    k_spec: SideSpec,
    v_spec: SideSpec,
) -> None:
    for name, x, pages, spec in (("x_k", x_k, k_pages, k_spec), ("x_v", x_v, v_pages, v_spec)):
        expected = (slots.shape[0], pages.data[0].shape[1], spec.head_dim)
        if x.shape != expected:
            raise ValueError(f"{name}: got shape {x.shape}, expected {expected}")
    if slots.dtype != jnp.int32:
        raise TypeError(f"slots: got {slots.dtype}, expected int32")


@dataclasses.dataclass(frozen=True)
class _Side:
    """The static part of one side's work in the kernel."""

    spec: SideSpec
    block_size: int
    portable: bool

    @property
    def staging(self) -> Staging:
        return Staging(self.spec)

    @property
    def tile(self) -> tiles.Tile:
        return tiles.Tile(self.spec.head_dim)

    def view(self, pages: Pages) -> list[jax.Array]:
        """The pages' arrays, rows split as the kernel stores them."""
        planes = [
            plane.reshape(*plane.shape[:-1], *p.row)
            for plane, p in zip(pages.data, self.staging.planes)
        ]
        if pages.scales is None:
            return planes
        scales = pages.scales
        if self.spec.format.scale == "group_bf16":
            b, h, groups, size = scales.shape
            scales = scales.reshape(b, h, groups // 4, 4, size)
        return [*planes, scales]

    def unview(self, arrays: list[jax.Array], pages: Pages) -> Pages:
        """Inverse of `view`."""
        leaves, tree = jax.tree.flatten(pages)
        return jax.tree.unflatten(tree, [a.reshape(x.shape) for a, x in zip(arrays, leaves)])

    def sync(self) -> None:
        """Makes shared memory stores visible to the whole tile."""
        if not self.portable:
            plgpu.commit_smem()

    def body(
        self,
        tile_index: Any,
        head: Any,
        x: Any,
        slots: Any,
        scale: Any,
        pages: list[Any],
        audit: Any,
        scratch: dict[str, Any],
    ) -> None:
        """Encodes and stores one tile."""
        tile, staging = self.tile, self.staging
        start = tile_index * tile.tokens
        x_tile = x.at[pl.ds(start, tile.tokens), head]
        if self.spec.rotation == "none":
            values = tiles.load(x_tile, tile.grouped).astype(jnp.float32)
        else:
            values = tiles.load(x_tile, tile.transposed).astype(jnp.float32)
            values = rotation.rotate(values, self.spec, tile, scratch["exchange"], self.sync)
        layer_scale = scale[0] if self.spec.format.scale == "layer_f32" else None
        stored, non_finite = encode.encode(values, self.spec, tile, layer_scale)
        staging.stage_codes(scratch["codes"], stored.codes)
        if stored.scales is not None:
            staging.stage_scales(scratch["scales"], stored.scales)
        token_slots = tiles.load(slots.at[pl.ds(start, tile.tokens)], tile.token_layout)
        store(
            audit.at[head, pl.ds(start, tile.tokens)],
            jnp.where(token_slots < 0, jnp.int32(0), _audit_word(stored, non_finite)),
        )
        self.sync()
        self._store_rows(start, head, slots, pages, scratch)

    def _store_rows(
        self, start: Any, head: Any, slots: Any, pages: list[Any], scratch: dict[str, Any]
    ) -> None:
        staging = self.staging

        def store_row(row: Any, carry: None) -> None:
            slot = slots[start + row]

            @pl.when(slot >= 0)
            def _() -> None:
                block = lax.div(slot, np.int32(self.block_size))
                offset = lax.rem(slot, np.int32(self.block_size))
                for plane, ref in zip(staging.planes, pages):
                    words = staging.load_row(scratch["codes"], plane, row)
                    store(ref.at[block, head, offset], words)
                if len(pages) > len(staging.planes):
                    self._store_scales(scratch["scales"], row, pages[-1], block, head, offset)

            return carry

        lax.fori_loop(0, self.tile.tokens, store_row, None)

    def _store_scales(
        self, staged: Any, row: Any, scales: Any, block: Any, head: Any, offset: Any
    ) -> None:
        match self.spec.format.scale:
            case "group_e4m3":
                for word in range(self.tile.words):
                    scales[block, head, word, offset] = staged[row, word]
            case "group_bf16":
                layout = tiles.row_layout((1, self.tile.words, 4))
                values = tiles.load(staged.at[pl.ds(row, 1)], layout)
                store(scales.at[block, pl.ds(head, 1), :, :, offset], values)
            case "token_f16":
                scales[block, head, offset] = staged[row]


def _audit_word(stored: encode.Stored, non_finite: jax.Array) -> jax.Array:
    """One int32 per token: saturated, then flushed, then non-finite, from the low bits up."""
    word = jnp.where(non_finite > 0, jnp.int32(1 << (_SATURATED_BITS + _FLUSHED_BITS)), 0)
    if stored.saturated is not None:
        word = word | stored.saturated
    if stored.flushed is not None:
        word = word | (stored.flushed << np.int32(_SATURATED_BITS))
    return word


def _unpack_audit(word: jax.Array) -> Audit:
    """Audit words int32 [heads, N] to counts [N, heads]."""
    word = word.T
    return Audit(
        saturated=word & (2**_SATURATED_BITS - 1),
        flushed=(word >> _SATURATED_BITS) & (2**_FLUSHED_BITS - 1),
        non_finite=word >> (_SATURATED_BITS + _FLUSHED_BITS),
    )


@functools.partial(jax.jit, static_argnames=("specs", "tuning", "interpret"))
def _write(
    x: tuple[jax.Array, jax.Array],
    pages: tuple[Pages, Pages],
    slots: jax.Array,
    scales: tuple[jax.Array, ...],
    *,
    specs: tuple[SideSpec, SideSpec],
    tuning: WriteTuning,
    interpret: Any,
) -> tuple[tuple[Pages, ...], tuple[Audit, ...]]:
    """One kernel for both sides; jitted, so that layers of equal shape share one computation."""
    sides = [_Side(spec, p.block_size, tuning.portable) for spec, p in zip(specs, pages)]
    count, heads = x[0].shape[:2]
    padded = -(-count // _tile_step(sides)) * _tile_step(sides)
    x_tiles = [_as_tiles(a, side, padded) for a, side in zip(x, sides)]
    slots = jnp.pad(slots, (0, padded - count), constant_values=-1)
    refs = [[jax.new_ref(a) for a in side.view(p)] for side, p in zip(sides, pages)]
    steps = [padded // side.tile.tokens for side in sides]

    def body(*args: Any, **scratch: Any) -> None:
        x_k, x_v, slots_ref, k_scale, v_scale, *rest = args
        k_refs, v_refs = rest[: len(refs[0])], rest[len(refs[0]) : len(refs[0]) + len(refs[1])]
        audits = rest[len(refs[0]) + len(refs[1]) :]
        index, head = lax.axis_index("tile"), lax.axis_index("head")
        work = zip(sides, (x_k, x_v), (k_scale, v_scale), (k_refs, v_refs), audits, ("k", "v"))
        first = 0
        for side, x_ref, scale, page_refs, audit, name in work:
            own = {key[2:]: ref for key, ref in scratch.items() if key[0] == name}
            last = first + steps[name == "v"]

            @pl.when((index >= first) & (index < last))
            def _(
                side=side,
                first=first,
                x_ref=x_ref,
                scale=scale,
                page_refs=page_refs,
                audit=audit,
                own=own,
            ) -> None:
                side.body(index - first, head, x_ref, slots_ref, scale, page_refs, audit, own)

            first = last

    scratch = {
        f"{name}_{key}": value
        for name, side in zip("kv", sides)
        for key, value in side.staging.scratch().items()
    }
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((heads, padded), jnp.int32)] * 2,
        grid=(sum(steps), heads),
        grid_names=("tile", "head"),
        scratch_types=scratch,
        compiler_params=_compiler_params(tuning),
        **({} if interpret is None else {"interpret": interpret}),
    )
    words = kernel(*x_tiles, slots, *scales, *refs[0], *refs[1])
    new_pages = tuple(
        side.unview([jax.freeze(r) for r in side_refs], p)
        for side, side_refs, p in zip(sides, refs, pages)
    )
    return new_pages, tuple(_unpack_audit(word[:, :count]) for word in words)


def _compiler_params(tuning: WriteTuning) -> Any:
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=not tuning.portable,
    )


def _tile_step(sides: list[_Side]) -> int:
    """Tokens that fill whole tiles of every side."""
    return math.lcm(*(side.tile.tokens for side in sides))


def _as_tiles(x: jax.Array, side: _Side, padded: int) -> jax.Array:
    """[N, heads, head_dim] as [padded, heads, words, 4, 16]."""
    x = jnp.pad(x, ((0, padded - x.shape[0]), (0, 0), (0, 0)))
    return x.reshape(*x.shape[:2], *side.tile.shape[1:])
