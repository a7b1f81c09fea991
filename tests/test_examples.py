"""The examples run as they stand."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(
            "continuous_batching.py", "get the same tokens: 2 of 2", marks=pytest.mark.full
        ),
        ("decode_in_jit.py", "free blocks 61 of 64"),
        pytest.param("generate_text.py", "Name one planet.", marks=pytest.mark.full),
    ],
)
def test_example_runs(name, expected, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert expected in capsys.readouterr().out
