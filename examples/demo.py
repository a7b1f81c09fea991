"""One small language model, five storage formats: the text it writes, and what its cache costs.

SmolLM2-135M-Instruct answers the same prompts with its keys and values in f16, fp8, fp8k_turbo4v,
turbo4 and turbo3. Then a known text is fed through each cache, and the likeliest next token at
every position is compared with the same model's in full precision without a cache.
"""

import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxkv
from jaxkv.generate import generate
from jaxkv.models import load_gguf

FORMATS = ("f16", "fp8", "fp8k_turbo4v", "turbo4", "turbo3")
PROMPTS = (
    "Why is the sky blue?",
    "Write three short tips for someone who wants to learn to cook.",
)
NEW_TOKENS = 64
TEXT = """\
The library stands at the end of the street, behind two old chestnut trees. It was built when the
town was still small, and for many years nobody thought that it would ever be too small for the
people who came to read there. On winter evenings the windows throw a yellow light on the snow, and
those who walk by can see the heads of the readers bent over their books. The librarian knows most
of them by name. She knows who likes stories about the sea, who wants to know how engines work, and
who only comes because it is warm inside. Every book that goes out is written down on a card, and
every card has its place in a long wooden box. When a book comes back, the card is taken out again,
and the book goes back to its shelf. It is a simple system, and it has worked for a hundred years.

Last spring the town council decided to buy a computer. The librarian was not sure that she wanted
one. She said that the cards had never failed her, that they needed no electricity, and that a child
could understand them. But the number of books had grown from four thousand to more than thirty
thousand, and the wooden box had become eleven wooden boxes. Finding one card took longer than
finding the book. So a young man came from the city, put a grey machine on her desk, and showed her
how to search for a title, an author or a subject. After a week she admitted that it was quick.
After a month she asked him whether it could also remember which books people liked best.
"""
CHUNK = 64


def make_cache(model, fmt, slots, tokens):
    columns = -(-tokens // 16)
    config = model.config.cache_config(
        format=fmt,
        num_blocks=slots * columns,
        max_sequences=slots,
        max_blocks_per_sequence=columns,
    )
    return jaxkv.init(config)


def write_answers(model, tokenizer, fmt, prompts):
    """The answers, and decoding speed in tokens a second over all sequences."""
    cache = make_cache(model, fmt, len(prompts), max(map(len, prompts)) + NEW_TOKENS)
    arrivals = []
    result = generate(
        model,
        cache,
        prompts,
        NEW_TOKENS,
        stop_tokens=tokenizer.stop_tokens,
        on_tokens=lambda tokens, counts: arrivals.append((time.perf_counter(), counts.sum())),
    )
    jaxkv.check(result.cache)
    # The first hand-over waited for the compiler.
    seconds = arrivals[-1][0] - arrivals[0][0]
    speed = sum(count for _, count in arrivals[1:]) / seconds
    texts = [tokenizer.decode(row[:length]) for row, length in zip(result.tokens, result.lengths)]
    return texts, speed


@jax.jit
def likeliest(model, hidden):
    return jnp.argmax(model.logits(hidden), axis=-1)


def likeliest_uncached(model, tokens):
    hidden = jax.jit(lambda model, tokens: model.uncached(tokens))(model, tokens[None])
    return np.asarray(likeliest(model, hidden[0]))


def likeliest_cached(model, fmt, tokens):
    """The likeliest next token at every position when the text goes through the cache."""
    cache = make_cache(model, fmt, 1, len(tokens))
    rows = []
    for start in range(0, len(tokens), CHUNK):
        cache, plan = jaxkv.reserve(cache, jnp.full(1, CHUNK), max_new_tokens=CHUNK)
        chunk = tokens[None, start : start + CHUNK]
        hidden, cache = model.hidden_by_layer(chunk, cache, plan)
        rows.append(likeliest(model, hidden[0]))
    jaxkv.check(cache)
    return np.concatenate(rows)


def main():
    console = Console()
    started = time.perf_counter()
    model, tokenizer = load_gguf()
    prompts = [tokenizer.chat(prompt) for prompt in PROMPTS]
    tokens = tokenizer.encode(TEXT)
    tokens = jnp.asarray(tokens[: len(tokens) // CHUNK * CHUNK])
    reference = likeliest_uncached(model, tokens)

    table = Table(title=f"SmolLM2-135M-Instruct on {jax.devices()[0].device_kind}")
    for name in ("format", "bits per\nelement", "KiB per\ntoken", "tokens in\n1 GiB", "tokens/s"):
        table.add_column(name, justify="left" if name == "format" else "right")
    table.add_column(f"top-1 agreement\nover {len(tokens)} tokens", justify="right")
    for fmt in FORMATS:
        texts, speed = write_answers(model, tokenizer, fmt, prompts)
        console.rule(f"[bold]{fmt}", align="left")
        for prompt, text in zip(PROMPTS, texts):
            console.print(f"[dim]{prompt}[/]")
            console.print(textwrap.indent(text.strip(), "  "), highlight=False, markup=False)
        agreement = np.mean(likeliest_cached(model, fmt, tokens) == reference)
        config = model.config.cache_config(format=fmt)
        table.add_row(
            fmt,
            f"{config.bits_per_element:.2f}",
            f"{config.bytes_per_token / 1024:.2f}",
            f"{config.blocks_that_fit(2**30) * config.block_size:,}",
            f"{speed:.1f}",
            f"{agreement:.1%}",
        )
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} seconds, {len(PROMPTS)} sequences at once.")


if __name__ == "__main__":
    main()
