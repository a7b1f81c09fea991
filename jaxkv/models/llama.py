"""Llama-family language models in nnx, with their keys and values in a paged cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.cache import LayerPages, PagedCache
from jaxkv.config import CacheConfig
from jaxkv.exact import ExactRows
from jaxkv.faults import Faults, record_kinds
from jaxkv.flax import PagedAttention
from jaxkv.flax.attention import Rope, linear
from jaxkv.online import StagedRows
from jaxkv.qkv import RopeScaling, RopeStyle, rms_norm
from jaxkv.sequences import StepPlan
from jaxkv.store import BlockStore


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Geometry of a Llama-family model (Llama, Mistral, SmolLM2, Qwen3).

    Attributes:
      vocab_size: rows of the embedding.
      num_layers: decoder layers.
      features: width of the residual stream.
      mlp_features: width inside the gated MLP.
      num_q_heads: query heads a layer.
      num_kv_heads: key and value heads a layer.
      head_dim: width of a head.
      max_positions: the longest sequence the model was trained for.
      rope_theta: base of the rotary wavelengths.
      rope_style: how dims pair up, see `jaxkv.qkv.rotate_pairs`.
      rope_scaling: optional stretching of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      qk_norm: normalise queries and keys per head (Qwen3).
      window: sliding window of every layer, or None.
      soft_cap: soft cap of the attention scores, or None.
      tie_embeddings: the output layer is the embedding transposed.
    """

    vocab_size: int
    num_layers: int
    features: int
    mlp_features: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 8192
    rope_theta: float = 1e4
    rope_style: RopeStyle = "half"
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    window: int | None = None
    soft_cap: float | None = None
    tie_embeddings: bool = True

    def cache_config(self, **options: Any) -> CacheConfig:
        """A `jaxkv.CacheConfig` with this model's layers and heads.

        Args:
          **options: the other fields of `CacheConfig`: format, num_blocks, max_sequences, ...

        Returns:
          The configuration of a cache that this model can use.
        """
        return CacheConfig(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **options,
        )


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)).

    Reference: Shazeer, GLU Variants Improve Transformer (2020), https://arxiv.org/abs/2002.05202
    """

    def __init__(self, config: LlamaConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = linear(config.features, config.mlp_features, **options)
        self.up = linear(config.features, config.mlp_features, **options)
        self.down = linear(config.mlp_features, config.features, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., features] -> the same shape."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(
        self, config: LlamaConfig, layer: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ):
        self.norm_eps = config.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.features, param_dtype))
        self.attention = PagedAttention(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            features=config.features,
            layer=layer,
            rope_theta=config.rope_theta,
            rope_style=config.rope_style,
            rope_scaling=config.rope_scaling,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            window=config.window,
            soft_cap=config.soft_cap,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.mlp_norm = nnx.Param(jnp.ones(config.features, param_dtype))
        self.mlp = GatedMLP(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        cache: Any,
        plan: Any,
        *,
        rope: Rope | None = None,
        store: BlockStore | None = None,
    ) -> tuple[jax.Array, Any]:
        """x: [S, T, features] or [N, features] -> (the same shape, cache)."""
        y = rms_norm(x, self.attention_norm[...], self.norm_eps)
        y, cache = self.attention(y, cache, plan, rope=rope, store=store)
        return self._add_mlp(x + y), cache

    def uncached(self, x: jax.Array, *, rope: Rope | None = None) -> jax.Array:
        """x: [B, T, features] -> the same shape, in full precision."""
        y = rms_norm(x, self.attention_norm[...], self.norm_eps)
        y = self.attention.uncached(y, rope=rope)
        return self._add_mlp(x + y)

    def _add_mlp(self, x: jax.Array) -> jax.Array:
        x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.norm_eps))
        # Keeps XLA's rewrites from wandering through all layers, a layer each round of passes.
        return jax.lax.optimization_barrier(x)


class Llama(nnx.Module):
    """A decoder-only language model: embedding, decoder layers, norm, output layer.

    Args:
      config: the geometry.
      dtype: of the computation; None means that of the weights.
      param_dtype: of the weights.
      rngs: source of the initial weights.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        self.config = config
        init = nnx.initializers.normal(config.features**-0.5)
        shape = (config.vocab_size, config.features)
        self.embedding = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.layers = nnx.List(
            [
                DecoderLayer(config, layer, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = nnx.Param(jnp.ones(config.features, param_dtype))
        self.head = (
            None if config.tie_embeddings else nnx.Param(init(rngs.params(), shape, param_dtype))
        )
        self.dtype = dtype

    def __call__(
        self,
        tokens: jax.Array,
        cache: Any = None,
        plan: Any = None,
        *,
        store: BlockStore | None = None,
    ) -> Any:
        """Next-token logits of every token.

        Args:
          tokens: int32[S, T] for a padded plan, int32[N] for a packed one; without a cache
            int32[B, T], whole sequences.
          cache: from `jaxkv.init`, after `jaxkv.reserve`; None computes all attention in full
            precision, without a cache.
          plan: the step's plan; required with a cache.
          store: as in `jaxkv.attend`.

        Returns:
          (logits, cache), or the logits alone without a cache: f32[*tokens.shape, vocab_size].
        """
        if cache is None:
            return self.logits(self.uncached(tokens))
        hidden, cache = self.hidden(tokens, cache, plan, store=store)
        return self.logits(hidden), cache

    def hidden(
        self, tokens: jax.Array, cache: Any, plan: Any, *, store: BlockStore | None = None
    ) -> tuple[jax.Array, Any]:
        """What the output layer reads, for callers that need the logits of few tokens only.

        Args:
          tokens: int32[S, T] or int32[N], as the plan has them.
          cache: from `jaxkv.init`, after `jaxkv.reserve`.
          plan: the step's plan.
          store: as in `jaxkv.attend`.

        Returns:
          (hidden [*tokens.shape, features], cache).
        """
        if plan is None:
            raise ValueError("Llama: a cache needs the plan that jaxkv.reserve returned with it")
        x = self._embed(tokens)
        rope = self.layers[0].attention.rope(plan.positions)
        for layer in self.layers:
            x, cache = layer(x, cache, plan, rope=rope, store=store)
        return rms_norm(x, self.norm[...], self.config.norm_eps), cache

    def hidden_by_layer(self, tokens: jax.Array, cache: Any, plan: Any) -> tuple[jax.Array, Any]:
        """As `hidden`, but outside jit, with one compiled program for all layers alike.

        It compiles many times faster than a program of all layers and costs a dispatch per layer,
        which is nothing for a chunk of a prompt. The cache is donated: use the returned one.
        """
        x = self._embed(tokens)
        graph = nnx.graphdef(self.layers[0])
        for index, layer in enumerate(self.layers):
            x, cache = _apply_layer(graph, nnx.state(layer), x, cache, plan, index)
        return _rms_norm(x, self.norm[...], self.config.norm_eps), cache

    def uncached(self, tokens: jax.Array) -> jax.Array:
        """As `hidden`, over whole sequences int32[B, T] without a cache."""
        x = self._embed(tokens)
        rope = self.layers[0].attention.rope(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer.uncached(x, rope=rope)
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def uncached_by_layer(
        self, tokens: jax.Array, on_layer: Callable[..., None] | None = None
    ) -> jax.Array:
        """As `uncached`, but outside jit, with one compiled program for all layers alike.

        Args:
          tokens: int32[B, T], whole sequences.
          on_layer: called with what each layer's cache would be given: queries, keys and values,
            [B, T, heads, head_dim] each.
        """
        x = self._embed(tokens)
        rope = self.layers[0].attention.rope(jnp.arange(tokens.shape[1]))
        graph = nnx.graphdef(self.layers[0])
        for layer in self.layers:
            x, *qkv = _uncached_layer(graph, nnx.state(layer), x, rope)
            if on_layer is not None:
                on_layer(*qkv)
        return _rms_norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden [..., features] -> logits f32[..., vocab_size]."""
        weights = self.embedding[...] if self.head is None else self.head[...]
        return jnp.einsum(
            "...f,vf->...v",
            hidden,
            weights.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )

    def _embed(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding[...][tokens]
        return x if self.dtype is None else x.astype(self.dtype)


_rms_norm = jax.jit(rms_norm, static_argnames="eps")


@functools.partial(jax.jit, static_argnames="graph")
def _uncached_layer(graph: Any, weights: Any, x: jax.Array, rope: Rope) -> tuple[jax.Array, ...]:
    layer = nnx.merge(graph, weights)
    y = rms_norm(x, layer.attention_norm[...], layer.norm_eps)
    return layer.uncached(x, rope=rope), *layer.attention.project(y, rope)


def _apply_layer(
    graph: Any, weights: Any, x: jax.Array, cache: PagedCache, plan: StepPlan, index: int
) -> tuple[jax.Array, PagedCache]:
    """Runs one decoder layer on a cache of that layer alone, which all like it share."""
    spec = cache.config.layer(index)
    config = dataclasses.replace(
        cache.config,
        num_layers=1,
        layer_formats=(spec.format,),
        layer_dims=((spec.num_kv_heads, spec.head_dim, spec.v_head_dim),),
        online_calibration=cache.config.online_calibration if spec.has_layer_scale else None,
    )
    recent, staging = cache.recent, cache.staging
    rest = PagedCache(
        layers=(),
        k_scales=cache.k_scales[index : index + 1],
        v_scales=cache.v_scales[index : index + 1],
        pool=dataclasses.replace(cache.pool, faults=Faults.create()),
        sequences=cache.sequences,
        config=config,
        k_means=None if cache.k_means is None else (cache.k_means[index],),
        recent=None if recent is None else dataclasses.replace(recent, layers=()),
        staging=None if staging is None else dataclasses.replace(staging, layers=()),
    )
    own = _LayerRows(
        pages=cache.layers[index],
        exact=None if recent is None else recent.layers[index],
        staged=None if staging is None else staging.layers[index],
    )
    x, own, scales, faults = _layer_program(
        graph, weights, x, own, rest, plan, cache.faults, jnp.int32(index)
    )

    def put(layers: tuple, layer: Any) -> tuple:
        return (*layers[:index], layer, *layers[index + 1 :])

    cache = dataclasses.replace(
        cache,
        layers=put(cache.layers, own.pages),
        pool=dataclasses.replace(cache.pool, faults=faults),
    )
    if recent is not None:
        exact = dataclasses.replace(recent, layers=put(recent.layers, own.exact))
        cache = dataclasses.replace(cache, recent=exact)
    if staging is not None:
        cache = dataclasses.replace(
            cache,
            staging=dataclasses.replace(staging, layers=put(staging.layers, own.staged)),
            k_scales=cache.k_scales.at[index].set(scales[0][0]),
            v_scales=cache.v_scales.at[index].set(scales[1][0]),
        )
    return x, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _LayerRows:
    """Everything of one layer that holds keys and values."""

    pages: LayerPages
    exact: ExactRows | None
    staged: StagedRows | None


@functools.partial(jax.jit, static_argnames="graph", donate_argnames=("own", "faults"))
def _layer_program(
    graph: Any,
    weights: Any,
    x: jax.Array,
    own: _LayerRows,
    rest: PagedCache,
    plan: StepPlan,
    faults: Faults,
    index: jax.Array,
) -> tuple[jax.Array, _LayerRows, tuple[jax.Array, jax.Array], Faults]:
    layer = nnx.merge(graph, weights)
    recent, staging = rest.recent, rest.staging
    if recent is not None and own.exact is not None:
        recent = dataclasses.replace(recent, layers=(own.exact,))
    if staging is not None and own.staged is not None:
        staging = dataclasses.replace(staging, layers=(own.staged,))
    cache = dataclasses.replace(rest, layers=(own.pages,), recent=recent, staging=staging)
    x, cache = layer(x, cache, plan)
    new = cache.faults
    faults = record_kinds(faults, new.counts, step=plan.step, layer=index, where=new.first[:, 2])
    own = _LayerRows(
        pages=cache.layers[0],
        exact=None if recent is None else cache.recent.layers[0],
        staged=None if staging is None else cache.staging.layers[0],
    )
    return x, own, (cache.k_scales, cache.v_scales), faults


def from_arrays(
    config: LlamaConfig,
    read: Callable[[str], np.ndarray],
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    on_progress: Callable[[int, int], None] | None = None,
) -> Llama:
    """Builds a model whose weights come from a file, one at a time.

    Args:
      config: the geometry.
      read: gives the array of a name; names are those of Hugging Face's Llama ("lm_head.weight",
        "model.layers.0.self_attn.q_proj.weight", ...) and matrices are [out, in] as there.
      dtype: of the computation; None means that of the weights.
      param_dtype: of the weights.
      on_progress: called with (weights read, weights in all) after each one.

    Returns:
      The model.

    Raises:
      ValueError: an array has not the shape that the geometry asks for.
    """
    abstract = nnx.eval_shape(
        lambda: Llama(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype)
    )
    graph, state = nnx.split(abstract)
    leaves = nnx.to_flat_state(state)
    loaded = []
    for count, (path, leaf) in enumerate(leaves):
        name, transpose = _file_name(path)
        array = np.asarray(read(name))
        array = array.T if transpose else array
        if array.shape != leaf.shape:
            raise ValueError(
                f"{name}: the file has shape {array.shape}, this geometry needs {leaf.shape}"
            )
        loaded.append((path, leaf.replace(jnp.asarray(array, leaf.dtype))))
        if on_progress is not None:
            on_progress(count + 1, len(leaves))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


_FILE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    **{f"attention.{p}_proj.kernel": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"mlp.{p}.kernel": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def _file_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The name of a weight in a Hugging Face file, and whether it is transposed there."""
    if path[0] == "layers":
        inner = ".".join(map(str, path[2:]))
        return f"model.layers.{path[1]}.{_FILE_NAMES[inner]}", path[-1] == "kernel"
    return _FILE_NAMES[".".join(map(str, path))], False
