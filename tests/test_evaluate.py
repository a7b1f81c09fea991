"""Quality evaluation: cases, results that resume, and numbers that can be computed by hand."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import jaxkv
from jaxkv.cli import app, main
from jaxkv.evaluate import Case, Evaluation, Needles, python_text
from jaxkv.models import Llama, LlamaConfig

VOCABULARY, WINDOW = 48, 40


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        features=32,
        mlp_features=32,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )
    return Llama(config, rngs=nnx.Rngs(0))


WINDOWS = np.random.default_rng(0).integers(0, VOCABULARY, (3, WINDOW))
OTHER = np.random.default_rng(1).integers(0, VOCABULARY, 64)


def make(model, windows=WINDOWS, **options):
    return Evaluation(model, windows, calibration_tokens=OTHER, batch=2, **options)


@pytest.mark.slow
def test_the_reference_is_the_model_without_a_cache(model):
    calls = []
    result = make(model, on_reference=lambda *call: calls.append(call)).measure("bf16")
    assert calls == [(1, 3), (2, 3), (3, 3)]
    logits = np.asarray(model(WINDOWS), np.float64)[:, :-1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_p, WINDOWS[:, 1:, None], -1).mean()
    assert result.reference_perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.tokens == 3 * (WINDOW - 1)
    assert result.bits == 16 and result.bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert abs(result.loss_of_perplexity) < 1e-3
    assert result.kl < 1e-4 and result.agreement > 0.99
    assert 1e-4 < result.attention_error < 1e-2
    assert result.faults == "no faults"


@pytest.mark.slow
@pytest.mark.full
def test_fewer_bits_lose_more_and_a_chunked_prefill_loses_the_same(model):
    few, many = (make(model).measure(name) for name in ("turbo2", "int8"))
    assert few.kl > 4 * many.kl > 0
    assert few.attention_error > 2 * many.attention_error
    chunked = make(model, chunk=16).measure("int8")
    assert chunked.kl == pytest.approx(many.kl, rel=1e-2)
    assert chunked.perplexity == pytest.approx(many.perplexity, rel=1e-5)


@pytest.mark.slow
def test_results_are_found_again_and_only_for_their_setting(model, tmp_path):
    result = make(model, directory=tmp_path).measure("bf16")
    (path,) = tmp_path.glob("bf16.*.json")
    assert make(model, directory=tmp_path).measure("bf16") == result
    path.write_text(json.dumps(dataclasses.asdict(result) | {"kl": 7.0}))
    assert make(model, directory=tmp_path).measure("bf16").kl == 7.0
    key = make(model).key
    assert make(model, WINDOWS.copy()).key == key
    assert key not in {make(model, WINDOWS[:1]).key, make(model, chunk=16).key}
    assert make(model, WINDOWS[:1], directory=tmp_path).find("bf16") is None
    assert make(model, directory=tmp_path).find("turbo4") is None


@pytest.mark.slow
@pytest.mark.full
def test_a_centered_case_calibrates_and_boundary_layers_count(model):
    evaluation = make(model)
    found = evaluation.calibration("turbo2+centered")
    assert found.k_means is not None and int(found.tokens) == 64
    assert evaluation.calibration("fp8+scaled").k_means is None
    assert evaluation.calibration("turbo2") is None
    config = evaluation.config("turbo2+boundary1")
    assert [str(config.layer_format(i)) for i in range(2)] == ["bf16", "bf16"]
    with pytest.raises(ValueError, match="calibration_tokens: got none"):
        Evaluation(model, WINDOWS).measure("turbo2+centered")


@pytest.mark.slow
@pytest.mark.full
def test_windows_of_exact_tokens_alone_lose_nothing_and_their_bits_are_counted(model):
    result = make(model, chunk=16).measure("turbo2+first1+recent64")
    assert result.kl < 1e-4
    assert result.bits == 2.5 + 16


@pytest.mark.slow
def test_recall_agrees_with_the_model_without_a_cache(model):
    # The model's own likeliest continuation is found, anything else is not.
    windows = WINDOWS[:2].copy()
    windows[0, -1] = np.asarray(model(windows[:1]))[0, -2].argmax()
    evaluation = make(model, windows, chunk=16)
    exact = evaluation.recall("f32", 1)
    assert exact.found == [True, False]
    stored = evaluation.recall("bf16", 1)
    assert stored.found == exact.found
    np.testing.assert_allclose(stored.log_probability, exact.log_probability, atol=0.02)
    log_p = jax.nn.log_softmax(model(windows))
    expected = [log_p[i, -3:-1][[0, 1], windows[i, -2:]].sum() for i in range(2)]
    np.testing.assert_allclose(evaluation.recall("f32", 2).log_probability, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("turbo4", Case(jaxkv.Format.parse("turbo4"))),
        ("fp8k4v+centered", Case(jaxkv.Format.parse("fp8k_turbo4v"), calibration="centered")),
        (
            "turbo3+reference+scaled+first1+recent64+boundary2",
            Case(jaxkv.Format.parse("turbo3"), "reference", "scaled", 1, 64, 2),
        ),
    ],
)
def test_a_case_reads_its_own_text(text, case):
    assert Case.parse(text) == case == Case.parse(str(case))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("turbo5", "unknown name 'turbo5'"),
        ("turbo4+shiny", "unknown option 'shiny'"),
        ("turbo4+first", "unknown option 'first'"),
        ("turbo4+centered+scaled", "more than one option for calibration"),
    ],
)
def test_a_case_that_cannot_be_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Case.parse(text)


def test_a_fact_is_hidden_at_its_depth_and_asked_for_at_the_end():
    def encode(text):
        return list(text.encode())

    needles = Needles.hide(encode, encode("x" * 600), tokens=400, depths=(0.0, 0.5, 1.0))
    assert needles.windows.shape == (3, 400) and needles.answer_tokens == 6
    for depth, row in zip(needles.depths, needles.windows):
        text = bytes(row.tolist()).decode()
        before, _, rest = text.partition("\n\nThe access code of the red lighthouse is")
        assert text.endswith(" is" + rest[:6]) and rest[6] == "."
        assert len(before) == pytest.approx(depth * text.count("x"), abs=1)
    assert len({bytes(row[-6:].tolist()) for row in needles.windows}) == 3
    with pytest.raises(ValueError, match="text: got 10 tokens"):
        Needles.hide(encode, encode("x" * 10))
    with pytest.raises(ValueError, match=r"depths: got 1\.5"):
        Needles.hide(encode, encode("x" * 600), 400, [1.5])


@pytest.mark.parametrize(
    ("windows", "options", "message"),
    [
        (WINDOWS[0], {}, r"windows: got shape \[40\]"),
        (WINDOWS[:, :1], {}, "at least 2 tokens"),
        (WINDOWS, {"chunk": 0}, "chunk: got 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(windows, options, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(None, windows, **options)


def test_the_built_in_text_is_long_enough_for_its_windows():
    assert len(python_text()) > 4 * 12288


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["eval", "--formats", "turbo4,turbo5"], 2, "unknown name 'turbo5'"),
        (["eval", "--formats", "turbo4+shiny"], 2, "unknown option 'shiny'"),
        (["eval", "--windows", "0"], 2, "--windows"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, status, message, capsys):
    assert main(arguments) == status
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_plots_and_resumes(tmp_path):
    arguments = ["eval", "--formats", "bf16,int8", "--windows", "1", "--window-tokens", "96"]
    arguments += ["--results", str(tmp_path / "r"), "--plot", str(tmp_path / "q.png")]
    first, second = (CliRunner().invoke(app, arguments, catch_exceptions=False) for _ in "12")
    assert first.exit_code == 0 and first.stdout == second.stdout
    lines = first.stdout.splitlines()
    assert lines[0].startswith("1 windows of 96 tokens of python; full precision has perplexity")
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["bf16"][0] == "16.00" and rows["int8"][0] == "8.25"
    assert float(rows["bf16"][4]) < 0.5 * float(rows["int8"][4])
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "r").glob("*.json"))) == 2
