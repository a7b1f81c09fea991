"""Geometry of published models, by name and from config.json files."""

import json
import subprocess
import sys

import pytest

from jaxkv.models.known import KNOWN_MODELS, find_geometry, geometry_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("smollm2-135m", 23040),
        ("llama-3.1-8b", 131072),
        ("llama-3.1-405b", 516096),
        ("qwen3-8b", 147456),
        ("gemma-3-27b", 507904),
        ("mistral-nemo", 163840),
    ],
)
def test_bytes_per_token_in_16_bits(name, bytes_per_token):
    assert KNOWN_MODELS[name].cache_config(format="bf16").bytes_per_token == bytes_per_token


@pytest.mark.parametrize("name", KNOWN_MODELS)
@pytest.mark.parametrize("fmt", ["fp8k_turbo4v", "turbo2"])
def test_every_known_model_makes_a_cache_config(name, fmt):
    assert KNOWN_MODELS[name].cache_config(format=fmt).block_bytes_total > 0


def test_a_path_or_its_directory_is_read(tmp_path):
    path = tmp_path / "my-model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    for argument in (path, path.parent):
        geometry = find_geometry(str(argument))
        assert geometry.name == "my-model"
        assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (32, 8, 128)
        assert geometry.max_positions == 131072


def test_names_do_not_care_about_case():
    assert find_geometry("Llama-3.1-8B") is KNOWN_MODELS["llama-3.1-8b"]


def test_text_part_and_defaults_of_a_multimodal_model():
    raw = {
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "hidden_size": 2560,
            "sliding_window": 1024,
        }
    }
    geometry = geometry_from_config(raw, "gemma-3-4b")
    assert geometry == KNOWN_MODELS["gemma-3-4b"]


def test_unused_windows_and_missing_kv_heads():
    raw = LLAMA | {"use_sliding_window": False, "sliding_window": 4096}
    raw["num_key_value_heads"] = None
    geometry = geometry_from_config(raw, "x")
    assert geometry.window is None
    assert geometry.num_kv_heads == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers as a positive integer, got None"),
        ({"num_attention_heads": "32"}, "num_attention_heads as a positive integer, got '32'"),
        ({"hidden_size": 0}, "hidden_size as a positive integer, got 0"),
    ],
)
def test_configs_that_a_cache_cannot_serve_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        geometry_from_config(LLAMA | changes, "x")


def test_unknown_names_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'gpt-5' is neither .* known: smollm2-135m"):
        find_geometry("gpt-5")
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        find_geometry(str(path))
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        find_geometry(str(path))


def test_planning_needs_no_model_packages():
    code = (
        "import sys, jaxkv.models.known\n"
        "assert not {'flax', 'gguf', 'tokenizers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
