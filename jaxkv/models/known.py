"""What a cache needs to know of published models, from their config.json files. No arrays."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxkv.config import CacheConfig


@dataclasses.dataclass(frozen=True)
class ModelGeometry:
    """The part of a model's geometry that decides how large its cache is.

    Attributes:
      name: how the model is called.
      num_layers: layers with attention.
      num_kv_heads: key and value heads a layer.
      head_dim: width of a head.
      max_positions: the longest sequence the model was made for, in tokens.
      v_head_dim: width of a value head; None means head_dim.
      window: sliding window of some or all layers, in tokens, or None. A cache keeps the blocks
        of windowed layers all the same.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    v_head_dim: int | None = None
    window: int | None = None

    def cache_config(self, **options: Any) -> CacheConfig:
        """A `CacheConfig` with this model's layers and heads.

        Args:
          **options: the other fields of `CacheConfig`: format, block_size, num_blocks, ...
        """
        return CacheConfig(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            **options,
        )


KNOWN_MODELS: dict[str, ModelGeometry] = {
    geometry.name: geometry
    for geometry in (
        ModelGeometry("smollm2-135m", 30, 3, 64, 8192),
        ModelGeometry("smollm2-360m", 32, 5, 64, 8192),
        ModelGeometry("smollm2-1.7b", 24, 32, 64, 8192),
        ModelGeometry("llama-3.1-8b", 32, 8, 128, 131072),
        ModelGeometry("llama-3.1-70b", 80, 8, 128, 131072),
        ModelGeometry("llama-3.1-405b", 126, 8, 128, 131072),
        ModelGeometry("qwen3-0.6b", 28, 8, 128, 40960),
        ModelGeometry("qwen3-1.7b", 28, 8, 128, 40960),
        ModelGeometry("qwen3-4b", 36, 8, 128, 40960),
        ModelGeometry("qwen3-8b", 36, 8, 128, 40960),
        ModelGeometry("qwen3-14b", 40, 8, 128, 40960),
        ModelGeometry("qwen3-32b", 64, 8, 128, 40960),
        ModelGeometry("qwen3-30b-a3b", 48, 4, 128, 40960),
        ModelGeometry("qwen3-235b-a22b", 94, 4, 128, 40960),
        ModelGeometry("gemma-3-270m", 18, 1, 256, 32768, window=512),
        ModelGeometry("gemma-3-1b", 26, 1, 256, 32768, window=512),
        ModelGeometry("gemma-3-4b", 34, 4, 256, 131072, window=1024),
        ModelGeometry("gemma-3-12b", 48, 8, 256, 131072, window=1024),
        ModelGeometry("gemma-3-27b", 62, 16, 128, 131072, window=1024),
        ModelGeometry("mistral-7b", 32, 8, 128, 32768),
        ModelGeometry("mistral-nemo", 40, 8, 128, 131072),
        ModelGeometry("mistral-small", 40, 8, 128, 32768),
    )
}

# What transformers assumes where a config.json says nothing.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "mistral": {"num_key_value_heads": 8},
}


def find_geometry(model: str) -> ModelGeometry:
    """The geometry of a model given by name, or by the path of a config.json or its directory.

    Raises:
      ValueError: neither a known name nor such a path, or a config.json that a cache cannot serve.
    """
    if model.lower() in KNOWN_MODELS:
        return KNOWN_MODELS[model.lower()]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither a config.json nor a known model; known: "
            f"{', '.join(KNOWN_MODELS)}"
        )
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return geometry_from_config(read_json(path), name)


def geometry_from_config(raw: dict[str, Any], name: str) -> ModelGeometry:
    """The geometry that a Hugging Face config.json describes.

    Args:
      raw: the parsed file; of a multimodal model, its text part is taken.
      name: what to call the model.

    Raises:
      ValueError: a field is missing, or the model's attention is of another kind.
    """
    raw = raw.get("text_config", raw)
    raw = _DEFAULTS.get(raw.get("model_type", ""), {}) | raw
    if raw.get("kv_lora_rank"):
        raise ValueError(
            f"{name}: latent attention (MLA) is not supported: it has no K and V heads"
        )
    sizes = {}
    for key in ("num_hidden_layers", "num_attention_heads"):
        sizes[key] = _integer(raw, key, name)
    heads = sizes["num_attention_heads"]
    if not raw.get("head_dim"):
        raw = raw | {"head_dim": _integer(raw, "hidden_size", name) // heads}
    if raw.get("num_key_value_heads") is None:
        raw = raw | {"num_key_value_heads": heads}
    return ModelGeometry(
        name,
        sizes["num_hidden_layers"],
        _integer(raw, "num_key_value_heads", name),
        _integer(raw, "head_dim", name),
        raw.get("max_position_embeddings") or 2048,
        v_head_dim=raw.get("v_head_dim"),
        window=raw.get("sliding_window") if raw.get("use_sliding_window", True) else None,
    )


def _integer(raw: dict[str, Any], key: str, name: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"{name}: config.json must give {key} as a positive integer, got {value!r}"
        )
    return value


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
