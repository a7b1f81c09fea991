"""`write_qkv` in published model families, against logits that torch computed.

Llama and Mistral of Hugging Face rotate halves, Llama in GGUF files neighbouring pairs, and Qwen3
normalises queries and keys per head.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.tiny_models import TINY_MODELS, TOKENS, in_neighbouring_pairs, recorded_logits
from test_models_loaders import tiny_state

import jaxkv
from jaxkv.models.hf import config_from_hf
from jaxkv.models.llama import from_arrays
from jaxkv.qkv import rms_norm, rope_tables

FAMILIES = [("llama", "half"), ("llama", "interleaved"), ("mistral", "half"), ("qwen3", "half")]
CHUNKS = (17, 1, 22)


@pytest.fixture(scope="module")
def references():
    return recorded_logits()


def load(name, style):
    config, state = config_from_hf(TINY_MODELS[name]), tiny_state(name)
    if style == "interleaved":
        for key, value in state.items():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                state[key] = in_neighbouring_pairs(value, config.head_dim)
    return from_arrays(config, state.__getitem__)


def cached_logits(model, style):
    """Logits f32 [tokens, vocab] through a contiguous f16 cache, the prompt in chunks."""
    config = model.config
    rope = rope_tables(64, config.head_dim, config.rope_theta, config.rope_scaling)
    cache = jaxkv.init_contiguous(config.cache_config(format="f16"), batch=1, capacity=48)

    def attention(layer, x, cache, plan):
        block = model.layers[layer].attention
        qkv = jnp.concatenate([p(x) for p in (block.q_proj, block.k_proj, block.v_proj)], -1)
        norms = [w if w is None else w[...] for w in (block.q_norm, block.k_norm)]
        cache, q = jaxkv.write_qkv(
            cache,
            layer,
            qkv,
            plan,
            num_q_heads=config.num_q_heads,
            rope=rope,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=config.norm_eps,
            rope_style=style,
        )
        out = jaxkv.attend(cache, layer, q, plan, window=config.window)
        return block.o_proj(out.reshape(*x.shape[:-1], -1)), cache

    @jax.jit
    def step(cache, tokens, count):
        cache, plan = jaxkv.reserve(cache, count[None], max_new_tokens=max(CHUNKS))
        x = model.embedding[...][tokens]
        for index, layer in enumerate(model.layers):
            y = rms_norm(x, layer.attention_norm[...], config.norm_eps)
            y, cache = attention(index, y, cache, plan)
            x = x + y
            x = x + layer.mlp(rms_norm(x, layer.mlp_norm[...], config.norm_eps))
        return cache, model.logits(rms_norm(x, model.norm[...], config.norm_eps))

    rows, start = [], 0
    for count in CHUNKS:
        tokens = np.zeros((1, max(CHUNKS)), np.int32)
        tokens[0, :count] = TOKENS[start : start + count]
        cache, logits = step(cache, tokens, jnp.int32(count))
        rows.append(logits[0, :count])
        start += count
    jaxkv.check(cache, strict=True)
    return np.concatenate(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name, style", FAMILIES)
def test_logits_agree_with_torch(references, name, style):
    got = cached_logits(load(name, style), style)
    # Keys and values in f16; a wrong pairing or norm is off by more than 1.
    chex.assert_trees_all_close(got, references[name], atol=1e-2, rtol=0)


@pytest.mark.slow
def test_the_other_pairing_is_another_model(references):
    got = cached_logits(load("llama", "interleaved"), "half")
    assert np.abs(got - references["llama"]).max() > 1
