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
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.codecs import Audit, Pages
from jaxkv.formats import SideSpec
from pallas_kernels._compat import compute_capability, plgpu
from pallas_kernels.write import tiles
from pallas_kernels.write.side import Side, own_scratch, scratch_types, unpack_audit

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
INPUT_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class WriteTuning:
    """How the write kernels are compiled.

    Attributes:
      portable: leave synchronization to the compiler instead of naming each exchange; needed on
        GPUs before Hopper.
    """

    portable: bool = False


def default_tuning(interpret: Any = None) -> WriteTuning:
    """The tuning for the GPU that kernels are being lowered for."""
    return WriteTuning(portable=interpret is None and compute_capability() < (9, 0))


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
      slots: int32 [N], distinct, block * block_size + offset; -1 and slots beyond the pool skip
        the token.
      k_spec: the keys' side.
      v_spec: the values' side.
      k_scale: f32 scalar, fp8 keys only; None means 1.
      v_scale: f32 scalar, fp8 values only; None means 1.
      tuning: how to compile; None follows the GPU.
      interpret: `InterpretGPUParams` to run on a CPU, or None.

    Returns:
      The keys' pages, the values' pages, and for each side the `Audit` of what did not fit, int32
      [N, heads] each; 0 for skipped tokens.

    Raises:
      NotImplementedError: a head_dim, block_size or dtype that the kernels do not take.
      TypeError: slots of another dtype.
      ValueError: shapes that do not belong together.
    """
    reasons = [
        reason
        for dtype in {x_k.dtype, x_v.dtype}
        for reason in write_unsupported_reasons(
            k_spec, v_spec, block_size=k_pages.block_size, dtype=dtype
        )
    ]
    if reasons:
        raise NotImplementedError("paged_write: " + "; ".join(sorted(set(reasons))))
    for name, x, pages, spec in (("x_k", x_k, k_pages, k_spec), ("x_v", x_v, v_pages, v_spec)):
        expected = (slots.shape[0], pages.data[0].shape[1], spec.head_dim)
        if x.shape != expected:
            raise ValueError(f"{name}: got shape {x.shape}, expected {expected}")
    check_slots(slots)
    (k_pages, v_pages), audits = _write(
        (x_k, x_v),
        (k_pages, v_pages),
        slots,
        (layer_scale(k_scale), layer_scale(v_scale)),
        specs=(k_spec, v_spec),
        tuning=tuning or default_tuning(interpret),
        interpret=interpret,
    )
    return k_pages, v_pages, audits


def check_slots(slots: jax.Array) -> None:
    """Raises TypeError unless slots are int32 [N]."""
    if slots.dtype != jnp.int32 or slots.ndim != 1:
        raise TypeError(f"slots: got {slots.dtype}{list(slots.shape)}, expected int32 [N]")


def layer_scale(scale: jax.Array | float | None) -> jax.Array:
    """A layer's scale as the kernels take it: f32 [1]."""
    return jnp.asarray(1 if scale is None else scale, jnp.float32).reshape(1)


@functools.partial(jax.jit, static_argnames=("specs", "tuning", "interpret"))
def _write(
    x: tuple[jax.Array, jax.Array],
    pages: tuple[Pages, Pages],
    slots: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    *,
    specs: tuple[SideSpec, SideSpec],
    tuning: WriteTuning,
    interpret: Any,
) -> tuple[tuple[Pages, ...], tuple[Audit, ...]]:
    """One kernel for both sides; jitted, so that layers of equal shape share one computation."""
    sides = make_sides(specs, pages, tuning, interpret)
    count, heads = x[0].shape[:2]
    padded = padded_tokens(count, sides)
    tiles_x = [_as_tiles(a, side, padded) for a, side in zip(x, sides)]
    slots = jnp.pad(slots, (0, padded - count), constant_values=-1)
    refs = [[jax.new_ref(a) for a in side.view(p)] for side, p in zip(sides, pages)]
    num_tiles = [padded // side.tile.tokens for side in sides]

    def body(*args: Any, **scratch: Any) -> None:
        x_refs, slots_ref, scale_refs, page_refs, audits = split_refs(args, (2, None, 2), refs)
        index, head = lax.axis_index("tile"), lax.axis_index("head")

        def write_side(which: int, tile_index: Any) -> None:
            side = sides[which]
            start = tile_index * side.tile.tokens
            x_tile = x_refs[which].at[pl.ds(start, side.tile.tokens), head]
            values = tiles.load(x_tile, side.input_layout).astype(jnp.float32)
            own = own_scratch("kv"[which], scratch)
            side.write(
                values,
                start,
                head,
                slots_ref,
                scale_refs[which],
                page_refs[which],
                audits[which],
                own,
            )

        pl.when(index < num_tiles[0])(lambda: write_side(0, index))
        pl.when(index >= num_tiles[0])(lambda: write_side(1, index - num_tiles[0]))

    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((heads, padded), jnp.int32)] * 2,
        grid=(sum(num_tiles), heads),
        grid_names=("tile", "head"),
        scratch_types=scratch_types(dict(zip("kv", sides))),
        compiler_params=compiler_params(tuning),
        **({} if interpret is None else {"interpret": interpret}),
    )
    words = kernel(*tiles_x, slots, *scales, *refs[0], *refs[1])
    new_pages = freeze_pages(sides, refs, pages)
    return new_pages, tuple(unpack_audit(word[:, :count]) for word in words)


def make_sides(
    specs: tuple[SideSpec, ...], pages: tuple[Pages, ...], tuning: WriteTuning, interpret: Any
) -> list[Side]:
    """The static sides of a kernel."""
    return [
        Side(spec, p.block_size, tuning.portable, interpret is not None)
        for spec, p in zip(specs, pages)
    ]


def split_refs(
    args: tuple[Any, ...], inputs: tuple[int | None, ...], pages: list[list[Any]]
) -> list[Any]:
    """Sorts a kernel's references.

    Args:
      args: inputs, then the pages' arrays, then outputs.
      inputs: how many references each input has; None for one that comes alone.
      pages: what the pages' arrays look like, a list per side.

    Returns:
      One entry per input, then the pages, a list per side, then the list of outputs.
    """
    rest = list(args)
    entries: list[Any] = []
    for size in inputs:
        entries.append(rest.pop(0) if size is None else [rest.pop(0) for _ in range(size)])
    entries.append([[rest.pop(0) for _ in side] for side in pages])
    return [*entries, rest]


def freeze_pages(
    sides: list[Side], refs: list[list[Any]], pages: tuple[Pages, ...]
) -> tuple[Pages, ...]:
    """The pages after the kernel has written through the references."""
    return tuple(
        side.unview([jax.freeze(r) for r in side_refs], p)
        for side, side_refs, p in zip(sides, refs, pages)
    )


def compiler_params(tuning: WriteTuning) -> Any:
    """Compiler parameters of the write kernels."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=not tuning.portable,
    )


def padded_tokens(count: int, sides: list[Side]) -> int:
    """Tokens that fill whole tiles of every side."""
    step = math.lcm(*(side.tile.tokens for side in sides))
    return -(-count // step) * step


def _as_tiles(x: jax.Array, side: Side, padded: int) -> jax.Array:
    """[N, heads, head_dim] as [padded, heads, words, 4, 16]."""
    x = jnp.pad(x, ((0, padded - x.shape[0]), (0, 0), (0, 0)))
    return x.reshape(*x.shape[:2], *side.tile.shape[1:])
