"""Text generation over a paged cache: prefill in chunks, then a compiled decoding loop."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._buckets import bucket
from jaxkv.cache import PagedCache, release, reserve
from jaxkv.sequences import StepPlan, over_resident_limit
from jaxkv.store import BlockStore
from jaxkv.swap import offload

# Tokens between two hand-overs to `on_tokens`.
STREAM_TOKENS = 8
_MIN_CHUNK = 16
_MIN_BUFFER = 64


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn from the logits.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token every time.
      top_k: only the k likeliest tokens can be drawn; None means all.
      top_p: only the likeliest tokens that together reach this probability can be drawn, after
        top_k; 1 means all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"Sampler: temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sampler: top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampler: top_p must be above 0 and at most 1, got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.temperature == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` wrote.

    Attributes:
      tokens: int32[B, max_new_tokens], a stop token included; 0 past a sequence's length.
      lengths: int32[B], tokens written for each prompt.
      finished: bool[B], a stop token ended the sequence.
      refused: bool[B], the sequence ended early because the cache had no room for it. Where neither
        holds, it ran to max_new_tokens.
      cache: the cache, with the blocks of these sequences released unless they were to be kept.
    """

    tokens: jax.Array
    lengths: jax.Array
    finished: jax.Array
    refused: jax.Array
    cache: PagedCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What the loops carry; one row for each slot of the cache.

    Attributes:
      tokens: int32[S, capacity] written so far.
      lengths: int32[S].
      last: int32[S], the newest token of each row, not yet in the cache.
      is_live: bool[S], rows that go on.
      finished: bool[S].
      refused: bool[S].
      step: int32, tokens that every live row has written.
      cache: the cache.
    """

    tokens: jax.Array
    lengths: jax.Array
    last: jax.Array
    is_live: jax.Array
    finished: jax.Array
    refused: jax.Array
    step: jax.Array
    cache: PagedCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Choice:
    """A sampler and what else decides a token, as arrays: other values compile nothing anew."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    key: jax.Array
    stop_tokens: jax.Array
    is_greedy: bool = dataclasses.field(metadata={"static": True})
    is_filtered: bool = dataclasses.field(metadata={"static": True})
    keep_sequences: bool = dataclasses.field(metadata={"static": True})


def generate(
    model: Any,
    cache: PagedCache,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    sampler: Sampler | None = None,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] = (),
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
    prefill_chunk: int = 128,
    keep_sequences: bool = False,
    store: BlockStore | None = None,
) -> Result:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Prompt i goes into slot i, behind what that slot holds. Sequences that end release their blocks
    at once, so that others can take them. A sequence that the cache refuses, in prefill or later,
    ends there, keeps what it wrote and is flagged; the others go on.

    Programs are compiled for a shape of the cache and a bucket of chunk and buffer sizes, never for
    a prompt's length or a sampler's values.

    Args:
      model: an nnx module, or another callable pytree, with
        `model(tokens, cache, plan) -> (logits, cache)`. Where it has `hidden` and `logits` as
        `jaxkv.models.Llama` does, the output layer runs for the tokens alone that need it.
      cache: donated; use only the one in the result.
      prompts: lists of token ids, at most as many as the cache has slots; none empty.
      max_new_tokens: most tokens to write for each prompt.
      sampler: how tokens are drawn; None takes the likeliest.
      key: random key; needed unless the sampler is greedy. What a row draws depends on the key,
        its slot, the number of its token and its logits alone.
      stop_tokens: ids that end a sequence.
      on_tokens: called about every 8 tokens with what is new: int32[B, n] tokens and int32[B] how
        many of them each row wrote. Without it the loop runs once, to the end.
      on_prefill: called after each chunk with (prompt tokens done, prompt tokens in all).
      prefill_chunk: most prompt tokens of a sequence in one step.
      keep_sequences: leave all sequences in the cache, to go on later. The newest token of each is
        not yet stored: start the next prompt with it.
      store: with `CacheConfig(resident_blocks_per_sequence=N)`, where older blocks go and are read;
        the loop then stops for the host as often as blocks have to move. The model takes `store=`.

    Returns:
      The tokens, what became of each sequence, and the cache.

    Raises:
      ValueError: prompts, sampler or sizes that cannot work.
      CacheError: the store is full or cannot write.
    """
    sampler = Sampler() if sampler is None else sampler
    _check_arguments(cache, prompts, max_new_tokens, sampler, key, prefill_chunk)
    choice = _choice(sampler, key, stop_tokens, keep_sequences)
    state = _start(cache, len(prompts), max_new_tokens)
    state = _prefill(model, state, choice, prompts, prefill_chunk, on_prefill, store)

    count = len(prompts)
    done = 0
    while True:
        until = max_new_tokens if on_tokens is None else min(done + STREAM_TOKENS, max_new_tokens)
        state = _decode_until(model, state, choice, until, store)
        if on_tokens is not None:
            lengths = np.asarray(state.lengths)[:count]
            on_tokens(
                np.asarray(state.tokens)[:count, done:until], np.clip(lengths - done, 0, None)
            )
        done = until
        if done == max_new_tokens or not np.asarray(state.is_live).any():
            break
    cache = state.cache if keep_sequences else _release(state.cache, state.is_live)
    return Result(
        tokens=state.tokens[:count, :max_new_tokens],
        lengths=state.lengths[:count],
        finished=state.finished[:count],
        refused=state.refused[:count],
        cache=cache,
    )


def _check_arguments(
    cache: PagedCache,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampler: Sampler,
    key: jax.Array | None,
    prefill_chunk: int,
) -> None:
    slots = cache.config.max_sequences
    if not 0 < len(prompts) <= slots:
        raise ValueError(f"prompts: expected 1 to {slots} (the cache's slots), got {len(prompts)}")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{i}]: a prompt needs at least one token")
        if min(prompt) < 0:
            raise ValueError(f"prompts[{i}]: token ids are not negative, got {min(prompt)}")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if key is None and not sampler.is_greedy:
        raise ValueError("key: this sampler draws random numbers; pass key=jax.random.key(...)")


def _choice(
    sampler: Sampler, key: jax.Array | None, stop_tokens: Sequence[int], keep_sequences: bool
) -> _Choice:
    stops = list(stop_tokens)
    # Padded, so that another number of stop tokens compiles nothing anew.
    stops += [-1] * (-len(stops) % 8 or (0 if stops else 8))
    most = np.iinfo(np.int32).max
    return _Choice(
        temperature=jnp.float32(sampler.temperature or 1.0),
        top_k=jnp.int32(most if sampler.top_k is None else min(sampler.top_k, most)),
        top_p=jnp.float32(sampler.top_p),
        key=jax.random.key(0) if key is None else key,
        stop_tokens=jnp.asarray(stops, jnp.int32),
        is_greedy=sampler.is_greedy,
        is_filtered=not sampler.is_greedy and (sampler.top_k is not None or sampler.top_p < 1),
        keep_sequences=keep_sequences,
    )


def _start(cache: PagedCache, num_prompts: int, max_new_tokens: int) -> _State:
    slots = cache.config.max_sequences

    def zeros(dtype: Any) -> jax.Array:
        return jnp.zeros(slots, dtype)

    return _State(
        tokens=jnp.zeros((slots, bucket(max_new_tokens, _MIN_BUFFER)), jnp.int32),
        lengths=zeros(jnp.int32),
        last=zeros(jnp.int32),
        is_live=jnp.arange(slots) < num_prompts,
        finished=zeros(bool),
        refused=zeros(bool),
        step=jnp.int32(0),
        cache=cache,
    )


def _prefill(
    model: Any,
    state: _State,
    choice: _Choice,
    prompts: Sequence[Sequence[int]],
    prefill_chunk: int,
    on_prefill: Callable[[int, int], None] | None,
    store: BlockStore | None,
) -> _State:
    """Feeds all prompts, a chunk of each at a time; ends with the first new token of each."""
    lengths = np.zeros(state.lengths.shape, np.int64)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    longest = int(lengths.max())
    chunk = min(prefill_chunk, bucket(longest, _MIN_CHUNK))
    if state.cache.config.exact_recent:
        chunk = min(chunk, state.cache.config.max_step_tokens)
    tokens = np.zeros((len(lengths), -(-longest // chunk) * chunk), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    for start in range(0, longest, chunk):
        counts = np.clip(lengths - start, 0, chunk).astype(np.int32)
        is_last = (lengths > start) & (lengths <= start + chunk)
        if store is not None:
            state = dataclasses.replace(state, cache=offload(state.cache, store))
        state = _prefill_chunk(
            model, state, choice, tokens[:, start : start + chunk], counts, is_last, store
        )
        if on_prefill is not None:
            jax.block_until_ready(state.last)
            on_prefill(int(np.minimum(lengths, start + chunk).sum()), int(lengths.sum()))
    return dataclasses.replace(state, step=jnp.int32(1))


def _prefill_chunk(
    model: Any,
    state: _State,
    choice: _Choice,
    tokens: np.ndarray,
    counts: np.ndarray,
    is_last: np.ndarray,
    store: BlockStore | None,
) -> _State:
    """One chunk, int32[S, C] tokens of which int32[S] counts; rows bool[S] is_last end in it."""
    by_layer = hasattr(model, "hidden_by_layer")
    # In debug mode a fault names its layer where it happens; a stored block is read by layer.
    if not by_layer or state.cache.config.debug or store is not None:
        return _prefill_program(model, state, choice, tokens, counts, is_last, store)
    cache, plan = reserve(
        state.cache, jnp.where(state.is_live, counts, 0), max_new_tokens=tokens.shape[1]
    )
    hidden, cache = model.hidden_by_layer(jnp.asarray(tokens), cache, plan)
    state = dataclasses.replace(state, cache=cache)
    return _finish_chunk(model, state, choice, hidden, plan, is_last)


@functools.partial(jax.jit, static_argnames="store", donate_argnames="state")
def _prefill_program(
    model: Any,
    state: _State,
    choice: _Choice,
    tokens: jax.Array,
    counts: jax.Array,
    is_last: jax.Array,
    store: BlockStore | None,
) -> _State:
    """As `_prefill_chunk`, all layers in one program."""
    cache, plan = reserve(
        state.cache, jnp.where(state.is_live, counts, 0), max_new_tokens=tokens.shape[1]
    )
    logits, cache = _last_logits(model, tokens, cache, plan, store)
    return _first_token(dataclasses.replace(state, cache=cache), choice, logits, plan, is_last)


@functools.partial(jax.jit, donate_argnames="state")
def _finish_chunk(
    model: Any,
    state: _State,
    choice: _Choice,
    hidden: jax.Array,
    plan: StepPlan,
    is_last: jax.Array,
) -> _State:
    logits = model.logits(_last_token(hidden, plan))
    return _first_token(state, choice, logits, plan, is_last)


def _first_token(
    state: _State, choice: _Choice, logits: jax.Array, plan: StepPlan, is_last: jax.Array
) -> _State:
    return _accept(
        state,
        choice,
        _draw(logits, choice, jnp.int32(0)),
        is_new=state.is_live & is_last & plan.granted,
        refused=state.is_live & ~plan.granted,
        column=jnp.int32(0),
    )


def _decode_until(
    model: Any, state: _State, choice: _Choice, until: int, store: BlockStore | None
) -> _State:
    """Decodes on, moving blocks to the store whenever a row holds too many."""
    if store is None:
        return _decode(model, state, choice, jnp.int32(until), None)
    while True:
        state = dataclasses.replace(state, cache=offload(state.cache, store))
        state = _decode(model, state, choice, jnp.int32(until), store)
        if int(state.step) >= until or not np.asarray(state.is_live).any():
            return state


@functools.partial(jax.jit, static_argnames="store", donate_argnames="state")
def _decode(
    model: Any, state: _State, choice: _Choice, until: jax.Array, store: BlockStore | None
) -> _State:
    """One token at a time until every row has ended or has written `until` tokens.

    Ends earlier where a row holds more blocks than may stay on the device.
    """

    def step(state: _State) -> _State:
        cache, plan = reserve(state.cache, state.is_live.astype(jnp.int32))
        logits, cache = _last_logits(model, state.last[:, None], cache, plan, store)
        drawn = _draw(logits, choice, state.step)
        state = _accept(
            dataclasses.replace(state, cache=cache),
            choice,
            drawn,
            is_new=state.is_live & plan.granted,
            refused=state.is_live & ~plan.granted,
            column=state.step,
        )
        return dataclasses.replace(state, step=state.step + 1)

    def goes_on(state: _State) -> jax.Array:
        limit = state.cache.config.resident_blocks_per_sequence
        goes_on = (state.step < until) & state.is_live.any()
        if limit is not None:
            is_over = state.is_live & over_resident_limit(state.cache.sequences, limit)
            goes_on &= ~is_over.any()
        return goes_on

    return jax.lax.while_loop(goes_on, step, state)


@functools.partial(jax.jit, donate_argnames="cache")
def _release(cache: PagedCache, mask: jax.Array) -> PagedCache:
    return release(cache, mask)


def _last_logits(
    model: Any, tokens: jax.Array, cache: PagedCache, plan: StepPlan, store: BlockStore | None
) -> tuple[jax.Array, PagedCache]:
    """Logits f32[S, vocab] of each sequence's last new token; rows without one are of no use."""
    where = {} if store is None else {"store": store}
    if not hasattr(model, "hidden"):
        logits, cache = model(tokens, cache, plan, **where)
        return _last_token(logits, plan).astype(jnp.float32), cache
    hidden, cache = model.hidden(tokens, cache, plan, **where)
    return model.logits(_last_token(hidden, plan)), cache


def _last_token(x: jax.Array, plan: StepPlan) -> jax.Array:
    """Takes x [S, T, ...] at each sequence's last new token: [S, ...]."""
    last = jnp.maximum(plan.new_tokens - 1, 0)
    return x[jnp.arange(x.shape[0]), last]


def _accept(
    state: _State,
    choice: _Choice,
    drawn: jax.Array,
    *,
    is_new: jax.Array,
    refused: jax.Array,
    column: jax.Array,
) -> _State:
    """Takes the drawn tokens of rows `is_new`, and ends rows that stop or were refused."""
    stops = is_new & (drawn[:, None] == choice.stop_tokens).any(axis=1)
    ended = stops | refused
    cache = state.cache if choice.keep_sequences else release(state.cache, ended)
    old = jax.lax.dynamic_index_in_dim(state.tokens, column, axis=1, keepdims=False)
    tokens = jax.lax.dynamic_update_index_in_dim(
        state.tokens, jnp.where(is_new, drawn, old), column, axis=1
    )
    return dataclasses.replace(
        state,
        tokens=tokens,
        lengths=state.lengths + is_new,
        last=jnp.where(is_new, drawn, state.last),
        is_live=state.is_live & ~ended,
        finished=state.finished | stops,
        refused=state.refused | refused,
        cache=cache,
    )


def _draw(logits: jax.Array, choice: _Choice, index: jax.Array) -> jax.Array:
    """The next token int32[S] of every row, from its logits f32[S, vocab]."""
    if choice.is_greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / choice.temperature
    if choice.is_filtered:
        logits = keep_likeliest(logits, choice.top_k, choice.top_p)
    slots = jnp.arange(logits.shape[0])
    keys = jax.vmap(lambda slot: jax.random.fold_in(jax.random.fold_in(choice.key, slot), index))(
        slots
    )
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Rules out all but the likeliest tokens.

    Args:
      logits: f32[..., vocab], divided by the temperature.
      top_k: int32, how many tokens stay; more than the vocabulary means all.
      top_p: f32, the likeliest tokens that together reach this probability stay, after top_k.

    Returns:
      logits with -inf where a token is ruled out. The likeliest token always stays, and so do ties
      with the last one that does.

    Reference: Holtzman et al., The Curious Case of Neural Text Degeneration (2019),
    https://arxiv.org/abs/1904.09751
    """
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    ordered = jnp.where(rank < top_k, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    stays = (rank < top_k) & ((before < top_p) | (rank == 0))
    last = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= last, logits, -jnp.inf)
