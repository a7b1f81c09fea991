"""Small language models for trying a cache out: Llama in Flax nnx, and loaders for its files."""

from jaxkv.models.gguf import load_gguf, smollm2_path
from jaxkv.models.hf import load_hf
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.tokenizer import TextStream, Tokenizer

__all__ = [
    "Llama",
    "LlamaConfig",
    "TextStream",
    "Tokenizer",
    "load_gguf",
    "load_hf",
    "smollm2_path",
]
