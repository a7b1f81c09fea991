"""The command line: what it prints, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from jaxkv.cli import app, main, parse_bytes
from jaxkv.formats import format_names


def lines_of(*arguments):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_formats_lists_every_name():
    lines = lines_of("formats")
    assert [line.split()[0] for line in lines[1:-1]] == list(format_names())
    row = next(line for line in lines if "fp8k_turbo4v" in line)
    assert row.split()[1:5] == ["fp8k4v", "8", "4.5", "6.25"]


def test_plan_counts_blocks_tokens_and_sequences():
    lines = lines_of(
        *("plan", "--model", "llama-3.1-8b", "--memory", "80GiB"),
        *("--format", "fp8k_turbo4v", "--context", "32768"),
    )
    assert lines[0] == (
        "llama-3.1-8b: 32 layers, 8 KV heads of 128; 80GiB of cache, 32,768 tokens a sequence"
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert list(rows) == list(format_names())
    # 2 * 32 layers * 8 heads * 128 dims * 16 tokens * 6.25 bits = 819,200 bytes a block.
    assert rows["fp8k_turbo4v"] == ["6.25", "50.00", "104,857", "1,677,712", "51"]
    assert rows["bf16"] == ["16.00", "128.00", "40,960", "655,360", "20"]


def test_plan_makes_room_for_exact_tokens():
    lines = lines_of(
        *("plan", "--model", "llama-3.1-8b", "--memory", "80GiB", "--context", "32768"),
        *("--exact-first", "1", "--exact-recent", "64"),
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    # 1 + 64 + 256 + 8 tokens in bf16 beside the 2,048 blocks of each sequence.
    assert rows["fp8k_turbo4v"] == ["6.25", "50.00", "102,278", "1,636,448", "49"]


def test_plan_takes_any_pair_and_any_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "hidden_size": 512,
                "num_attention_heads": 8,
                "num_hidden_layers": 4,
                "max_position_embeddings": 1024,
            }
        )
    )
    lines = lines_of("plan", "--model", str(path), "--format", "int8k_turbo2v")
    assert ": 4 layers, 8 KV heads of 64; 1GiB of cache, 1,024 tokens" in lines[0]
    assert lines[-1].split()[0] == "int8k_turbo2v"


def test_plan_warns_of_windows_and_of_contexts_beyond_the_model():
    text = "\n".join(lines_of("plan", "--model", "gemma-3-1b", "--context", "65536"))
    assert "window of 512 tokens keep all their blocks" in text
    assert "at most 32,768 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["plan", "--model", "nope"], 2, "'nope' is neither a config.json nor a known model"),
        (["plan", "--memory", "much"], 2, "expected a size such as 80GiB"),
        (["plan", "--format", "fp7"], 2, "unknown name 'fp7'"),
        (["plan", "--context", "0"], 2, "--context"),
        (["plan", "--block-size", "12"], 1, "block_size: got 12"),
        (["generate"], 2, "Missing argument"),
        (["generate", "hi", "--format", "turbo5"], 2, "unknown name 'turbo5'"),
        (["generate", "hi", "--temperature", "-1"], 2, "--temperature"),
        (["generate", "hi", "--top-p", "0"], 1, "top_p must be above 0"),
        (["generate", "hi", "--model", "/nonexistent"], 1, "no such file or directory"),
        (["frobnicate"], 2, "No such command"),
        (["plan", "--frobnicate"], 2, "No such option"),
    ],
)
def test_errors_are_one_line_and_a_status(arguments, status, message, capsys):
    assert main(arguments) == status
    out = capsys.readouterr()
    assert message in out.err
    assert out.err.startswith("jaxkv: error: ") and out.err.count("\n") == 1
    assert "Traceback" not in out.err


def test_a_directory_without_a_model_is_an_error_of_one_line(tmp_path, capsys):
    assert main(["generate", "hi", "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512mib", 2**29),
        ("2TiB", 2**41),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "0", "0GiB", "-1GiB", "1XB", "1 2 GiB", "1iB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.slow
def test_generate_streams_text_and_reports_bytes():
    result = CliRunner().invoke(
        app,
        ["generate", "Why is the sky blue?", "--max-new-tokens", "24"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "sky" in result.stdout
    assert "24 tokens" in result.stderr
    # 36 tokens of prompt and 24 of answer at 6.25 bits.
    assert "fp8k_turbo4v cache, 6.25 bits per element: 60 tokens in 527 KiB" in result.stderr
