"""A batch of prompts of different lengths, sampled, streamed, from one 4-bit cache."""

import jax

import jaxkv
from jaxkv.generate import Sampler, generate
from jaxkv.models import load_gguf

PROMPTS = ("Name one planet.", "Explain in one sentence what a cache is for.")


def main():
    model, tokenizer = load_gguf()
    config = model.config.cache_config(
        format="turbo4", num_blocks=32, max_sequences=len(PROMPTS), max_blocks_per_sequence=16
    )
    result = generate(
        model,
        jaxkv.init(config),
        [tokenizer.chat(prompt) for prompt in PROMPTS],
        max_new_tokens=48,
        sampler=Sampler(temperature=0.7, top_p=0.9),
        key=jax.random.key(0),
        stop_tokens=tokenizer.stop_tokens,
        on_tokens=lambda tokens, counts: print("new tokens of each sequence:", counts),
    )
    for prompt, tokens, length in zip(PROMPTS, result.tokens, result.lengths):
        print(f"{prompt}\n  {tokenizer.decode(tokens[:length])}")
    jaxkv.check(result.cache)


if __name__ == "__main__":
    main()
