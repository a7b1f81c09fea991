"""Requests in company are answered as they are alone, and nothing leaks or starves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_only import LogitsOnly
from marks import full_except

import jaxkv
import jaxkv._packed_step
from jaxkv.models import Llama, LlamaConfig
from jaxkv.scheduler import Scheduler

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

MODEL = LlamaConfig(
    vocab_size=61,
    num_layers=2,
    features=32,
    mlp_features=48,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=False,
)
# Requests of up to 9 blocks; three at once do not fit.
CONFIG = MODEL.cache_config(
    format="f16", block_size=8, num_blocks=14, max_sequences=4, max_blocks_per_sequence=12
)
NEW = 30
_rng = np.random.default_rng(0)
SYSTEM = _rng.integers(0, 61, 32).tolist()
PROMPTS = [_rng.integers(0, 61, n).tolist() for n in (3, 20, 33, 16, 40, 1)]
CHATS = [SYSTEM + prompt for prompt in PROMPTS[:4]] + [SYSTEM, SYSTEM[:20]]


@functools.cache
def tiny_model():
    model = Llama(MODEL, rngs=nnx.Rngs(3))
    model.head[...] = 4 * model.head[...]
    return model


class Watched(Scheduler):
    """Notes where near ties were counted: (request, place in its answer)."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tied = set()

    def _emit(self, request, report, slot):
        place, before = len(request.known), self.statistics.near_ties
        super()._emit(request, report, slot)
        if self.statistics.near_ties > before:
            self.tied.add((request.id, place))


def make(config=CONFIG, **options):
    return Watched(tiny_model(), jaxkv.init(config), chunk=16, **options)


@functools.cache
def _alone(prompt, config):
    scheduler = make(config)
    scheduler.submit(prompt, NEW)
    return scheduler.run()[0], scheduler._requests[0].logits


def alone(prompt, config=CONFIG):
    return _alone(tuple(prompt), config)[0]


def logits_alone(prompt):
    return _alone(tuple(prompt), CONFIG)[1]


def run_in(order, prompts, scheduler, pause=2):
    """Submits in an order, some steps apart; answers by prompt."""
    numbers = {}
    for i in order:
        numbers[i] = scheduler.submit(prompts[i], NEW)
        for _ in range(pause):
            scheduler.step()
    answers = scheduler.run()
    return [answers[numbers[i]] for i in sorted(numbers)]


def assert_as_alone(scheduler, number, answer, expected):
    """No token of an answer differs before a near tie; a cancelled one may be shorter."""
    differ = [i for i, (a, b) in enumerate(zip(answer, expected)) if a != b]
    assert not differ or (number, differ[0]) in scheduler.tied


def assert_clean(scheduler, held=0):
    """Nothing is left behind, and the host's count of free blocks was right to the end."""
    cache = scheduler.cache
    assert cache.lengths.tolist() == [0] * 4
    assert int(cache.num_free_blocks) == scheduler.num_free_blocks == cache.config.num_blocks - held
    assert jaxkv.report(cache) == "no faults"
    assert scheduler.statistics.mispredictions == 0


@pytest.mark.slow
def test_an_answer_is_the_likeliest_continuation():
    model = tiny_model()
    prompt = PROMPTS[1]
    tokens = jnp.zeros(64, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt))

    @jax.jit
    def greedy(tokens):
        def body(i, tokens):
            return tokens.at[i].set(jnp.argmax(model(tokens[None])[0, i - 1]).astype(jnp.int32))

        return jax.lax.fori_loop(len(prompt), len(prompt) + 8, body, tokens)

    assert alone(prompt)[:8] == greedy(tokens)[len(prompt) :][:8].tolist()


@pytest.mark.parametrize("order", [range(6), (5, 2, 0, 4, 3, 1)])
def test_company_and_recomputing_change_nothing(order):
    scheduler = make()
    answers = run_in(order, PROMPTS, scheduler)
    s = scheduler.statistics
    assert s.recomputes > 0 and s.tokens_recomputed > 0
    assert (s.flips, s.near_ties) == (0, 0)
    assert answers == [alone(p) for p in PROMPTS]
    assert 0 < s.rounding < 1e-2
    assert_clean(scheduler)


def test_flips_and_near_ties_are_counted():
    scheduler = make()
    for prompt in PROMPTS:
        scheduler.submit(prompt, NEW)
    dropped = []
    while not dropped:
        scheduler.step()
        dropped = [r for r in scheduler._waiting if len(r.known) > 2]
    # As if another token had been the likeliest at first, and rounding were large.
    dropped[0].known[1] = (dropped[0].known[1] + 1) % 61
    scheduler.statistics.rounding = 1e6
    scheduler.run()
    s = scheduler.statistics
    assert s.flips >= 1 and s.largest_flip > 0
    assert len(scheduler.tied) == s.near_ties >= NEW - 3


def test_all_of_it_is_one_compiled_step():
    jaxkv._packed_step.packed_step.clear_cache()
    run_in(range(6), CHATS, make(prefix=jaxkv.PrefixCache(CONFIG)), pause=1)
    assert jaxkv._packed_step.packed_step._cache_size() == 1


@pytest.mark.parametrize("order", [range(6), (5, 2, 0, 4, 3, 1)])
def test_swapping_changes_no_bit(order):
    store = jaxkv.BlockStore(None, max_bytes=2**24)
    scheduler = make(store=store)
    assert run_in(order, PROMPTS, scheduler) == [alone(p) for p in PROMPTS]
    for request in scheduler._requests.values():
        assert request.logits == logits_alone(request.prompt)
    s = scheduler.statistics
    assert s.swaps > 0 and (s.recomputes, s.near_ties) == (0, 0)
    assert store.nbytes == 0
    assert_clean(scheduler)


def test_a_full_store_falls_back_to_computing_again():
    scheduler = make(store=jaxkv.BlockStore(None, max_bytes=1))
    assert run_in(range(6), PROMPTS, scheduler) == [alone(p) for p in PROMPTS]
    assert scheduler.statistics.swaps == 0 < scheduler.statistics.recomputes
    assert_clean(scheduler)


def test_a_request_cancelled_while_swapped_leaves_the_store():
    store = jaxkv.BlockStore(None, max_bytes=2**24)
    scheduler = make(store=store)
    for prompt in PROMPTS:
        scheduler.submit(prompt, NEW)
    while store.nbytes == 0:
        scheduler.step()
    (swapped,) = [r for r in scheduler._waiting if r.is_swapped]
    scheduler.cancel(swapped.id)
    assert store.nbytes == 0
    scheduler.run()
    assert_clean(scheduler)


@pytest.mark.parametrize("order", [range(6), (4, 0, 5, 3, 1, 2)])
def test_sharing_a_prefix_changes_nothing(order):
    prefix = jaxkv.PrefixCache(CONFIG)
    scheduler = make(prefix=prefix)
    assert run_in(order, CHATS, scheduler, pause=0) == [alone(p) for p in CHATS]
    for request in scheduler._requests.values():
        if not request.was_recomputed:
            assert request.logits == logits_alone(request.prompt)
    # Five share two chunks; a prompt of 32 tokens must compute its last chunk, one of 20 too.
    assert scheduler.statistics.tokens_reused >= 3 * 32 + 16
    assert prefix.statistics.evictions > 0
    assert_clean(scheduler, held=len(prefix))
    scheduler.cache = prefix.clear(scheduler.cache)
    assert int(scheduler.cache.num_free_blocks) == CONFIG.num_blocks


def test_the_oldest_is_never_preempted_and_the_rest_keep_their_order(monkeypatch):
    preempted = []
    original = Scheduler._preempt

    def spy(self, request):
        preempted.append((request.id, [r.id for r in self._running]))
        original(self, request)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    scheduler = make()
    ends = []
    for prompt in PROMPTS * 3:
        scheduler.submit(prompt, NEW)
    while not scheduler.is_idle:
        ends += [e.request for e in scheduler.step() if e.is_last]
    assert preempted
    assert all(victim == max(running) > min(running) for victim, running in preempted)
    assert sorted(ends) == list(range(18))
    # Nobody is overtaken by more than those who run at once.
    assert max(abs(place - number) for place, number in enumerate(ends)) <= 4


def test_a_step_is_read_after_the_next_is_sent_off():
    scheduler = make()
    scheduler.submit(PROMPTS[0], 4)
    counts = []
    while not scheduler.is_idle:
        emitted = scheduler.step()
        counts.append((scheduler.statistics.steps, len(emitted)))
    assert counts == [(1, 0), (2, 1), (3, 1), (4, 1), (4, 1)]


def test_a_stop_token_ends_an_answer_and_frees_its_blocks():
    answer = alone(PROMPTS[0])
    stop = answer[5]
    scheduler = make()
    scheduler.submit(PROMPTS[0], NEW, stop_tokens=(stop,))
    emitted = []
    while not scheduler.is_idle:
        emitted += scheduler.step()
    assert [e.token for e in emitted] == answer[: answer.index(stop) + 1]
    assert [e.is_last for e in emitted] == [False] * (len(emitted) - 1) + [True]
    assert_clean(scheduler)


def test_a_popped_request_is_forgotten_and_its_number_is_not_used_again():
    scheduler = make()
    first = scheduler.submit(PROMPTS[0], 3)
    with pytest.raises(ValueError, match="request: 0 has not ended"):
        scheduler.pop(first)
    scheduler.run()
    assert scheduler.pop(first) == alone(PROMPTS[0])[:3]
    for call in (scheduler.answer, scheduler.pop, scheduler.cancel):
        with pytest.raises(ValueError, match="request: got 0, which was never submitted"):
            call(first)
    assert scheduler.submit(PROMPTS[0], 3) == 1
    assert scheduler.run() == {1: alone(PROMPTS[0])[:3]}


def test_a_cancelled_request_leaves_nothing_behind():
    scheduler = make()
    numbers = [scheduler.submit(prompt, NEW) for prompt in PROMPTS]
    for _ in range(6):
        scheduler.step()
    for number in (0, 1, 5):
        scheduler.cancel(number)
    answers = scheduler.run()
    assert [answers[n] for n in (2, 3, 4)] == [alone(PROMPTS[i]) for i in (2, 3, 4)]
    assert len(answers[numbers[0]]) < NEW
    assert_clean(scheduler)


@pytest.mark.slow
def test_blocks_taken_by_others_are_noticed_and_lived_with():
    scheduler = make()
    # Another user of the same cache, in a slot of its own.
    cache, _ = jaxkv.reserve(scheduler.cache, [0, 0, 0, 1])
    scheduler = Scheduler(tiny_model(), cache, chunk=16)
    numbers = [scheduler.submit(prompt, NEW) for prompt in PROMPTS]
    for _ in range(5):
        scheduler.step()
    scheduler.cache, plan = jaxkv.reserve(scheduler.cache, [0, 0, 0, 30], max_new_tokens=30)
    assert plan.granted[3]
    assert scheduler.statistics.mispredictions == 0
    answers = scheduler.run()
    assert [answers[n] for n in numbers] == [alone(prompt) for prompt in PROMPTS]
    assert scheduler.cache.lengths.tolist() == [0, 0, 0, 31]
    assert 0 < scheduler.statistics.mispredictions < 5
    assert int(scheduler.cache.num_free_blocks) == CONFIG.num_blocks - 4


@pytest.mark.slow
def test_too_few_blocks_for_anyone_is_an_error_that_can_be_mended():
    cache, _ = jaxkv.reserve(jaxkv.init(CONFIG), [0, 0, 0, 80], max_new_tokens=80)
    scheduler = Scheduler(tiny_model(), cache, chunk=16)
    scheduler.submit(PROMPTS[4], NEW)
    with pytest.raises(jaxkv.CacheError, match="request 0: needs 6 blocks and 4 are free"):
        scheduler.run()
    scheduler.cache = jaxkv.release(scheduler.cache, np.arange(4) == 3)
    scheduler.resynchronize()
    assert scheduler.run() == {0: alone(PROMPTS[4])}


def test_what_the_cache_refuses_for_good_is_an_error_and_can_be_cancelled():
    scheduler = make()
    numbers = [scheduler.submit(prompt, NEW) for prompt in PROMPTS[:2]]
    # As if `submit` had not looked: more than the block table has columns for.
    scheduler._requests[numbers[0]].most = 100
    with pytest.raises(jaxkv.CacheError, match="request 0: the cache refuses it for good: full"):
        scheduler.run()
    scheduler.cancel(numbers[0])
    assert scheduler.run()[numbers[1]] == alone(PROMPTS[1])
    assert scheduler.cache.lengths.tolist() == [0] * 4
    assert int(scheduler.cache.num_free_blocks) == CONFIG.num_blocks


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Scheduler(None, jaxkv.init(CONFIG), chunk=12), "chunk: got 12, expected a mult"),
        (lambda: make(dataclasses.replace(CONFIG, window=9)), "window = 9, expected None"),
        (
            lambda: make(dataclasses.replace(CONFIG, exact_recent=4, max_step_tokens=8)),
            "chunk: got 16, expected at most max_step_tokens = 8",
        ),
        (lambda: make(tokens_per_step=18), "tokens_per_step: got 18, expected at least 19"),
        (lambda: make().submit([]), "prompt: expected at least one token"),
        (lambda: make().submit([1, -2]), "none negative"),
        (lambda: make().submit([1], 0), "max_new_tokens: got 0"),
        (lambda: make().submit([1] * 90, 8), "90 and 8 make 97 tokens"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("fmt", full_except(["int8", "turbo4", "fp8k_turbo4v"], ["fp8k_turbo4v"]))
def test_formats_share_and_preempt_alike(fmt):
    config = dataclasses.replace(CONFIG, format=fmt)
    prefix = jaxkv.PrefixCache(config)
    scheduler = make(config, prefix=prefix)
    order = (1, 4, 0, 5, 2, 3)
    answers = run_in(order, CHATS, scheduler, pause=1)
    for number, i in enumerate(order):
        assert len(answers[i]) == NEW
        assert_as_alone(scheduler, number, answers[i], alone(CHATS[i], config))
    assert scheduler.statistics.recomputes > 0 and scheduler.statistics.tokens_reused > 0
    assert_clean(scheduler, held=len(prefix))


@pytest.mark.slow
def test_exact_tokens_travel_with_swapped_requests():
    config = dataclasses.replace(CONFIG, format="turbo4", exact_first=2, exact_recent=8)
    store = jaxkv.BlockStore(None, max_bytes=2**24)
    scheduler = make(config, store=store)
    assert run_in(range(6), PROMPTS, scheduler) == [alone(p, config) for p in PROMPTS]
    assert scheduler.statistics.swaps > 0
    assert_clean(scheduler)


@pytest.mark.slow
def test_a_model_with_nothing_but_a_call_works():
    scheduler = Scheduler(LogitsOnly(tiny_model()), jaxkv.init(CONFIG), chunk=16)
    assert run_in(range(2), PROMPTS, scheduler) == [alone(p) for p in PROMPTS[:2]]


def test_a_swapped_request_does_not_pin_blocks_of_the_prefix_cache():
    # It comes back with its own copies, and the tree takes later blocks of it.
    prefix = jaxkv.PrefixCache(CONFIG)
    store = jaxkv.BlockStore(None, max_bytes=2**15)
    scheduler = make(prefix=prefix, store=store)
    prompts = PROMPTS + CHATS
    order = (2, 8, 3, 4, 1, 9, 5, 7, 6, 10, 11)
    answers = run_in(order, prompts, scheduler, pause=0)
    assert answers == [alone(prompts[i]) for i in sorted(order)]
    assert scheduler.statistics.swaps > 0 and prefix.statistics.forgotten > 0
    assert_clean(scheduler, held=len(prefix))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_arrival_order_pace_and_change_of_mind(data):
    prompts = PROMPTS + CHATS
    prefix = jaxkv.PrefixCache(CONFIG) if data.draw(st.booleans()) else None
    store = jaxkv.BlockStore(None, max_bytes=2**15) if data.draw(st.booleans()) else None
    scheduler = make(prefix=prefix, store=store)
    numbers, gone = {}, set()
    for i in data.draw(st.permutations(range(len(prompts)))):
        numbers[i] = scheduler.submit(prompts[i], NEW)
        for _ in range(data.draw(st.integers(0, 8))):
            scheduler.step()
        if data.draw(st.integers(0, 5)) == 0:
            unwanted = data.draw(st.sampled_from(sorted(numbers)))
            gone.add(unwanted)
            scheduler.cancel(numbers[unwanted])
    answers = scheduler.run()
    for i, number in numbers.items():
        assert len(answers[number]) == NEW or i in gone
        assert_as_alone(scheduler, number, answers[number], alone(prompts[i]))
    assert store is None or store.nbytes == 0
    assert_clean(scheduler, held=0 if prefix is None else len(prefix))
