"""Requests arrive while others run: one cache, one compiled step, blocks too few for all.

Chats share a system prompt, whose blocks are computed once. Arrivals are spread over the run, and
the pool is kept so small that the youngest must leave the device now and then. At the end each
answer is compared with what the same request is told when it is alone.
"""

import time

import jax
import numpy as np

import jaxkv
from jaxkv.models import load_gguf

SYSTEM = (
    "You are a helpful assistant. You answer in one short sentence, in plain words, without lists. "
    "When you are not sure of something you say so, and you never make up a name or a number."
)
QUESTIONS = (
    "Why is the sky blue?",
    "What is a cache for?",
    "Name one planet.",
    "How do birds find their way?",
    "Why do leaves turn red?",
    "What does salt do to ice?",
)
STEPS_BETWEEN_ARRIVALS = 3
NEW_TOKENS = 24


def make_scheduler(model, config):
    return jaxkv.Scheduler(
        model,
        jaxkv.init(config),
        chunk=32,
        prefix=jaxkv.PrefixCache(config),
        store=jaxkv.BlockStore(None, max_bytes=2**28),
    )


def serve(scheduler, prompts, stop_tokens, on_arrival=lambda number: None):
    """Submits a prompt every few steps; returns the answers and the tokens per second."""
    started, steps = time.perf_counter(), 0
    waiting = list(prompts)
    while waiting or not scheduler.is_idle:
        if waiting and steps % STEPS_BETWEEN_ARRIVALS == 0:
            number = scheduler.submit(waiting.pop(0), NEW_TOKENS, stop_tokens=stop_tokens)
            on_arrival(number)
        scheduler.step()
        steps += 1
    seconds = time.perf_counter() - started
    answers = [scheduler.answer(number) for number in range(len(prompts))]
    return answers, sum(map(len, answers)) / seconds


def main():
    model, tokenizer = load_gguf()
    prompts = [tokenizer.chat(question, system=SYSTEM) for question in QUESTIONS]
    # Two conversations fit, and a part of a third.
    config = model.config.cache_config(
        format="fp8k_turbo4v", num_blocks=12, max_sequences=4, max_blocks_per_sequence=8
    )
    started = time.perf_counter()
    scheduler = make_scheduler(model, config)
    scheduler.submit([1], 1)
    scheduler.run()
    print(f"compiled the step in {time.perf_counter() - started:.1f} s")

    scheduler = make_scheduler(model, config)
    middle = []

    def on_arrival(number):
        print(f"request {number} arrives, {scheduler.num_running} run: {QUESTIONS[number]}")
        if number == len(QUESTIONS) // 2:
            middle.append(str(jaxkv.render(scheduler.cache)))

    answers, speed = serve(scheduler, prompts, tokenizer.stop_tokens, on_arrival)
    print(f"\nthe pool when request {len(QUESTIONS) // 2} arrived\n{middle[0]}\n")
    for question, answer in zip(QUESTIONS, answers):
        print(f"{question}\n  {tokenizer.decode(answer).strip()}")
    s = scheduler.statistics
    print(
        f"\n{s.tokens} tokens in {s.steps} steps, {speed:.1f} tokens/s on "
        f"{jax.devices()[0].device_kind}; {s.tokens_reused} prompt tokens reused, {s.swaps} swaps, "
        f"{s.recomputes} recomputes, {s.flips + s.near_ties} tokens that rounding could flip"
    )
    jaxkv.check(scheduler.cache)

    same = 0
    for prompt, answer in zip(prompts[:2], answers):
        alone = make_scheduler(model, config)
        alone.submit(prompt, NEW_TOKENS, stop_tokens=tokenizer.stop_tokens)
        same += alone.run()[0] == answer
    print(f"alone, the first 2 requests get the same tokens: {same} of 2")
    assert np.asarray(scheduler.cache.lengths).sum() == 0


if __name__ == "__main__":
    main()
