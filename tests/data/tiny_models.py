"""Tiny random models that tests and recorded references share: geometry and weights from seeds."""

import pathlib
import zlib

import numpy as np

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}

# The fields of each config.json.
TINY_MODELS: dict[str, dict] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        **_COMMON,
        "model_type": "mistral",
        "head_dim": 16,
        "rope_theta": 10000.0,
        "sliding_window": 8,
        "num_key_value_heads": 1,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}

TOKENS = [int(t) for t in np.random.default_rng(7).integers(0, 64, 40)]


def weight(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of a tiny model: norms around one, matrices large enough to matter."""
    if name == "lm_head.weight" and TINY_MODELS[model]["tie_word_embeddings"]:
        name = "model.embed_tokens.weight"
    rng = np.random.default_rng(zlib.crc32(f"{model}/{name}".encode()))
    values = rng.standard_normal(shape).astype(np.float32)
    return 1 + 0.2 * values if len(shape) == 1 else values * np.float32(1.5 * shape[-1] ** -0.5)


def in_neighbouring_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads * head_dim, features] of q or k, as a GGUF converter orders them."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def recorded_logits() -> dict[str, np.ndarray]:
    """What torch computed for `TOKENS`, f32 [tokens, vocab_size] of each tiny model."""
    with np.load(pathlib.Path(__file__).parent / "model_references.npz") as file:
        return {name: file[name] for name in TINY_MODELS}
