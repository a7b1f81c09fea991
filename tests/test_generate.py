"""Generation on a tiny random model: against a plain uncached loop, and at every edge."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from logits_only import LogitsOnly
from marks import fast_only

import jaxkv
import jaxkv.generate
from jaxkv.generate import Sampler, generate, keep_likeliest
from jaxkv.models import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=61,
    num_layers=2,
    features=32,
    mlp_features=48,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
PROMPTS = [[5, 9, 2], [7] * 21 + [3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@functools.cache
def tiny_model():
    model = Llama(CONFIG, rngs=nnx.Rngs(3))
    # Random weights of this size give well separated logits.
    model.embedding[...] = 4 * model.embedding[...]
    return model


def make_cache(fmt="f16", *, free_blocks=32, **options):
    """A cache of 4 slots; the last one holds all blocks but `free_blocks`."""
    config = CONFIG.cache_config(
        format=fmt,
        block_size=8,
        num_blocks=40,
        max_sequences=4,
        max_blocks_per_sequence=40,
        **options,
    )
    taken = 8 * (40 - free_blocks)
    return jaxkv.reserve(jaxkv.init(config), [0, 0, 0, taken], max_new_tokens=320)[0]


# All greedy runs share one shape, hence one compilation.
run = functools.partial(generate, tiny_model(), prefill_chunk=16)


@functools.partial(jax.jit, static_argnames="steps")
def greedy_padded(tokens, length, steps):
    """Greedy continuation of one padded prompt without any cache."""
    model = tiny_model()

    def step(i, tokens):
        logits = model(tokens[None])[0]
        return tokens.at[length + i].set(jnp.argmax(logits[length + i - 1]).astype(jnp.int32))

    return jax.lax.fori_loop(0, steps, step, tokens)


def greedy(prompt, steps):
    tokens = jnp.zeros(64, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))
    out = greedy_padded(tokens, len(prompt), 20)
    return np.asarray(out)[len(prompt) : len(prompt) + steps].tolist()


def test_greedy_tokens_equal_an_uncached_loop():
    result = run(make_cache(), PROMPTS, 12)
    assert result.tokens.shape == (3, 12)
    assert result.tokens.tolist() == [greedy(prompt, 12) for prompt in PROMPTS]
    assert result.lengths.tolist() == [12, 12, 12]
    assert not result.finished.any() and not result.refused.any()


@pytest.mark.parametrize("max_new_tokens", [1, 2, 9])
def test_streaming_hands_over_every_token_once(max_new_tokens):
    pieces = []
    result = run(
        make_cache(),
        PROMPTS,
        max_new_tokens,
        on_tokens=lambda tokens, counts: pieces.append((tokens, counts)),
    )
    assert np.concatenate([tokens for tokens, _ in pieces], axis=1).tolist() == (
        result.tokens.tolist()
    )
    assert sum(counts for _, counts in pieces).tolist() == [max_new_tokens] * 3
    assert all(tokens.shape[1] <= 8 for tokens, _ in pieces)


def test_stop_tokens_end_a_sequence_and_free_its_blocks():
    free_run = [greedy(prompt, 12) for prompt in PROMPTS]
    stop = free_run[0][4]
    result = run(make_cache(), PROMPTS, 12, stop_tokens=(stop,))
    for row, tokens in enumerate(free_run):
        length = tokens.index(stop) + 1 if stop in tokens else 12
        assert result.lengths[row] == length
        assert result.tokens[row].tolist() == tokens[:length] + [0] * (12 - length)
        assert result.finished[row] == (stop in tokens)
    assert result.lengths[0] <= 5
    assert result.cache.num_free_blocks == 32
    assert result.cache.lengths.tolist() == [0, 0, 0, 64]


def test_a_prompt_can_stop_at_its_first_token():
    first = greedy(PROMPTS[0], 1)[0]
    result = run(make_cache(), PROMPTS[:1], 5, stop_tokens=(first,))
    assert result.lengths.tolist() == [1]
    assert result.finished.tolist() == [True]


def test_ended_sequences_make_room_for_the_others():
    free_run = [greedy(prompt, 20) for prompt in (PROMPTS[0], PROMPTS[2])]
    stop = next(t for t in free_run[0] if t not in free_run[1])
    ends = free_run[0].index(stop) + 1
    # The second stores 28 tokens in 4 blocks: all there are.
    assert 3 + ends <= 16
    result = run(make_cache(free_blocks=4), [PROMPTS[0], PROMPTS[2]], 20, stop_tokens=(stop,))
    assert result.finished.tolist() == [True, False]
    assert result.lengths.tolist() == [ends, 20]
    assert result.tokens[1].tolist() == free_run[1]


def test_a_dry_pool_ends_a_sequence_early_and_says_so():
    result = run(make_cache(free_blocks=3), [PROMPTS[0], PROMPTS[2]], 15)
    # Prompts take 1 + 2 blocks; the first sequence is refused its second, the other takes over.
    assert result.refused.tolist() == [True, False]
    assert result.lengths.tolist() == [6, 15]
    assert result.tokens[0].tolist() == greedy(PROMPTS[0], 6) + [0] * 9
    assert result.tokens[1].tolist() == greedy(PROMPTS[2], 15)
    assert result.cache.faults.exhausted == 1
    assert result.cache.num_free_blocks == 3
    jaxkv.check(result.cache)


def test_a_prompt_that_does_not_fit_is_refused_and_the_rest_go_on():
    result = run(make_cache(free_blocks=5), PROMPTS, 4)
    # The second prompt gets 2 blocks for its first chunk and none for its second.
    assert result.refused.tolist() == [False, True, False]
    assert result.lengths.tolist() == [4, 0, 4]
    assert result.tokens[1].tolist() == [0] * 4
    assert result.tokens[0].tolist() == greedy(PROMPTS[0], 4)
    assert result.cache.num_free_blocks == 5


@pytest.mark.slow
@pytest.mark.full
def test_kept_sequences_can_go_on():
    cache = make_cache()
    first = run(cache, PROMPTS[:1], 6, keep_sequences=True)
    assert first.cache.lengths.tolist() == [3 + 5, 0, 0, 64]
    newest = [int(first.tokens[0, -1])]
    second = run(first.cache, [newest], 6)
    assert [*first.tokens[0].tolist(), *second.tokens[0].tolist()] == greedy(PROMPTS[0], 12)


@pytest.mark.parametrize(
    "fmt", fast_only(["bf16", "int8", "fp8k_turbo4v", "turbo3"], [], ["turbo3"])
)
def test_any_format_generates(fmt):
    result = run(make_cache(fmt), PROMPTS[:2], 4)
    assert result.lengths.tolist() == [4, 4]
    jaxkv.check(result.cache)


@pytest.mark.slow
@pytest.mark.full
def test_debug_caches_generate_the_same():
    result = run(make_cache(debug=True), PROMPTS[:1], 4)
    assert result.tokens[0].tolist() == greedy(PROMPTS[0], 4)


@pytest.mark.slow
@pytest.mark.full
def test_a_model_with_nothing_but_a_call_works():
    result = generate(LogitsOnly(tiny_model()), make_cache(), PROMPTS, 4)
    assert result.tokens.tolist() == [greedy(prompt, 4) for prompt in PROMPTS]


@pytest.mark.slow
def test_nothing_is_compiled_anew_for_lengths_samplers_and_limits(monkeypatch):
    chex.clear_trace_counter()
    decode = chex.assert_max_traces(jaxkv.generate._decode.__wrapped__, n=1)
    monkeypatch.setattr(jaxkv.generate, "_decode", jax.jit(decode, donate_argnames="state"))
    key = jax.random.key(0)
    for i, prompts in enumerate((PROMPTS, PROMPTS[:1], [[1, 2], [3] * 17])):
        sampler = Sampler(temperature=0.5 + i, top_k=5 + i, top_p=0.9 - 0.1 * i)
        run(make_cache(), prompts, 3 + i, sampler, key, stop_tokens=range(i))


@pytest.mark.slow
def test_draws_depend_on_the_key_and_not_on_the_batch():
    sampler = Sampler(temperature=1.5)
    key = jax.random.key(1)
    together = run(make_cache(), PROMPTS, 8, sampler, key)
    alone = run(make_cache(), PROMPTS[:1], 8, sampler, key)
    other = run(make_cache(), PROMPTS, 8, sampler, jax.random.key(2))
    assert alone.tokens[0].tolist() == together.tokens[0].tolist()
    assert other.tokens.tolist() != together.tokens.tolist()


def test_prefill_reports_its_progress():
    steps = []
    run(
        make_cache(),
        PROMPTS,
        1,
        on_prefill=lambda *step: steps.append(step),
    )
    assert steps == [(3 + 16 + 9, 34), (34, 34)]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [1, 3]),
        (99, 1.0, [0, 1, 2, 3]),
        (99, 0.5, [1, 3]),
        (99, 0.39, [1]),
        (3, 0.81, [0, 1, 3]),
        (1, 1e-6, [1]),
    ],
)
def test_keep_likeliest_keeps_exactly(top_k, top_p, kept):
    logits = jnp.log(jnp.asarray([0.2, 0.4, 0.1, 0.3]))
    out = keep_likeliest(logits, jnp.int32(top_k), jnp.float32(top_p))
    assert np.flatnonzero(np.isfinite(out)).tolist() == kept
    np.testing.assert_array_equal(out[jnp.asarray(kept)], logits[jnp.asarray(kept)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "expected 1 to 4"),
        ({"prompts": [[1]] * 5}, "expected 1 to 4"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: a prompt needs"),
        ({"prompts": [[1, -1]]}, r"prompts\[0\]: token ids are not negative"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected at least 1, got 0"),
        ({"sampler": Sampler(1.0)}, "pass key="),
    ],
)
def test_wrong_arguments_are_named(settings, message):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4} | settings
    with pytest.raises(ValueError, match=message):
        run(make_cache(), **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_wrong_samplers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**settings)


@pytest.mark.slow
def test_layer_programs_carry_exact_tokens_and_online_scales():
    config = CONFIG.cache_config(
        format="fp8k_bf16v",
        **dict(block_size=8, num_blocks=40, max_sequences=4, max_blocks_per_sequence=10),
        **dict(exact_first=1, exact_recent=8, max_step_tokens=16),
        online_calibration=jaxkv.OnlineCalibration(window=20),
    )
    layered = run(jaxkv.init(config), PROMPTS, 4, keep_sequences=True)
    # In debug mode all layers are one program.
    whole = run(
        jaxkv.init(dataclasses.replace(config, debug=True)), PROMPTS, 4, keep_sequences=True
    )
    assert layered.tokens.tolist() == whole.tokens.tolist()
    got, want = layered.cache, whole.cache
    assert got.staging.is_frozen and len(set(got.k_scales.tolist())) == CONFIG.num_layers
    chex.assert_trees_all_close(got.k_scales, want.k_scales, rtol=1e-4)
    chex.assert_trees_all_close(got.staging, want.staging, atol=1e-3)
    chex.assert_trees_all_close(got.recent, want.recent, atol=2e-2)
    assert float(jnp.abs(got.recent.layers[1].k).max()) > 0
