"""`Scheduler`: requests that come and go share one cache and one compiled step.

Continuous batching (Yu et al., "Orca", 2022) with chunked prefill (Agrawal et al., "Sarathi", 2023)
over the public verbs alone. A step is packed: each decoding sequence has one token in it, and what
is left is filled with whole chunks of prompts. The host predicts every length and every free block,
sends a step off, and only then reads what the step before it drew and granted, so that the device
need not wait for the host nor the host for the device.

A prompt is cut at multiples of the chunk, whatever else runs, and all steps are one program, so
what a request is answered does not depend on its company: the tokens are those it gets alone.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import online
from jaxkv._packed_step import Report, Work, packed_step
from jaxkv.cache import PagedCache, release, trim
from jaxkv.faults import CacheError
from jaxkv.prefix import PrefixCache
from jaxkv.sequences import Refusal
from jaxkv.store import BlockStore
from jaxkv.swap import swap_in, swap_out


@dataclasses.dataclass
class SchedulerStatistics:
    """What a scheduler has done.

    Attributes:
      steps: compiled steps sent off.
      tokens: tokens emitted.
      tokens_computed: tokens fed through the model, prompts included.
      tokens_reused: prompt tokens that a prefix cache spared.
      swaps: preemptions whose blocks went to the store.
      recomputes: preemptions whose blocks were dropped.
      tokens_recomputed: tokens fed once more after those.
      flips: recomputed places where another token became the likeliest; the emitted one stays.
      largest_flip: by how much its logit, at most, then exceeded that of the emitted token.
      rounding: largest difference between the logit of an emitted token and its recomputation.
      near_ties: tokens emitted after a recompute whose two largest logits were within twice the
        `rounding` seen so far: the only places where the output may differ from the one without.
      mispredictions: steps that found other free blocks than the host had predicted, or skipped a
        request; only those who change the cache from outside bring them about.
    """

    steps: int = 0
    tokens: int = 0
    tokens_computed: int = 0
    tokens_reused: int = 0
    swaps: int = 0
    recomputes: int = 0
    tokens_recomputed: int = 0
    flips: int = 0
    largest_flip: float = 0.0
    rounding: float = 0.0
    near_ties: int = 0
    mispredictions: int = 0


@dataclasses.dataclass(frozen=True)
class Emitted:
    """A token that a step has brought to light.

    Attributes:
      request: the number that `submit` returned.
      token: its id.
      is_last: whether the request has ended with it.
    """

    request: int
    token: int
    is_last: bool


@dataclasses.dataclass(eq=False)
class _Request:
    """One request. `length` and `issued` are predictions, ahead of what has been read.

    Attributes:
      id: its number; lower ones came first and go first.
      prompt: its tokens.
      most: how many tokens it may be answered.
      stops: tokens that end it.
      known: answer tokens that have been read.
      logits: the logit of each of them.
      issued: answer tokens that steps sent off will have drawn.
      slot: where it runs, or None.
      length: tokens it has in the cache, or in the store.
      feed_to: tokens that are fed in chunks, before decoding begins or goes on.
      shared: blocks of it that the prefix cache holds too.
      offered: full blocks of its prompt that the prefix cache has been shown.
      is_swapped: whether it is in the store.
      was_recomputed: whether its blocks were ever dropped.
      is_done: whether it has ended.
      is_off: whether the device skipped it, so that its predictions are void.
    """

    id: int
    prompt: list[int]
    most: int
    stops: frozenset[int]
    known: list[int] = dataclasses.field(default_factory=list)
    logits: list[float] = dataclasses.field(default_factory=list)
    issued: int = 0
    slot: int | None = None
    length: int = 0
    feed_to: int = 0
    shared: int = 0
    offered: int = 0
    is_swapped: bool = False
    was_recomputed: bool = False
    is_done: bool = False
    is_off: bool = False

    @property
    def tokens(self) -> list[int]:
        """All tokens of it that the host knows."""
        return self.prompt + self.known

    @property
    def is_fed(self) -> bool:
        """Whether it decodes."""
        return self.length >= self.feed_to


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """One request's part of a step: its slot, and whether the drawn token is new."""

    request: _Request
    slot: int
    emits: bool


@dataclasses.dataclass
class _InFlight:
    """A step whose report has not been read, and the free blocks predicted after it."""

    report: Report
    assignments: list[_Assignment]
    num_free: int


class Scheduler:
    """Runs requests over one cache, first come, first served. Lives on the host.

    The oldest request always goes on: when blocks run out, blocks of the prefix cache that nobody
    else holds go first, then the youngest request is preempted and comes back in its old place of
    the queue. So nothing starves. Decoding is greedy.

    Attributes:
      cache: the newest cache; it belongs to the scheduler, which donates it to the next step.
      statistics: counters.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        *,
        chunk: int = 32,
        tokens_per_step: int | None = None,
        prefix: PrefixCache | None = None,
        store: BlockStore | None = None,
    ):
        """A scheduler without requests.

        Args:
          model: as for `jaxkv.generate.generate`, able to run packed steps.
          cache: donated. Slots in use stay as they are and are not given to requests.
          chunk: most tokens of one prompt in a step, a multiple of the block size.
          tokens_per_step: tokens of a step; by default a chunk and one more for each other slot,
            rounded up to a multiple of 8. More lets several prompts advance at once.
          prefix: shares blocks between prompts that begin alike; it must follow `cache`. With exact
            tokens, those attached are read from their pages: an answer may then differ from that
            of the request alone.
          store: a `BlockStore` for preempted requests; without one, or when it is full, they are
            computed again.

        Raises:
          ValueError: a chunk or tokens_per_step that cannot work, or a config that moves or drops
            blocks of long sequences.
          CacheError: online calibration has not frozen the scales of `cache` yet: until then what
            is stored depends on who came first.
        """
        config = cache.config
        for name in ("window", "resident_blocks_per_sequence"):
            if (value := getattr(config, name)) is not None:
                raise ValueError(
                    f"cache: its config has {name} = {value}, expected None: the scheduler counts "
                    "on blocks that stay where they are"
                )
        if chunk < 1 or chunk % config.block_size:
            raise ValueError(
                f"chunk: got {chunk}, expected a multiple of the block size {config.block_size}"
            )
        if config.exact_recent and chunk > config.max_step_tokens:
            raise ValueError(
                f"chunk: got {chunk}, expected at most max_step_tokens = {config.max_step_tokens}, "
                "which exact_recent allows a sequence in a step"
            )
        online.require_frozen(cache, "Scheduler")
        least = config.max_sequences - 1 + chunk
        total = -(-least // 8) * 8 if tokens_per_step is None else tokens_per_step
        if total < least:
            raise ValueError(
                f"tokens_per_step: got {total}, expected at least {least}: a chunk, and one for "
                "each other slot"
            )
        self.cache = cache
        self.statistics = SchedulerStatistics()
        self._model, self._prefix, self._store = model, prefix, store
        self._chunk, self._total = chunk, total
        lengths = np.asarray(cache.lengths)
        self._empty_slots = [s for s in range(config.max_sequences) if lengths[s] == 0]
        self._free = int(cache.num_free_blocks)
        self._last = jnp.zeros(config.max_sequences, jnp.int32)
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._emitted: list[Emitted] = []
        self._is_stalled = False
        self._is_off = False

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 128,
        *,
        stop_tokens: Iterable[int] = (),
    ) -> int:
        """Adds a request to the end of the queue.

        Args:
          prompt: token ids, at least one.
          max_new_tokens: most tokens to answer.
          stop_tokens: ids that end it; the one that does is part of the answer.

        Returns:
          The request's number.

        Raises:
          ValueError: nothing to do, or more than the cache can ever hold.
        """
        prompt = [int(token) for token in prompt]
        if not prompt or min(prompt) < 0:
            raise ValueError("prompt: expected at least one token id, none negative")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
        config = self.cache.config
        # The last token drawn is never stored.
        tokens = len(prompt) + max_new_tokens - 1
        columns = min(config.max_blocks_per_sequence, config.num_blocks)
        if tokens > columns * config.block_size:
            raise ValueError(
                f"prompt, max_new_tokens: {len(prompt)} and {max_new_tokens} make {tokens} tokens "
                f"to store, a sequence can have {columns * config.block_size}"
            )
        number = next(self._numbers)
        request = _Request(
            number, prompt, max_new_tokens, frozenset(stop_tokens), feed_to=len(prompt)
        )
        self._requests[number] = request
        self._waiting.append(request)
        return number

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and been read."""
        return not (self._waiting or self._running or self._in_flight or self._emitted)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks, the preempted ones included."""
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks after all that was sent off, as the host predicts them."""
        return self._free

    def answer(self, request: int) -> list[int]:
        """The tokens of a request so far.

        Raises:
          ValueError: no such request, or one that was popped.
        """
        return list(self._get(request).known)

    def pop(self, request: int) -> list[int]:
        """The tokens of a request that has ended; the scheduler forgets it.

        Raises:
          ValueError: no such request, or one that has not ended.
        """
        if not self._get(request).is_done:
            raise ValueError(f"request: {request} has not ended; cancel it first")
        return self._requests.pop(request).known

    def _get(self, request: int) -> _Request:
        if request not in self._requests:
            raise ValueError(f"request: got {request}, which was never submitted or was popped")
        return self._requests[request]

    def run(self) -> dict[int, list[int]]:
        """Steps until all is done; returns the answer of every request that was not popped."""
        while not self.is_idle:
            self.step()
        return {number: request.known for number, request in self._requests.items()}

    def step(self) -> list[Emitted]:
        """Sends one step off, and returns what earlier ones have brought to light.

        Waits for the device only where a verb on the host must read the cache: when a request is
        attached to or inserted into the prefix cache, when blocks are evicted, swapped or
        preempted, and when there is nothing left to send off.

        Returns:
          The tokens read, in the order in which requests came.

        Raises:
          CacheError: what others hold of the cache leaves too few blocks for a request alone, or
            the cache refuses one whatever is free.
        """
        if self._is_off:
            self.statistics.mispredictions += 1
            self.resynchronize()
        self._admit()
        work, assignments = self._plan()
        if assignments:
            self._dispatch(work, assignments)
        while len(self._in_flight) > bool(assignments):
            self._read(self._in_flight.popleft())
        emitted, self._emitted = self._emitted, []
        return sorted(emitted, key=lambda e: e.request)

    def cancel(self, request: int) -> None:
        """Ends a request; its blocks are free for the next step.

        Raises:
          ValueError: no such request, or one that was popped.
        """
        gone = self._get(request)
        if gone.is_done:
            return
        gone.is_done = True
        if gone.is_swapped:
            assert self._store is not None
            self._store.delete(_key(gone))
        if gone in self._waiting:
            self._waiting.remove(gone)
        if gone.slot is not None:
            self._vacate(gone)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.cache.config.block_size)

    def _private(self, request: _Request) -> int:
        """Blocks that become free when the request leaves its slot."""
        return self._blocks(request.length) - request.shared

    def _admit(self) -> None:
        """Gives slots and blocks to those who wait, in their order."""
        if not self._waiting or not self._empty_slots:
            return
        for request in self._running:
            self._insert(request)
        while self._waiting and self._empty_slots and not self._is_stalled:
            request = self._waiting[0]
            if self._is_being_computed(request):
                return
            if not self._try_admit(request, self._empty_slots[0]):
                # Nothing changes until someone leaves.
                self._is_stalled = True
                return
            self._waiting.pop(0)
            bisect.insort(self._running, request, key=lambda r: r.id)

    def _is_being_computed(self, request: _Request) -> bool:
        """Whether a running request is about to compute a chunk of this one's prompt."""
        if self._prefix is None or request.is_swapped:
            return False
        matched = self._whole_chunks(self._prefix.match(request.prompt))
        for other in self._running:
            common = _common_length(request.prompt, other.prompt)
            usable = self._whole_chunks(min(common, len(request.prompt) - 1))
            if max(matched, other.length) < usable:
                return True
        return False

    def _whole_chunks(self, tokens: int) -> int:
        return tokens // self._chunk * self._chunk

    def _try_admit(self, request: _Request, slot: int) -> bool:
        tokens = request.length if request.is_swapped else request.feed_to
        # With the token after, lest it come only to be preempted.
        tokens = min(tokens + 1, len(request.prompt) + request.most - 1)
        # Those who run may need a block each soon, and more for what is left of their prompts.
        spoken_for = len(self._running) + sum(
            self._blocks(r.feed_to) - self._blocks(r.length) for r in self._running if not r.is_fed
        )
        matched = 0
        if self._prefix is not None and not request.is_swapped:
            matched = self._attach(request, slot)
        need = self._blocks(tokens) - self._blocks(matched)
        if not self._make_room(need + spoken_for):
            self._release(slot)
            if not self._running:
                raise CacheError(
                    f"request {request.id}: needs {need} blocks and {self._free} are free, with "
                    "nobody left to preempt: others hold the rest of this cache"
                )
            return False
        if request.is_swapped:
            assert self._store is not None
            self.cache = swap_in(self.cache, slot, self._store, key=_key(request))
            request.is_swapped, request.shared = False, 0
            self._free -= self._private(request)
        else:
            request.length = matched
            request.shared = request.offered = self._blocks(matched)
            self.statistics.tokens_reused += matched
        request.slot = slot
        self._empty_slots.remove(slot)
        return True

    def _attach(self, request: _Request, slot: int) -> int:
        """Takes known blocks, as far as they end where a chunk does; returns how many tokens."""
        assert self._prefix is not None
        if self._whole_chunks(self._prefix.match(request.prompt)) == 0:
            return 0
        self.cache, matched = self._prefix.attach(self.cache, slot, request.prompt)
        whole = self._whole_chunks(matched)
        if whole < matched:
            lengths = np.full(self.cache.config.max_sequences, -1, np.int32)
            lengths[slot] = whole
            self.cache = trim(self.cache, lengths)
        return whole

    def _insert(self, request: _Request) -> None:
        """Hands the full blocks of what is computed of a prompt to the prefix cache."""
        if self._prefix is None or request.slot is None or request.is_off:
            return
        tokens = min(request.length, len(request.prompt))
        full = tokens // self.cache.config.block_size
        if full <= request.offered or not online.is_frozen(self.cache):
            return
        request.offered = full
        before = len(self._prefix)
        prompt = request.prompt[: full * self.cache.config.block_size]
        self.cache = self._prefix.insert(self.cache, request.slot, prompt)
        request.shared += len(self._prefix) - before

    def _make_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, after evicting from the prefix cache if need be."""
        if self._free < num_blocks and self._prefix is not None and len(self._prefix):
            before = dataclasses.replace(self._prefix.statistics)
            # A few more, as each eviction waits for the device.
            wanted = num_blocks + 2 * len(self._running)
            self.cache = self._prefix.make_room(self.cache, wanted)
            self._free += self._prefix.statistics.evictions - before.evictions
            if self._prefix.statistics.forgotten > before.forgotten:
                for request in self._running:
                    assert request.slot is not None
                    request.shared = self._prefix.shared_blocks(self.cache, request.slot)
        return self._free >= num_blocks

    def _plan(self) -> tuple[Work, list[_Assignment]]:
        """What the next step does, oldest request first; may preempt the youngest."""
        work = Work.empty(self.cache.config.max_sequences, self._chunk)
        assignments: list[_Assignment] = []
        budget = self._total - sum(r.is_fed for r in self._running)
        for request in list(self._running):
            if request.slot is None or request.issued == request.most:
                continue
            count = self._next_count(request)
            if not request.is_fed and count > budget:
                continue
            if not self._secure(request, count):
                continue
            budget -= 0 if request.is_fed else count
            assignments.append(self._assign(work, request, count))
        return work, [a for a in assignments if not a.request.is_done and not a.request.is_off]

    def _next_count(self, request: _Request) -> int:
        """Tokens of a request's next part: to the next multiple of the chunk, or one."""
        if request.is_fed:
            return 1
        end = len(request.prompt)
        if request.length >= end:
            end = request.feed_to
        return min(self._whole_chunks(request.length) + self._chunk, end) - request.length

    def _secure(self, request: _Request, count: int) -> bool:
        """Finds the blocks that a part needs; False if the request left its slot instead."""
        need = self._blocks(request.length + count) - self._blocks(request.length)
        while not self._make_room(need):
            if self._running == [request]:
                raise CacheError(
                    f"request {request.id}: needs {need} more blocks and {self._free} are free, "
                    "with nobody left to preempt: others hold the rest of this cache"
                )
            self._preempt(self._running[-1])
            if request.slot is None or request.is_off:
                return False
        self._free -= need
        return True

    def _assign(self, work: Work, request: _Request, count: int) -> _Assignment:
        """Enters a part into the step's work, and moves the request's predictions on."""
        slot, start = request.slot, request.length
        assert slot is not None
        known = request.tokens[start : start + count]
        work.counts[slot], work.starts[slot] = count, start
        work.tokens[slot, : len(known)] = known
        # One past the host's knowledge is what the slot drew last.
        work.is_drawn[slot] = not known
        if not request.is_fed:
            self._expect(work, request, count)
        request.length += count
        emits = request.is_fed
        request.issued += emits
        self.statistics.tokens_computed += count
        return _Assignment(request, slot, emits)

    def _expect(self, work: Work, request: _Request, count: int) -> None:
        """Enters the tokens that were drawn at these places before the request was dropped."""
        end = len(request.prompt)
        for column in range(count):
            # What comes right after the prompt is computed as it was: nothing to compare.
            index = request.length + column + 1 - end
            if 0 < index < len(request.known):
                work.expected[request.slot, column] = request.known[index]
                work.logits[request.slot, column] = request.logits[index]

    def _dispatch(self, work: Work, assignments: list[_Assignment]) -> None:
        self.cache, self._last, report = packed_step(
            self._model,
            self.cache,
            self._last,
            work,
            chunk=self._chunk,
            total_tokens=self._total,
        )
        self.statistics.steps += 1
        self._in_flight.append(_InFlight(report, assignments, self._free))
        for request in [a.request for a in assignments]:
            # Its last token is on the way; the slot is free for the step after this one.
            if request.issued == request.most and request.slot is not None:
                self._vacate(request)

    def _vacate(self, request: _Request) -> None:
        """Empties a request's slot; what it has of its prompt goes to the prefix cache first."""
        assert request.slot is not None
        if not request.is_off:
            self._insert(request)
        self._free += self._private(request)
        self._release(request.slot)
        self._empty_slots.append(request.slot)
        self._empty_slots.sort()
        self._running.remove(request)
        request.slot, request.length, request.shared, request.offered = None, 0, 0, 0
        self._is_stalled = False

    def _release(self, slot: int) -> None:
        self.cache = release(self.cache, np.arange(self.cache.config.max_sequences) == slot)

    def _preempt(self, request: _Request) -> None:
        """Takes a request off the device; it keeps its place among those who wait."""
        self._drain()
        if request.slot is None:
            return
        if request.is_off:
            request.length = int(self.cache.lengths[request.slot])
            request.is_off = False
        request.issued = len(request.known)
        length = request.length
        if length > 0 and self._swap_out(request):
            self.statistics.swaps += 1
            self._vacate(request)
            request.length, request.is_swapped = length, True
        else:
            self._vacate(request)
            self._forget(request, length)
        bisect.insort(self._waiting, request, key=lambda r: r.id)

    def _swap_out(self, request: _Request) -> bool:
        if self._store is None:
            return False
        assert request.slot is not None
        self._insert(request)
        try:
            self.cache = swap_out(self.cache, request.slot, self._store, key=_key(request))
        except CacheError:
            return False
        return True

    def _forget(self, request: _Request, length: int) -> None:
        """Makes a request start again, and feed what it has been answered too."""
        request.feed_to = len(request.prompt) + len(request.known)
        request.was_recomputed |= bool(request.known)
        if length > 0:
            self.statistics.recomputes += 1
            self.statistics.tokens_recomputed += length

    def _drain(self) -> None:
        """Reads every report, waiting for the device."""
        while self._in_flight:
            self._read(self._in_flight.popleft())

    def _read(self, step: _InFlight) -> None:
        report = jax.device_get(step.report)
        self._is_off |= int(report.num_free) != step.num_free
        error: CacheError | None = None
        for assignment in step.assignments:
            request, slot = assignment.request, assignment.slot
            if request.is_done or request.is_off:
                continue
            if not report.is_done[slot]:
                request.is_off = self._is_off = True
                if (refusal := Refusal(int(report.refusal[slot]))) > Refusal.EXHAUSTED:
                    # What the others got is read all the same.
                    error = error or CacheError(
                        f"request {request.id}: the cache refuses it for good: "
                        f"{refusal.name.lower().replace('_', ' ')}; cancel it, or use a config "
                        "that lets a sequence take a chunk and grow to its full length"
                    )
            elif assignment.emits:
                self._emit(request, report, slot)
        s = self.statistics
        s.flips += int(report.flips)
        s.largest_flip = max(s.largest_flip, float(report.largest_flip))
        s.rounding = max(s.rounding, float(report.rounding))
        if error is not None:
            raise error

    def _emit(self, request: _Request, report: Report, slot: int) -> None:
        token = int(report.tokens[slot])
        request.known.append(token)
        request.logits.append(float(report.logits[slot]))
        is_last = token in request.stops or len(request.known) == request.most
        self._emitted.append(Emitted(request.id, token, is_last))
        self.statistics.tokens += 1
        if request.was_recomputed:
            self.statistics.near_ties += float(report.gaps[slot]) <= 2 * self.statistics.rounding
        if is_last:
            request.is_done = True
            if request.slot is not None:
                self._vacate(request)

    def resynchronize(self) -> None:
        """Takes lengths and free blocks from the device; call it after changing `cache` yourself.

        Steps do it by themselves where predictions have failed.
        """
        self._drain()
        lengths = np.asarray(self.cache.lengths)
        self._free = int(self.cache.num_free_blocks)
        for request in self._requests.values():
            if request.is_done or not request.is_off:
                continue
            request.is_off = False
            request.issued = len(request.known)
            if request.slot is not None:
                request.length = int(lengths[request.slot])
            else:
                self._forget(request, request.length)
                bisect.insort(self._waiting, request, key=lambda r: r.id)
        self._is_off = False
        self._is_stalled = False


def _key(request: _Request) -> str:
    return f"request-{request.id}"


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two prompts have in common at their beginning."""
    for i, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return i
    return min(len(left), len(right))
