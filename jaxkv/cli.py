"""The `jaxkv` command: generate text, list formats, plan memory, measure speed and quality."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from jaxkv.formats import ALIASES, FORMATS, Format, format_names

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Paged, quantized KV caches for JAX.",
)

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: as in sys.argv[1:], which is also the default.

    Returns:
      The exit status: 0, 1 after a failure, 2 after a wrong argument.
    """
    # typer has no public name for the base class of its usage errors.
    usage_error: Any = typer.BadParameter.__bases__[0].__bases__[0]
    try:
        status = app(None if arguments is None else list(arguments), standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except usage_error as error:
        return _fail(error.format_message(), error.exit_code)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        return _fail(str(error) or type(error).__name__, 1)
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print(f"jaxkv: error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _parsed(parse: Callable[[str], Any], text: str, option: str) -> Any:
    """parse(text), its ValueError made a wrong argument."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "80GiB", "1.5 GB" or "4096".

    Raises:
      ValueError: not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or float(match[1]) <= 0:
        raise ValueError(f"expected a size such as 80GiB, 512MiB or 24GB, got {text!r}")
    return int(float(match[1]) * units[match[2].lower()])


@app.command()
def formats() -> None:
    """List the storage formats: names, bits, what each is for."""
    table = _table("format", "alias", "K bits", "V bits", "mean", "for")
    aliases = {name: alias for alias, name in ALIASES.items()}
    for name in format_names():
        fmt = Format.parse(name)
        summary = FORMATS[name].summary if name in FORMATS else f"keys {fmt.k}, values {fmt.v}"
        bits = (fmt.k.bits_per_element, fmt.v.bits_per_element, fmt.bits_per_element)
        table.add_row(name, aliases.get(name, ""), *(f"{b:g}" for b in bits), summary)
    _say(table)
    _say("Any other pair <format>k_<format>v works too. int8 adds 16 bits per token and head.")


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="A known model, or the path of a Hugging Face config.json.")
    ] = "smollm2-135m",
    memory: Annotated[
        str, typer.Option(help="Memory for the cache alone: 80GiB, 24GB, 512MiB.")
    ] = "1GiB",
    format: Annotated[str | None, typer.Option(help="The format to pick out of the table.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens a sequence; default: the model's most.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    exact_first: Annotated[
        int, typer.Option(min=0, max=4, help="First tokens kept in bf16 too.")
    ] = 0,
    exact_recent: Annotated[
        int, typer.Option(min=0, max=128, help="Newest tokens kept in bf16 too.")
    ] = 0,
) -> None:
    """Say how many blocks, tokens and sequences fit into a memory budget."""
    from jaxkv.models.known import find_geometry

    geometry = _parsed(find_geometry, model, "--model")
    budget = _parsed(parse_bytes, memory, "--memory")
    chosen = None if format is None else str(_parsed(Format.parse, format, "--format"))
    context = geometry.max_positions if context is None else context
    names = dict.fromkeys([*format_names(), *([chosen] if chosen else [])])
    fields = dict(block_size=block_size, exact_first=exact_first, exact_recent=exact_recent)
    configs = {name: geometry.cache_config(format=name, **fields) for name in names}
    _say(
        f"{geometry.name}: {geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of "
        f"{geometry.head_dim}; {memory} of cache, {context:,} tokens a sequence"
    )
    if geometry.window is not None:
        _say(f"Layers with a window of {geometry.window:,} tokens keep all their blocks.")
    if context > geometry.max_positions:
        _say(f"This model was made for at most {geometry.max_positions:,} tokens.")
    table = _table("format", "bits", "KiB/token", "blocks", "tokens", "sequences")
    for name, config in configs.items():
        need = -(-context // block_size) * config.block_bytes_total
        sequences = budget // (need + config.exact_bytes_per_sequence)
        blocks = (budget - sequences * config.exact_bytes_per_sequence) // config.block_bytes_total
        table.add_row(
            name,
            f"{config.bits_per_element:.2f}",
            f"{config.bytes_per_token / 1024:.2f}",
            *(f"{n:,}" for n in (blocks, blocks * block_size, sequences)),
            style="bold green" if name == chosen else None,
        )
    _say(table)


_NUMBERS = {"K bits", "V bits", "mean", "bits", "KiB/token", "blocks", "tokens", "sequences"}
_NUMBERS |= {"bytes/token", "perplexity", "change", "KL", "top-1", "attention error", "found"}
_NUMBERS |= {"attend ms", "x dense f32", "x jax.nn f32", "write µs"}


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    return table


def _say(what: Table | str) -> None:
    # A table keeps its width in a pipe; text is never broken.
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    console.print(what)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    format: Annotated[str, typer.Option(help="Storage format of the cache.")] = "fp8k_turbo4v",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among this many tokens only.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among this much probability only.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF file or Hugging Face directory; default: SmolLM2-135M."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system turn of the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat turns.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
) -> None:
    """Write text with a language model that keeps its context in a paged cache."""
    fmt = _parsed(Format.parse, format, "--format")
    import jax

    import jaxkv
    from jaxkv.generate import Sampler
    from jaxkv.generate import generate as run
    from jaxkv.models import TextStream

    sampler = Sampler(temperature, top_k, top_p)
    notes = Console(stderr=True)
    with _progress(notes) as progress:
        llm, tokenizer = _load(model, _bar(progress, "loading the model"))
        use_chat = tokenizer.has_chat and not raw
        tokens = tokenizer.chat(prompt, system=system) if use_chat else tokenizer.encode(prompt)
        blocks = -(-(len(tokens) + max_new_tokens) // block_size)
        config = llm.config.cache_config(
            format=fmt,
            block_size=block_size,
            num_blocks=blocks,
            max_sequences=1,
            max_blocks_per_sequence=blocks,
        )
        writer = _Writer(progress, TextStream(tokenizer), tokenizer.stop_tokens)
        on_prefill = _bar(progress, "compiling, reading the prompt")
        on_prefill(0, len(tokens))
        result = run(
            llm,
            jaxkv.init(config),
            [tokens],
            max_new_tokens,
            sampler,
            jax.random.key(seed),
            stop_tokens=tokenizer.stop_tokens,
            on_tokens=writer.show,
            on_prefill=on_prefill,
        )
    print(writer.stream.flush())
    count, stored = int(result.lengths[0]), len(tokens) + int(result.lengths[0])
    notes.print(
        f"{count} tokens{writer.speed()}; {fmt} cache, {config.bits_per_element:.2f} bits per "
        f"element: {stored} tokens in {stored * config.bytes_per_token / 1024:.0f} KiB",
        style="dim",
        soft_wrap=True,
    )
    if bool(result.refused[0]):
        notes.print("The text ends early: the cache had no room for more.", style="yellow")
    jaxkv.check(result.cache)


class _Writer:
    """Prints text as it comes and measures its speed."""

    def __init__(self, progress: Progress, stream: Any, stop_tokens: Sequence[int]):
        self.stream = stream
        self._progress = progress
        self._stops = set(stop_tokens)
        self._arrivals: list[tuple[float, int]] = []

    def show(self, tokens: Any, counts: Any) -> None:
        """As generate's on_tokens."""
        self._progress.stop()
        self._arrivals.append((time.perf_counter(), int(counts[0])))
        kept = [int(t) for t in tokens[0, : counts[0]] if int(t) not in self._stops]
        print(self.stream.push(kept), end="", flush=True)

    def speed(self) -> str:
        """Tokens a second after the first hand-over, which had to wait for the compiler."""
        if len(self._arrivals) < 2:
            return ""
        count = sum(n for _, n in self._arrivals[1:])
        return f", {count / (self._arrivals[-1][0] - self._arrivals[0][0]):.1f} tokens/s"


def _bar(progress: Progress, description: str) -> Callable[[int, int], None]:
    """A new progress bar, as a function of (done, in all)."""
    task = progress.add_task(description, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _load(path: Path | None, on_progress: Callable[[int, int], None]) -> tuple[Any, Any]:
    from jaxkv.models import load_gguf, load_hf

    if path is None or path.is_file():
        return load_gguf(path, on_progress=on_progress)
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or directory: {path}")
    model, tokenizer = load_hf(path, on_progress=on_progress)
    if tokenizer is None:
        raise FileNotFoundError(f"no tokenizer.json in {path}")
    return model, tokenizer


@app.command()
def bench(
    formats: Annotated[
        str, typer.Option(help="Formats to measure, separated by commas, or all.")
    ] = "bf16,int8,fp8,nvfp4,turbo4,turbo3,turbo2",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    context: Annotated[int, typer.Option(min=2, help="Tokens that each one holds.")] = 4096,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of the layer.")] = 8,
    q_heads: Annotated[int, typer.Option(min=1, help="Query heads of the layer.")] = 32,
    head_dim: Annotated[int, typer.Option(min=16, help="Elements of a head.")] = 128,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians count.")] = 15,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> None:
    """Measure write, attend and reserve on this device, as ratios within one run."""
    import jax

    from jaxkv import bench as measure

    names = list(FORMATS) if formats == "all" else formats.split(",")
    names = [str(_parsed(Format.parse, name, "--formats")) for name in names]
    shape = measure.Shape(batch, context, kv_heads, q_heads, head_dim, block_size)
    with _progress(Console(stderr=True)) as progress:

        def run(title: str, cases: Any) -> dict[str, float]:
            return measure.interleave(
                list(cases), rounds=rounds, progress=_bar(progress, f"timing {title}")
            )

        attend = run("attend", measure.attention_cases(shape, names))
        write = run("write", measure.write_cases(shape, names))
        reserve = run("reserve", measure.reserve_cases(num_sequences=max(batch, 2)))
    device = jax.devices()[0]
    _say(
        f"{device.device_kind}, jax {jax.__version__}: one layer, {batch} x {context:,} tokens, "
        f"{kv_heads} KV and {q_heads} query heads of {head_dim}, blocks of {block_size}"
    )
    table = _table("format", "bits", "attend ms", "x dense f32", "x jax.nn f32", "write µs")
    for name, seconds in attend.items():
        stored = name in names
        table.add_row(
            name,
            f"{shape.config(name).bits_per_element:.2f}" if stored else "32.00",
            f"{seconds * 1e3:.3f}",
            f"{seconds / attend[measure.DENSE]:.2f}",
            f"{seconds / attend[measure.LIBRARY]:.2f}",
            f"{write[f'{name} x1'] * 1e6:.1f}" if stored else "",
        )
    _say(table)
    for name, seconds in reserve.items():
        _say(f"{name}: {seconds * 1e6:,.0f} µs a step, {max(batch, 2)} sequences, 2^20 blocks")
    if plot is not None:
        _plot_bench({name: attend[name] / attend[measure.DENSE] for name in names}, shape, plot)


def _plot_bench(ratios: dict[str, float], shape: Any, path: Path) -> None:
    """Attention time against stored bits, as ratio to dense f32."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, ratio in ratios.items():
        bits = shape.config(name).bits_per_element
        axes.plot(bits, ratio, "o")
        axes.annotate(name, (bits, ratio), textcoords="offset points", xytext=(6, 4))
    axes.axhline(1, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel("stored bits per element")
    axes.set_ylabel("attention time / dense f32")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


_EVAL_FORMATS = "bf16,int8,fp8,turbo8,fp8k_turbo4v,turbo4,nvfp4,turbo3,turbo2"
# The beginning of every text is for calibration.
_CALIBRATION_TOKENS = 4096


@app.command("eval")
def evaluate(
    formats: Annotated[
        str,
        typer.Option(
            help="What to measure, separated by commas, or all. Options follow a format after plus "
            "signs: turbo4+centered+first1+recent64; also reference, scaled, boundary2."
        ),
    ] = _EVAL_FORMATS,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text file; repeat for several. Default: CPython's reference manual."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = 4,
    window_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    retrieval: Annotated[
        bool, typer.Option("--retrieval", help="Ask for a fact hidden at several depths instead.")
    ] = False,
    context: Annotated[int, typer.Option(min=64, help="Tokens of a hiding place.")] = 4096,
    model: Annotated[
        Path | None,
        typer.Option(help="A GGUF file or Hugging Face directory; default: SmolLM2-135M."),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Directory where results are kept and found again.")
    ] = Path("jaxkv-eval"),
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG file.")] = None,
) -> None:
    """Measure what formats cost in quality, through the cache, on a language model."""
    from jaxkv import evaluate as measure

    names = format_names() if formats == "all" else formats.split(",")
    cases = [_parsed(measure.Case.parse, name, "--formats") for name in names]
    with _progress(Console(stderr=True)) as progress:
        llm, tokenizer = _load(model, _bar(progress, "loading the model"))
        texts = {name: tokenizer.encode(_read_text(name)) for name in text or ["python"]}
        calibration = [t for tokens in texts.values() for t in tokens[:_CALIBRATION_TOKENS]]
        options: Any = {
            "calibration_tokens": calibration,
            "directory": results,
            "on_reference": _bar(progress, "full precision"),
        }
        if retrieval:
            needles = measure.Needles.hide(
                tokenizer.encode, next(iter(texts.values()))[_CALIBRATION_TOKENS:], context
            )
            evaluation = measure.Evaluation(llm, needles.windows, batch=1, **options)
            found = [
                evaluation.recall(case, needles.answer_tokens, _bar(progress, str(case)))
                for case in ["f32", *cases]
            ]
        else:
            rows = [
                _windows(name, tokens, windows, window_tokens) for name, tokens in texts.items()
            ]
            evaluation = measure.Evaluation(llm, [row for part in rows for row in part], **options)
            measured = [evaluation.measure(case, _bar(progress, str(case))) for case in cases]
    if retrieval:
        _say_recall(found, needles, context)
        return
    _say(
        f"{len(rows) * windows} windows of {window_tokens:,} tokens of {', '.join(texts)}; full "
        f"precision has perplexity {measured[0].reference_perplexity:.3f}"
    )
    _say_quality(measured)
    if plot is not None:
        _plot_quality(measured, plot)


def _read_text(name: str) -> str:
    from jaxkv.evaluate import python_text

    return python_text() if name == "python" else Path(name).read_text(encoding="utf-8")


def _windows(name: str, tokens: Sequence[int], count: int, length: int) -> list[Sequence[int]]:
    needed = _CALIBRATION_TOKENS + count * length
    if len(tokens) < needed:
        raise ValueError(
            f"text {name}: {len(tokens):,} tokens, expected at least {needed:,}: "
            f"{_CALIBRATION_TOKENS:,} for calibration, {count} windows of {length:,}"
        )
    return [tokens[i : i + length] for i in range(_CALIBRATION_TOKENS, needed, length)]


def _say_quality(results: Sequence[Any]) -> None:
    table = _table(
        "format", "bits", "bytes/token", "perplexity", "change", "KL", "top-1", "attention error"
    )
    for r in results:
        error = "" if r.attention_error is None else f"{r.attention_error:.4f}"
        table.add_row(
            r.case,
            f"{r.bits:.2f}",
            f"{r.bytes_per_token:,.0f}",
            f"{r.perplexity:.3f}",
            f"{r.loss_of_perplexity:+.2%}",
            f"{r.kl:.5f}",
            f"{r.agreement:.4f}",
            error,
        )
    _say(table)


def _say_recall(results: Sequence[Any], needles: Any, context: int) -> None:
    _say(f"A five-digit code in {context:,} tokens: found or not, and log-probability, by depth")
    table = _table("format", *(f"{depth:.0%}" for depth in needles.depths), "found")
    for r in results:
        marks = [f"{'yes' if ok else 'no':3} {p:6.2f}" for ok, p in zip(r.found, r.log_probability)]
        table.add_row(r.case, *marks, f"{sum(r.found)} of {len(r.found)}")
    _say(table)


def _plot_quality(results: Sequence[Any], path: Path) -> None:
    """Divergence from full precision against stored bits."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for r in results:
        axes.plot(r.bits, max(r.kl, 1e-7), "o")
        axes.annotate(r.case, (r.bits, r.kl), textcoords="offset points", xytext=(6, 4))
    axes.set_yscale("log")
    axes.set_xlabel("stored bits per element")
    axes.set_ylabel("KL divergence from full precision, nats a token")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
