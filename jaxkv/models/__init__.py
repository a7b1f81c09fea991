"""Small language models for trying a cache out: Llama in Flax nnx, and loaders for its files."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.models.gguf import load_gguf, smollm2_path
    from jaxkv.models.hf import load_hf
    from jaxkv.models.known import KNOWN_MODELS, ModelGeometry
    from jaxkv.models.llama import Llama, LlamaConfig
    from jaxkv.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "KNOWN_MODELS",
    "Llama",
    "LlamaConfig",
    "ModelGeometry",
    "TextStream",
    "Tokenizer",
    "load_gguf",
    "load_hf",
    "smollm2_path",
]

_HOMES = {
    "jaxkv.models.gguf": ("load_gguf", "smollm2_path"),
    "jaxkv.models.hf": ("load_hf",),
    "jaxkv.models.known": ("KNOWN_MODELS", "ModelGeometry"),
    "jaxkv.models.llama": ("Llama", "LlamaConfig"),
    "jaxkv.models.tokenizer": ("TextStream", "Tokenizer"),
}


def __getattr__(name: str) -> Any:
    # On first use: planning needs no model packages, and each file needs only its own.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
