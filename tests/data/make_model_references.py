"""Records what transformers + torch compute, for the tests of jaxkv.models.

Run it in an environment of its own, which the project does not depend on:

    pip install torch transformers gguf accelerate safetensors
    python tests/data/make_model_references.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

It writes model_references.npz beside itself. The tiny models are made from seeds; the tests make
the same weights, so only their logits are recorded.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
# Rows and columns of the SmolLM2 logits that are kept: 16 positions, 48 words of the vocabulary.
NUM_POSITIONS, NUM_WORDS = 16, 48


def smollm2(path: Path) -> dict[str, np.ndarray]:
    source = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = (HERE / "reference_text.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    positions = np.linspace(0, len(tokens) - 1, NUM_POSITIONS).astype(np.int32)
    words = np.random.default_rng(0).choice(logits.shape[1], NUM_WORDS, replace=False)
    return {
        "tokens": np.asarray(tokens, np.int32),
        "chat": np.asarray(chat, np.int32),
        "positions": positions,
        "words": words.astype(np.int32),
        "logits": logits[np.ix_(positions, words)],
        "top": logits.argmax(axis=1).astype(np.int32),
    }


def tiny(name: str, settings: dict) -> np.ndarray:
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    sys.path.insert(0, str(HERE))
    from tiny_models import TOKENS, weight

    state = {
        key: torch.from_numpy(weight(name, key, tuple(value.shape)))
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def main() -> None:
    from tiny_models import TINY_MODELS

    arrays = {f"smollm2_{key}": value for key, value in smollm2(Path(sys.argv[1])).items()}
    arrays |= {name: tiny(name, json.loads(json.dumps(s))) for name, s in TINY_MODELS.items()}
    np.savez_compressed(HERE / "model_references.npz", **arrays)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
