"""First and recent tokens in 16 bits: every query against a plain model of the rule."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from marks import full_except

import jaxkv
from jaxkv.formats import FORMATS

# Part of the daily run: the fast part keeps to a step and what it is made of.
pytestmark = pytest.mark.slow

S, T, N = 3, 6, 10
HEADS, Q_HEADS, DIM, V_DIM = 2, 4, 32, 16
FIRST, RECENT = 2, 5


def config_of(name="int8", **fields):
    return jaxkv.CacheConfig(
        **{
            **dict(num_layers=1, num_kv_heads=HEADS, head_dim=DIM, v_head_dim=V_DIM),
            **dict(block_size=8, num_blocks=24, max_sequences=S, max_blocks_per_sequence=6),
            **dict(exact_first=FIRST, exact_recent=RECENT, max_step_tokens=T, format=name),
            **fields,
        }
    )


@dataclasses.dataclass(frozen=True)
class Token:
    """One stored token: bf16 rows, its page's, and whether the exact rows hold it."""

    k: np.ndarray
    v: np.ndarray
    k_page: np.ndarray
    v_page: np.ndarray
    is_first: bool
    is_recent: bool


def rounded(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


class Model:
    """A cache, and beside it what each slot must hold."""

    def __init__(self, config, cache=None):
        self.config = config
        cache = jaxkv.init(config, k_scales=0.05, v_scales=0.25) if cache is None else cache
        # Rows that nobody wrote must never matter.
        rows = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), cache.recent.layers)
        recent = dataclasses.replace(cache.recent, layers=rows)
        self.cache = dataclasses.replace(cache, recent=recent)
        self.slots = [[] for _ in range(config.max_sequences)]
        self.rng = np.random.default_rng(3)

    def step(self, new_tokens, *, packed=False, tokens=T, dtype=jnp.float32, **options):
        """Appends noise and compares what every query sees; returns the plan."""
        shape = (N, HEADS) if packed else (S, tokens, HEADS)
        k = self.rng.standard_normal((*shape, DIM), np.float32) * 3
        v = self.rng.standard_normal((*shape, V_DIM), np.float32) + 1
        q = self.rng.standard_normal((*shape[:-1], Q_HEADS, DIM), np.float32)
        q = jnp.asarray(q, dtype)
        lead = N if packed else tokens
        self.cache, plan, out, lse = run(
            self.cache, q, k, v, jnp.asarray(new_tokens), packed, lead, **freeze(options)
        )
        spec, pages = self.config.layer(0), self.cache.layers[0]
        k_pages = oracle.stored_rows(pages.k, spec.k, self.cache.k_scales[0])
        v_pages = oracle.stored_rows(pages.v, spec.v, self.cache.v_scales[0])
        flat_k, flat_v = k.reshape(-1, HEADS, DIM), v.reshape(-1, HEADS, V_DIM)
        table, size = np.asarray(self.cache.block_tables), self.config.block_size
        for s in range(S):
            for i in range(int(plan.new_tokens[s])):
                j, index = len(self.slots[s]), int(plan.offsets[s]) + i
                where = (table[s, j // size], slice(None), j % size)
                self.append(s, flat_k[index], flat_v[index], k_pages[where], v_pages[where])
        want, want_lse = self.attend(q, plan, **options)
        # XLA multiplies f32 queries by decoded keys as pairs of bf16.
        tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, atol=1e-4)
        return plan

    def append(self, s, k, v, k_page, v_page):
        held, ring = self.slots[s], self.config.ring_tokens
        position = len(held)
        is_first = position < self.config.exact_first
        held.append(Token(rounded(k), rounded(v), k_page, v_page, is_first, ring > 0))
        if ring and position >= ring:
            lost = held[position - ring]
            held[position - ring] = dataclasses.replace(lost, is_recent=False)

    def attend(self, q, plan, store=None, **options):
        q = np.asarray(q.astype(jnp.float32), np.float64)
        flat = q.reshape(-1, Q_HEADS, DIM)
        out, lse = np.zeros((*flat.shape[:2], V_DIM)), np.full(flat.shape[:2], -np.inf)
        for s in range(S):
            for i in range(int(plan.new_tokens[s])):
                p = int(plan.starts[s]) + i
                keys = []
                for j in range(p + 1):
                    token = self.slots[s][j]
                    is_exact = (token.is_first and j < self.config.exact_first) or (
                        token.is_recent and p - j < self.config.exact_recent
                    )
                    rows = (token.k, token.v) if is_exact else (token.k_page, token.v_page)
                    keys.append(rows)
                index = int(plan.offsets[s]) + i
                out[index], lse[index] = softmax(
                    flat[index], keys, p, keep_first=self.config.keep_first, **options
                )
        return out.reshape(*q.shape[:-1], V_DIM), lse.reshape(q.shape[:-1])

    def trim(self, new_lengths):
        self.cache = jaxkv.trim(self.cache, jnp.asarray(new_lengths))
        self.slots = [h if n < 0 else h[:n] for h, n in zip(self.slots, new_lengths)]

    def fork(self, source, destination):
        self.cache = jaxkv.fork(self.cache, jnp.asarray(source), jnp.asarray(destination))
        before = list(self.slots)
        for a, b in zip(source, destination):
            if 0 <= a < S and 0 <= b < S:
                self.slots[b] = list(before[a])

    def reorder(self, rows):
        self.cache = jaxkv.reorder(self.cache, jnp.asarray(rows))
        self.slots = [[] if r < 0 else list(self.slots[r]) for r in rows]

    def release(self, mask):
        self.cache = jaxkv.release(self.cache, jnp.asarray(mask))
        self.slots = [[] if m else h for m, h in zip(mask, self.slots)]


def softmax(q, keys, position, *, window=None, keep_first=0, soft_cap=None, sinks=None):
    low = 0 if window is None else max(0, position - window + 1)
    keys = [key for j, key in enumerate(keys) if j >= low or j < keep_first]
    k, v = (np.stack(x).repeat(Q_HEADS // HEADS, 1) for x in zip(*keys))
    scores = np.einsum("hd,khd->hk", q, k) * DIM**-0.5
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    logits = scores if sinks is None else np.concatenate([scores, sinks[:, None]], 1)
    top = logits.max(1, keepdims=True)
    total = np.exp(logits - top).sum(1)
    weights = np.exp(scores - top) / total[:, None]
    return np.einsum("hk,khd->hd", weights, v), top[:, 0] + np.log(total)


def freeze(options):
    sinks = options.get("sinks")
    return {**options, "sinks": None if sinks is None else jnp.asarray(sinks, jnp.float32)}


@functools.partial(jax.jit, static_argnames=("packed", "tokens", "window", "soft_cap", "store"))
def run(
    cache, q, k, v, new_tokens, packed, tokens, window=None, soft_cap=None, sinks=None, store=None
):
    how = {"total_tokens": tokens} if packed else {"max_new_tokens": tokens}
    cache, plan = jaxkv.reserve(cache, new_tokens, **how)
    cache = jaxkv.write(cache, 0, k, v, plan)
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks, store=store)
    out, lse = jaxkv.attend(cache, 0, q, plan, return_lse=True, **options)
    return cache, plan, out, lse


def story(model, *, packed=True, **options):
    """Chunked prefill, mixed steps, trims, forks and reorders, compared at every step."""
    step = functools.partial(model.step, **options)
    step([6, 1, 0])
    step([6, 3, 2])
    step([5, 1, 4], packed=packed)
    model.trim([-1, 2, 1])
    step([6, 1, 1])
    model.fork([0, 0], [2, 1])
    step([1, 6, 2])
    model.trim([15, 20, 23])
    step([1, 5, 1])
    model.reorder([1, 1, 0])
    step([3, 6, 1], packed=packed)
    model.release([True, False, False])
    step([6, 1, 1])
    step([1, 1, 1])
    # Beyond what the ring still holds: the pages serve.
    model.trim([2, 7, -1])
    step([2, 6, 3])
    step([4, 1, 5], packed=packed)


def test_every_query_sees_what_the_rule_says():
    story(Model(config_of()), packed=False)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_every_query_sees_what_the_rule_says_in_any_format_and_layout(name):
    story(Model(config_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_steps_and_moves(seed):
    model, rng = Model(config_of("turbo2")), np.random.default_rng(seed)
    for _ in range(40):
        lengths = np.array([len(held) for held in model.slots])
        match rng.integers(8):
            case 0:
                model.trim(np.where(rng.random(S) < 0.5, rng.integers(0, lengths + 1), -1).tolist())
            case 1:
                source, destination = rng.permutation(S)[:2].tolist()
                model.fork([source], [destination])
            case 2:
                model.reorder(rng.integers(-1, S, S).tolist())
            case 3:
                model.release((rng.random(S) < 0.2).tolist())
            case 4:
                model.step(rng.integers(0, 4, S).tolist(), packed=True)
            case _:
                model.step(rng.integers(0, T + 1, S).tolist())
    jaxkv.check(model.cache)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dict(exact_first=0), dict(exact_recent=0), dict(exact_first=4, exact_recent=1)]
)
def test_either_kind_of_exact_token_alone(fields):
    story(Model(config_of("fp8k_turbo4v", **fields)))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(window=3),
        dict(window=9, soft_cap=5.0),
        dict(sinks=np.array([0.5, -1.0, 2.0, 0.0])),
        dict(dtype=jnp.bfloat16),
    ],
    ids=str,
)
def test_window_soft_cap_sinks_and_narrow_queries(options):
    story(Model(config_of()), **options)


@pytest.mark.full
@pytest.mark.slow
def test_a_contiguous_cache_keeps_exact_tokens_and_grows():
    config = config_of("turbo3")
    model = Model(config, jaxkv.init_contiguous(config, batch=S, capacity=48))
    model.config = model.cache.config
    story(model)
    model.cache = jaxkv.grow(model.cache, 64)
    model.config = model.cache.config
    model.step([6, 1, 2])


@pytest.mark.full
@pytest.mark.slow
def test_long_chunks_run_in_tiles():
    fields = dict(exact_recent=100, max_step_tokens=150, num_blocks=80, max_blocks_per_sequence=24)
    model = Model(config_of("turbo2", **fields))
    model.step([150, 1, 70], tokens=150)
    model.step([20, 130, 1], tokens=150)
    model.trim([162, -1, 5])
    model.step([20, 20, 66], tokens=150)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "window, keep_first, recent", full_except([(9, 0, 5), (4, 3, 7), (9, 1, 5)], [(9, 1, 5)])
)
def test_windows_that_drop_blocks(window, keep_first, recent):
    fields = dict(window=window, keep_first=keep_first, exact_recent=recent)
    model = Model(config_of(**fields))
    for new in ([6, 1, 0], [6, 6, 2], [6, 6, 1], [1, 6, 6], [6, 1, 1]):
        model.step(new, window=window)
    model.fork([0], [2])
    model.step([1, 3, 6], window=window)


@pytest.mark.slow
def test_blocks_in_a_store():
    model = Model(config_of(resident_blocks_per_sequence=2))
    store = jaxkv.BlockStore()
    for new in ([6, 1, 0], [6, 6, 2], [6, 6, 1], [6, 6, 6], [6, 1, 1]):
        model.step(new, store=store)
        model.cache = jaxkv.offload(model.cache, store)
    assert int(model.cache.block_tables.min()) < -1
    # The ring has lost what it needs: stored blocks serve.
    model.trim([8, 18, -1])
    model.step([1, 3, 6], store=store)
    model.step([1, 1, 1], store=store)


def test_tokens_of_a_prefix_cache_are_read_from_their_pages():
    config = config_of()
    model = Model(config)
    prefix = jaxkv.PrefixCache(config)
    prompt = list(range(16))
    model.step([6, 0, 0])
    model.step([6, 0, 0])
    model.step([5, 0, 0])
    model.cache = prefix.insert(model.cache, 0, prompt)
    for slot, length, known in ((1, 16, 15), (2, 12, 8)):
        model.cache, matched = prefix.attach(model.cache, slot, prompt[:length])
        assert matched == known
        model.slots[slot] = [
            dataclasses.replace(t, is_first=False, is_recent=False)
            for t in model.slots[0][:matched]
        ]
    # One of the two first tokens comes from a page, the other is written here.
    model.trim([-1, 9, 1])
    model.step([1, 6, 4])
    model.fork([2], [0])
    model.step([2, 1, 1])


@pytest.mark.full
@pytest.mark.slow
def test_a_token_by_token_run_equals_a_chunk():
    config = config_of()
    rng = np.random.default_rng(0)
    k, q = (rng.standard_normal((S, 30, h, DIM), np.float32) for h in (HEADS, Q_HEADS))
    v = rng.standard_normal((S, 30, HEADS, V_DIM), np.float32)

    def feed(size):
        cache, outs = jaxkv.init(config), []
        for i in range(0, 30, size):
            part = (x[:, i : i + size] for x in (q, k, v))
            cache, _, out, _ = run(cache, *part, jnp.full(S, size), False, size)
            outs.append(out)
        return np.concatenate(outs, 1)

    np.testing.assert_allclose(feed(1), feed(6), atol=1e-5)


def test_a_packed_step_as_wide_as_a_padded_one_stays_packed():
    """An idle slot moves the others' rows, whatever the number of rows is."""
    model = Model(config_of())
    model.step([6, 3, 2])
    rng, new_tokens = np.random.default_rng(5), jnp.asarray([1, 0, 1])
    k, q = (rng.standard_normal((S, 1, heads, DIM), np.float32) for heads in (HEADS, Q_HEADS))
    v = rng.standard_normal((S, 1, HEADS, V_DIM), np.float32)

    def outputs(order, **how):
        cache, plan = jaxkv.reserve(model.cache, new_tokens, **how)
        rows = [x[order].reshape(*plan.token_shape, *x.shape[2:]) for x in (k, v, q)]
        cache = jaxkv.write(cache, 0, *rows[:2], plan)
        out, lse = jaxkv.attend(cache, 0, rows[2], plan, return_lse=True)
        return out.reshape(S, Q_HEADS, V_DIM), lse.reshape(S, Q_HEADS)

    padded = outputs(np.array([0, 1, 2]), max_new_tokens=1)
    packed = outputs(np.array([0, 2, 1]), max_new_tokens=1, total_tokens=S)
    for want, got in zip(padded, packed):
        np.testing.assert_allclose(got[:2], want[np.array([0, 2])], atol=1e-5)
        np.testing.assert_array_equal(got[2], want[1])


def test_more_tokens_than_a_step_may_have_are_refused():
    model = Model(config_of())
    with pytest.raises(ValueError, match=f"at most max_step_tokens = {T}"):
        jaxkv.reserve(model.cache, jnp.ones(S, jnp.int32), max_new_tokens=T + 1)
    cache, plan = jaxkv.reserve(model.cache, jnp.array([1, T + 1, 2]), total_tokens=N)
    assert plan.refusal.tolist() == [0, int(jaxkv.Refusal.PAST_CAPACITY), 0]
    assert int(cache.faults.past_capacity) == 1
    # Without a ring nothing bounds a step.
    without = config_of(exact_recent=0)
    jax.eval_shape(
        lambda: jaxkv.reserve(jaxkv.init(without), jnp.ones(S, jnp.int32), max_new_tokens=T + 1)
    )


def test_a_value_that_is_not_finite_reaches_only_those_who_see_it():
    cache = Model(config_of()).cache
    rng = np.random.default_rng(1)
    k, q = (rng.standard_normal((S, T, h, DIM), np.float32) for h in (HEADS, Q_HEADS))
    v = rng.standard_normal((S, T, HEADS, V_DIM), np.float32)
    v[0, 3, 0, 0] = np.inf
    k[1, 4] = -np.inf
    _, _, out, _ = run(cache, q, k, v, jnp.array([6, 6, 6]), False, T, sinks=None)
    is_bad = np.isnan(np.asarray(out)).any((2, 3))
    np.testing.assert_array_equal(is_bad[0], np.arange(T) >= 3)
    np.testing.assert_array_equal(is_bad[1], np.arange(T) >= 4)
    assert not is_bad[2].any()


@pytest.mark.slow
def test_a_swapped_or_saved_sequence_keeps_its_exact_tokens(tmp_path):
    model = Model(config_of())
    store = jaxkv.BlockStore()
    for _ in range(3):
        model.step([6, 4, 1])
    first, second, third = model.slots
    model.cache = jaxkv.swap_out(model.cache, 0, store)
    model.slots[0] = []
    model.step([2, 1, 6])
    jaxkv.save(tmp_path / "kv", model.cache, slot=1)
    model.release([True, True, False])
    model.cache = jaxkv.swap_in(model.cache, 1, store, key=0)
    model.cache = jaxkv.load(tmp_path / "kv", model.config, cache=model.cache, slot=0)
    model.slots = [second, first, third]
    model.step([3, 2, 1])


def test_bytes_are_counted():
    config = config_of("turbo4")
    plain = config_of("turbo4", exact_first=0, exact_recent=0)
    rows = FIRST + RECENT + T + 8
    assert config.exact_bytes_per_sequence == 2 * rows * HEADS * (DIM + V_DIM)
    assert jaxkv.init(config).nbytes == jaxkv.init(plain).nbytes + config.exact_bytes
    budget = 10 * config.block_bytes_total + config.exact_bytes
    assert config.blocks_that_fit(budget) == 10
    assert config.blocks_that_fit(config.exact_bytes - 1) == 0
    assert plain.exact_bytes == 0 and jaxkv.init(plain).recent is None
    assert jaxkv.CacheConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "fields", [dict(exact_first=5), dict(exact_recent=129), dict(exact_recent=True)], ids=str
)
def test_options_out_of_range_are_errors(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name}: got"):
        config_of(**fields)
