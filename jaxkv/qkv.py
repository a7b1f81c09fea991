"""The fused layer entry: split, RMS normalisation, rotary positions, write.

The parts are pure functions over arrays and useful by themselves.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkv.cache import Audits, LayerPages, PagedCache, store_rows, write
from jaxkv.config import LayerSpec
from jaxkv.dispatch import Implementation, choose_implementation
from jaxkv.sequences import StepPlan

RopeStyle = Literal["none", "half", "interleaved"]
ROPE_STYLES: tuple[RopeStyle, ...] = ("none", "half", "interleaved")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the length it was trained on.

    With `factor` alone every frequency is divided by it (linear scaling). With
    `original_max_positions` the rule of Llama 3.1 applies: wavelengths above
    `original_max_positions / low_frequency_factor` are stretched by `factor`, those below
    `original_max_positions / high_frequency_factor` are kept, and the ones between are blended.
    `divisors` gives one divisor per frequency outright, as GGUF files do.

    Reference: the Llama 3.1 model card and its published `config.json`.
    """

    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int | None = None
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"RopeScaling: factor must be positive, got {self.factor}")
        if self.original_max_positions and (
            self.high_frequency_factor <= self.low_frequency_factor
        ):
            raise ValueError(
                "RopeScaling: high_frequency_factor must exceed low_frequency_factor, got "
                f"{self.high_frequency_factor} and {self.low_frequency_factor}"
            )


def rope_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Angle per position of each rotated pair.

    Args:
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the geometric series of wavelengths.
      scaling: optional stretching of the series.

    Returns:
      f32[rotary_dim / 2], radians per position, fastest first.

    Reference: Su et al., RoFormer (2021), https://arxiv.org/abs/2104.09864
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be positive and even, got {rotary_dim}")
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequencies = 1.0 / jnp.float32(theta) ** exponents
    if scaling is None:
        return frequencies
    if scaling.divisors is not None:
        if len(scaling.divisors) != rotary_dim // 2:
            raise ValueError(
                f"RopeScaling: {len(scaling.divisors)} divisors for {rotary_dim // 2} frequencies"
            )
        return frequencies / jnp.asarray(scaling.divisors, jnp.float32)
    stretched = frequencies / scaling.factor
    if scaling.original_max_positions is None:
        return stretched
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1 - kept) * stretched


def rope_angles(
    positions: ArrayLike, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at the given positions.

    Args:
      positions: int32[...], tokens before this one in its sequence.
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the wavelengths.
      scaling: optional stretching of the frequencies.

    Returns:
      (cos, sin), each f32[..., rotary_dim / 2].
    """
    frequencies = rope_frequencies(rotary_dim, theta, scaling)
    angles = jnp.asarray(positions, jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope_tables(
    max_positions: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of all positions from 0 on, for `apply_rope` and `write_qkv`.

    Args:
      max_positions: rows of the tables; the longest sequence they serve.
      rotary_dim: how many of a head's dims are rotated; even.
      theta: base of the wavelengths.
      scaling: optional stretching of the frequencies.

    Returns:
      (cos, sin), each f32[max_positions, rotary_dim / 2].
    """
    return rope_angles(jnp.arange(max_positions), rotary_dim, theta, scaling)


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array, style: RopeStyle) -> jax.Array:
    """Rotates pairs of a head's first dims by the given angles, in f32.

    Args:
      x: [..., heads, head_dim].
      cos: f32[..., rotary_dim / 2], one row for each token; rotary_dim <= head_dim.
      sin: as cos.
      style: "half" pairs dim i with i + rotary_dim / 2 (Hugging Face Llama), "interleaved" pairs
        2 i with 2 i + 1 (the RoFormer paper, GGUF Llama), "none" returns x.

    Returns:
      As x; dims from rotary_dim on are untouched.
    """
    if style not in ROPE_STYLES:
        raise ValueError(f"rope style must be one of {', '.join(ROPE_STYLES)}, got {style!r}")
    if style == "none":
        return x
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rope: rotary_dim {2 * half} exceeds head_dim {x.shape[-1]}")
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = x[..., : 2 * half].astype(jnp.float32)
    if style == "half":
        a, b = rotated[..., :half], rotated[..., half:]
        pairs = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    pairs = pairs.astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return pairs
    return jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1)


def apply_rope(
    x: jax.Array, positions: jax.Array, cos: jax.Array, sin: jax.Array, style: RopeStyle = "half"
) -> jax.Array:
    """Rotary position embedding of x from precomputed tables.

    Args:
      x: [..., heads, head_dim].
      positions: int32[...]; one that the tables do not reach gives NaN, never a wrong angle.
      cos: f32[max_positions, rotary_dim / 2].
      sin: as cos.
      style: see `rotate_pairs`.

    Returns:
      As x.
    """
    return rotate_pairs(x, _rows_of(cos, positions), _rows_of(sin, positions), style)


def _rows_of(table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows [..., rotary_dim / 2] of the positions; NaN beyond the table."""
    return table.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in f32.

    Args:
      x: [..., n].
      weight: [n].
      eps: added to the mean square.

    Returns:
      As x: x / sqrt(mean(x^2) + eps) * weight.

    Reference: Zhang and Sennrich, Root Mean Square Layer Normalization (2019),
    https://arxiv.org/abs/1910.07467
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * weight.astype(jnp.float32)).astype(x.dtype)


def write_qkv(
    cache: PagedCache,
    layer: int,
    qkv: jax.Array,
    plan: StepPlan,
    *,
    num_q_heads: int,
    rope: tuple[jax.Array, jax.Array] | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    rope_style: RopeStyle = "half",
    positions: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[PagedCache, jax.Array]:
    """Splits a fused projection, normalises and rotates queries and keys, writes keys and values.

    Norms, RoPE and encoding run in f32 with no rounding between them. Values are only copied.

    Args:
      cache: the cache, after `reserve`.
      layer: which layer, a static int.
      qkv: [S, T, n] or [N, n] rows [q | k | v] with n = num_q_heads * head_dim
        + num_kv_heads * (head_dim + v_head_dim), any float dtype.
      plan: the step's plan.
      num_q_heads: query heads.
      rope: (cos, sin), f32 [max_positions, rotary_dim / 2] each, rotary_dim <= head_dim; needed
        unless rope_style is "none". A position that the tables do not reach is NaN, and counted.
      q_norm: [head_dim], weight of an RMSNorm of every query head; None does not normalise.
      k_norm: likewise for keys.
      eps: epsilon of the norms.
      rope_style: "half" pairs dim i with i + rotary_dim / 2, "interleaved" 2 i with 2 i + 1, "none"
        does not rotate.
      positions: int32 of the plan's token shape; None takes the tokens already in the sequence.
      implementation: as in `jaxkv.write`. With "pallas_gpu" all of it is one kernel, except that
        centered keys, and rope_style "half" with a rotary_dim that is no multiple of 32, are split
        and rotated before it.

    Returns:
      The cache with this layer written, and q [..., num_q_heads, head_dim] in qkv's dtype, ready
      for `jaxkv.attend`.

    Raises:
      TypeError: a wrong dtype, or a layer that is not an int.
      ValueError: no such layer, shapes that do not fit each other, the config or the plan, an
        unknown rope_style or implementation, tables given or missing against rope_style, or a
        closed cache.
      NotImplementedError: the named implementation cannot serve; the message says why.
      CacheError: outside jit, with `CacheConfig(debug=True)`: the call counted corruption.

    References: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021),
    https://arxiv.org/abs/2104.09864; Zhang and Sennrich, Root Mean Square Layer Normalization
    (2019), https://arxiv.org/abs/1910.07467
    """
    spec = cache.config.layer(layer)
    _check_qkv(qkv, plan, spec, num_q_heads)
    _check_rope(rope, rope_style, spec.head_dim)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (spec.head_dim,):
            raise ValueError(
                f"{name}: got shape {list(weight.shape)}, expected [{spec.head_dim}] "
                "(the weight of one head)"
            )
    if positions is None:
        positions = plan.positions
    elif positions.shape != plan.token_shape:
        raise ValueError(
            f"positions: got shape {list(positions.shape)}, expected {list(plan.token_shape)}"
        )
    elif not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions: got dtype {positions.dtype}, expected integers")
    # Outside the inner jits, so that layers share one gather of a step's angles.
    angles = None if rope is None else tuple(_rows_of(table, positions) for table in rope)
    chosen = choose_implementation(cache.config, implementation, layer=layer)
    # Exact tokens and online calibration need the keys, which the fused kernel keeps to itself.
    is_fused = chosen == "pallas_gpu" and cache.staging is None and cache.recent is None
    if is_fused and not _fused_reasons(cache, spec, qkv, rope, rope_style):
        store = _FusedStore(num_q_heads, rope_style, eps)
        return store_rows(cache, layer, (qkv, angles, q_norm, k_norm), plan, store)
    q, k, v = _split_norm_rope(
        qkv,
        angles,
        q_norm,
        k_norm,
        spec=spec,
        num_q_heads=num_q_heads,
        eps=eps,
        rope_style=rope_style,
    )
    return write(cache, layer, k, v, plan, implementation=chosen), q


def _fused_reasons(
    cache: PagedCache,
    spec: LayerSpec,
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    rope_style: RopeStyle,
) -> list[str]:
    """Why splitting and rotating cannot join the write kernel, which serves all the same."""
    if cache.k_means is not None:
        return ["the kernel does not center keys"]
    import pallas_kernels

    return pallas_kernels.qkv_unsupported_reasons(
        spec.k,
        spec.v,
        block_size=cache.config.block_size,
        dtype=qkv.dtype,
        rope_style=rope_style,
        rotary_dim=0 if rope is None else 2 * rope[0].shape[1],
    )


@dataclasses.dataclass(frozen=True)
class _FusedStore:
    """Everything from the projection to the pages in one kernel; returns the queries beside."""

    num_q_heads: int
    rope_style: RopeStyle
    eps: float

    def __call__(
        self,
        pages: LayerPages,
        operands: Any,
        slots: jax.Array,
        scales: tuple[jax.Array, jax.Array],
        spec: LayerSpec,
    ) -> tuple[LayerPages, Audits, jax.Array]:
        import pallas_kernels

        qkv, angles, q_norm, k_norm = operands
        if angles is not None:
            angles = tuple(rows.reshape(-1, rows.shape[-1]) for rows in angles)
        q, new_k, new_v, audits = pallas_kernels.paged_qkv_write(
            qkv.reshape(-1, qkv.shape[-1]),
            pages.k,
            pages.v,
            slots,
            num_q_heads=self.num_q_heads,
            k_spec=spec.k,
            v_spec=spec.v,
            rope_style=self.rope_style,
            angles=angles,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        q = q.reshape(*qkv.shape[:-1], self.num_q_heads, spec.head_dim)
        return LayerPages(new_k, new_v), audits, q


@functools.partial(jax.jit, static_argnames=("spec", "num_q_heads", "eps", "rope_style"))
def _split_norm_rope(
    qkv: jax.Array,
    angles: tuple[jax.Array, jax.Array] | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    *,
    spec: LayerSpec,
    num_q_heads: int,
    eps: float,
    rope_style: RopeStyle,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(q in qkv's dtype, k in f32, v in qkv's dtype), [..., heads, dim] each."""
    q_end = num_q_heads * spec.head_dim
    k_end = q_end + spec.num_kv_heads * spec.head_dim
    lead = qkv.shape[:-1]

    def head_rows(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        x = x.reshape(*lead, -1, spec.head_dim).astype(jnp.float32)
        if weight is not None:
            x = rms_norm(x, weight, eps)
        return x if angles is None else rotate_pairs(x, *angles, rope_style)

    q = head_rows(qkv[..., :q_end], q_norm).astype(qkv.dtype)
    k = head_rows(qkv[..., q_end:k_end], k_norm)
    return q, k, qkv[..., k_end:].reshape(*lead, -1, spec.v_head_dim)


def _check_qkv(qkv: jax.Array, plan: StepPlan, spec: LayerSpec, num_q_heads: int) -> None:
    if num_q_heads <= 0 or num_q_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_q_heads: got {num_q_heads}, expected a multiple of the layer's "
            f"{spec.num_kv_heads} KV heads"
        )
    width = num_q_heads * spec.head_dim + spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    expected = (*plan.token_shape, width)
    if qkv.shape != expected:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)}, expected {list(expected)}: rows [q | k | v] of "
            f"{num_q_heads} * {spec.head_dim} + {spec.num_kv_heads} * {spec.head_dim} + "
            f"{spec.num_kv_heads} * {spec.v_head_dim}"
        )
    if not jnp.issubdtype(qkv.dtype, jnp.floating):
        raise TypeError(f"qkv: got dtype {qkv.dtype}, expected a floating dtype")


def _check_rope(
    rope: tuple[jax.Array, jax.Array] | None, rope_style: RopeStyle, head_dim: int
) -> None:
    if rope_style not in ROPE_STYLES:
        raise ValueError(f"rope_style: got {rope_style!r}, expected one of {ROPE_STYLES}")
    if (rope is None) != (rope_style == "none"):
        given = "no tables" if rope is None else "tables"
        raise ValueError(
            f"rope: got {given} with rope_style {rope_style!r}, expected (cos, sin) unless "
            "rope_style is 'none'"
        )
    if rope is None:
        return
    cos, sin = rope
    if cos.ndim != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"rope: got cos {list(cos.shape)} and sin {list(sin.shape)}, expected two tables "
            "[max_positions, rotary_dim / 2]"
        )
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"rope: got tables of width {cos.shape[1]}, expected rotary_dim / 2 with rotary_dim "
            f"<= head_dim = {head_dim}"
        )
