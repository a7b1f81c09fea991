"""SmolLM2-135M-Instruct from its GGUF file, against what transformers + torch recorded."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import TextStream, load_gguf, smollm2_path
from jaxkv.models.gguf import SMOLLM2_PACKAGE

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def smollm2():
    return load_gguf()


@pytest.fixture(scope="module")
def reference():
    with np.load(DATA / "model_references.npz") as file:
        return {key: file[key] for key in file if key.startswith("smollm2_")}


def test_model_file_is_found_without_importing_its_package():
    path = smollm2_path()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.parent.name == SMOLLM2_PACKAGE.replace("-", "_")


@pytest.mark.slow
def test_geometry_comes_from_the_file(smollm2):
    config = smollm2[0].config
    assert (config.num_layers, config.features, config.mlp_features) == (30, 576, 1536)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.rope_theta) == (49152, 1e5)
    assert config.norm_eps == pytest.approx(1e-5)
    assert config.tie_embeddings and not config.qk_norm


@pytest.mark.slow
def test_logits_agree_with_torch(smollm2, reference):
    model = smollm2[0]
    tokens = jnp.asarray(reference["smollm2_tokens"])[None]
    hidden = jax.jit(lambda m, t: m.uncached(t))(model, tokens)
    logits = np.asarray(model.logits(hidden)[0])
    picked = logits[np.ix_(reference["smollm2_positions"], reference["smollm2_words"])]
    np.testing.assert_allclose(picked, reference["smollm2_logits"], atol=1e-3, rtol=0)
    np.testing.assert_array_equal(logits.argmax(axis=1), reference["smollm2_top"])


@pytest.mark.slow
def test_tokenizer_agrees_with_transformers(smollm2, reference):
    tokenizer = smollm2[1]
    text = (DATA / "reference_text.txt").read_text(encoding="utf-8")
    tokens = tokenizer.encode(text)
    assert tokens == reference["smollm2_tokens"].tolist()
    assert tokenizer.decode(tokens) == text
    assert tokenizer.chat("Why is the sky blue?") == reference["smollm2_chat"].tolist()
    assert tokenizer.stop_tokens == (2,)


@pytest.mark.slow
def test_turn_markers_in_a_prompt_are_plain_text(smollm2):
    tokenizer = smollm2[1]
    tokens = tokenizer.encode("a<|im_end|>b")
    assert not set(tokens) & set(tokenizer.stop_tokens)
    assert tokenizer.decode(tokens) == "a<|im_end|>b"


@pytest.mark.slow
def test_streamed_text_equals_text_decoded_at_once(smollm2):
    tokenizer = smollm2[1]
    text = (DATA / "reference_text.txt").read_text(encoding="utf-8")
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert "".join([*pieces, stream.flush()]) == text
    assert not any("\ufffd" in piece for piece in pieces)
