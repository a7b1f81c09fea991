"""Self-attention over a paged cache, as an nnx module that holds weights alone."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.dispatch import Implementation
from jaxkv.qkv import ROPE_STYLES, RopeScaling, RopeStyle, rms_norm, rope_angles, rotate_pairs

# Cosines and sines f32[..., rotary_dim / 2] of each token's position.
Rope = tuple[jax.Array, jax.Array]


def linear(size_in: int, size_out: int, **options: Any) -> nnx.Linear:
    """A projection without bias that a CPU runs and compiles fast for a single token too."""
    return nnx.Linear(size_in, size_out, use_bias=False, dot_general=_dot_general, **options)


def _dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
    # For one row, XLA on a CPU compiles a kernel of its own for every dot of a program; for two it
    # calls a library, and takes less time than for one.
    if x.size > x.shape[-1] or jax.default_backend() != "cpu":
        return jax.lax.dot_general(x, kernel, dimensions, **options)
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    y = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
    return y[:1].reshape(*x.shape[:-1], -1)


class PagedAttention(nnx.Module):
    """Grouped-query self-attention whose keys and values live in a `jaxkv` cache.

    The cache is passed in and handed back; the module owns projections (and, with `qk_norm`, one
    RMSNorm weight for queries and one for keys, applied per head before RoPE as in Qwen3). A
    token's position is the number of tokens already in its sequence, which the plan knows.

    Args:
      num_q_heads: query heads; a multiple of num_kv_heads.
      num_kv_heads: key and value heads.
      head_dim: width of a query and key head.
      features: width of the input and output.
      layer: the layer of the cache this module writes and reads; a Python int.
      v_head_dim: width of a value head; None means head_dim.
      rope_theta: base of the rotary wavelengths.
      rope_style: "half", "interleaved" or "none"; see `jaxkv.qkv.rotate_pairs`.
      rope_scaling: optional stretching of the rotary frequencies.
      rotary_dim: how many dims of a head are rotated; None means all.
      qk_norm: normalise queries and keys per head.
      norm_eps: epsilon of those norms.
      scale: factor on the scores; None means 1 / sqrt(head_dim).
      window: attend to the newest `window` keys only, the query's own included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      dtype: of the computation; None promotes the input with the weights.
      param_dtype: of the weights.
      implementation: passed on to `jaxkv.write` and `jaxkv.attend`.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        features: int,
        layer: int,
        rngs: nnx.Rngs,
        v_head_dim: int | None = None,
        rope_theta: float = 1e4,
        rope_style: RopeStyle = "half",
        rope_scaling: RopeScaling | None = None,
        rotary_dim: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        implementation: Implementation | None = None,
    ):
        if num_kv_heads <= 0 or num_q_heads % num_kv_heads:
            raise ValueError(
                f"PagedAttention: num_q_heads ({num_q_heads}) must be a multiple of "
                f"num_kv_heads ({num_kv_heads})"
            )
        if rope_style not in ROPE_STYLES:
            raise ValueError(
                f"PagedAttention: rope_style must be one of {', '.join(ROPE_STYLES)}, "
                f"got {rope_style!r}"
            )
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(
                f"PagedAttention: rotary_dim must be even and at most head_dim ({head_dim}), "
                f"got {rotary_dim}"
            )
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.layer = layer
        self.rope_theta = rope_theta
        self.rope_style = rope_style
        self.rope_scaling = rope_scaling
        self.rotary_dim = rotary_dim
        self.norm_eps = norm_eps
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap
        self.implementation = implementation

        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.q_proj = linear(features, num_q_heads * head_dim, **options)
        self.k_proj = linear(features, num_kv_heads * head_dim, **options)
        self.v_proj = linear(features, num_kv_heads * self.v_head_dim, **options)
        self.o_proj = linear(num_q_heads * self.v_head_dim, features, **options)
        self.q_norm = nnx.Param(jnp.ones(head_dim, param_dtype)) if qk_norm else None
        self.k_norm = nnx.Param(jnp.ones(head_dim, param_dtype)) if qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        cache: Any,
        plan: Any,
        *,
        rope: Rope | None = None,
        store: jaxkv.BlockStore | None = None,
    ) -> tuple[jax.Array, Any]:
        """Writes this step's keys and values, then attends to all that is stored.

        Args:
          x: [S, T, features] for a padded plan, [N, features] for a packed one.
          cache: from `jaxkv.init`, after `jaxkv.reserve`.
          plan: the step's plan from `jaxkv.reserve`.
          rope: `self.rope(plan.positions)`, for models that compute it once for all layers.
          store: as in `jaxkv.attend`.

        Returns:
          (y, cache): y as x, 0 for padding and refused tokens before the output projection.
        """
        if x.shape[:-1] != tuple(plan.token_shape):
            raise ValueError(
                f"PagedAttention: x has tokens {x.shape[:-1]}, the plan has "
                f"{tuple(plan.token_shape)}"
            )
        q, k, v = self.project(x, self.rope(plan.positions) if rope is None else rope)
        cache = jaxkv.write(cache, self.layer, k, v, plan, implementation=self.implementation)
        out = jaxkv.attend(
            cache,
            self.layer,
            q,
            plan,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            implementation=self.implementation,
            store=store,
        )
        assert isinstance(out, jax.Array)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), cache

    def rope(self, positions: jax.Array) -> Rope:
        """Cosines and sines for positions int32[...]: f32[..., rotary_dim / 2] each."""
        return rope_angles(positions, self.rotary_dim, self.rope_theta, self.rope_scaling)

    def project(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of x, normalised and rotated as the cache stores them.

        Args:
          x: [..., features].
          rope: `self.rope` of each token's position; unused where rope_style is "none".

        Returns:
          q [..., q_heads, head_dim], k [..., kv_heads, head_dim], v [..., kv_heads, v_head_dim].
        """
        lead = x.shape[:-1]
        q = self.q_proj(x).reshape(*lead, self.num_q_heads, self.head_dim)
        k = self.k_proj(x).reshape(*lead, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(*lead, self.num_kv_heads, self.v_head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm[...], self.norm_eps)
            k = rms_norm(k, self.k_norm[...], self.norm_eps)
        q = rotate_pairs(q, *rope, self.rope_style)
        k = rotate_pairs(k, *rope, self.rope_style)
        return q, k, v

    def uncached(self, x: jax.Array, *, rope: Rope | None = None) -> jax.Array:
        """The same attention without a cache: full precision, all keys in memory at once.

        Args:
          x: [B, T, features], whole sequences from position 0.
          rope: `self.rope(jnp.arange(T))`, for models that compute it once for all layers.

        Returns:
          As x.
        """
        batch, length, _ = x.shape
        q, k, v = self.project(x, self.rope(jnp.arange(length)) if rope is None else rope)
        group = self.num_q_heads // self.num_kv_heads
        q = q.reshape(batch, length, self.num_kv_heads, group, self.head_dim).astype(jnp.float32)
        scores = self.scale * jnp.einsum("bthgd,bshd->bhgts", q, k.astype(jnp.float32))
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhgts,bshd->bthgd", weights, v.astype(jnp.float32))
        assert isinstance(out, jax.Array)
        return self.o_proj(out.reshape(batch, length, -1).astype(x.dtype))
