"""Reads Llama-family models from Hugging Face directories: config.json and safetensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jaxkv.models.known import read_json
from jaxkv.models.llama import Llama, LlamaConfig, from_arrays
from jaxkv.models.tokenizer import Tokenizer
from jaxkv.qkv import RopeScaling

_MODEL_TYPES = ("llama", "mistral", "qwen3")


def load_hf(
    directory: str | Path,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Llama, Tokenizer | None]:
    """Loads a model from a directory with config.json, *.safetensors and maybe tokenizer.json.

    Args:
      directory: as a hub download leaves it; nothing is fetched.
      dtype: of the computation; None means that of the weights.
      param_dtype: of the weights in memory, whatever the file has.
      on_progress: called with (weights read, weights in all) after each one.

    Returns:
      (model, tokenizer); the tokenizer is None without a tokenizer.json.

    Raises:
      FileNotFoundError: config.json or the weights are missing.
      ValueError: a model type or a feature that these modules do not have.
    """
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    config = config_from_hf(raw)
    shards = _shards(directory)

    def read(name: str) -> np.ndarray:
        if name not in shards:
            raise ValueError(f"{name} is missing from the safetensors files of {directory}")
        with safe_open(shards[name], framework="numpy") as file:
            return file.get_tensor(name)

    model = from_arrays(config, read, dtype=dtype, param_dtype=param_dtype, on_progress=on_progress)
    path = directory / "tokenizer.json"
    if not path.exists():
        return model, None
    end = raw.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    return model, Tokenizer.from_file(path, end_of_text=end)


def config_from_hf(raw: dict[str, Any]) -> LlamaConfig:
    """The geometry that a Hugging Face config.json describes.

    Args:
      raw: the parsed file, of transformers 4 or 5.

    Raises:
      ValueError: a model type or a feature that these modules do not have.
    """
    kind = raw.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ValueError(f"model_type {kind!r} is not supported; known: {', '.join(_MODEL_TYPES)}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"config.json: {key} is set, but these modules have no biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported")
    num_q_heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    uses_window = kind == "mistral" or raw.get("use_sliding_window")
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        num_layers=raw["num_hidden_layers"],
        features=raw["hidden_size"],
        mlp_features=raw["intermediate_size"],
        num_q_heads=num_q_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_q_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_q_heads,
        max_positions=raw.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 1e4),
        rope_scaling=_rope_scaling(rope),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        qk_norm=kind == "qwen3",
        window=raw.get("sliding_window") if uses_window else None,
        tie_embeddings=raw.get("tie_word_embeddings", False),
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_max_positions=rope["original_max_position_embeddings"],
        )
    raise ValueError(f"config.json: rope type {kind!r} is not supported")


def _shards(directory: Path) -> dict[str, Path]:
    """Which file holds each weight."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return {name: directory / file for name, file in read_json(index)["weight_map"].items()}
    path = directory / "model.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"no model.safetensors in {directory}")
    with safe_open(path, framework="numpy") as file:
        return dict.fromkeys(file.keys(), path)
