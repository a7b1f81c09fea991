"""How much quality a format costs, measured on a language model through the cache itself.

Windows of text run through the model twice: in full precision without a cache, and in chunks
through `reserve`, `write` and `attend` with the format under test. What is compared are the
logits of every token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._forward import feed
from jaxkv.cache import attend, check, init, report, reserve, write
from jaxkv.calibration import Calibration, calibrate
from jaxkv.config import CacheConfig, boundary_formats
from jaxkv.formats import Encoding, Format

Progress = Callable[[int, int], None]

# Tokens whose logits are in memory at a time, and tokens that attention alone is compared on.
_LOGIT_ROWS = 256
_ATTENTION_TOKENS = 512
# Calibration batches, in tokens.
_CALIBRATION_BATCH = 1024
_BLOCK_SIZE = 16
_PYTHON_TOPICS = (
    *("execmodel", "exceptions", "objects", "types", "specialnames", "import", "naming"),
    *("context-managers", "function", "class", "assignment", "compound"),
)


def python_text() -> str:
    """Text that every machine has: a dozen topics of CPython's own reference manual.

    About 54 thousand tokens of a small vocabulary. It varies a little with the Python version, so
    compare results within one.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in _PYTHON_TOPICS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A format and the options that decide its quality.

    Attributes:
      format: what keys and values are stored in.
      encoding: "searched" or "reference".
      calibration: "none", "scaled" (fp8 scales) or "centered" (fp8 scales and key means).
      exact_first: first tokens of a sequence that attention reads in 16 bits.
      exact_recent: newest tokens that it reads in 16 bits.
      boundary: layers at each end that stay in bf16.
    """

    format: Format
    encoding: Encoding = "searched"
    calibration: Literal["none", "scaled", "centered"] = "none"
    exact_first: int = 0
    exact_recent: int = 0
    boundary: int = 0

    @classmethod
    def parse(cls, text: str | Case) -> Case:
        """Reads "turbo4", "turbo4+centered+first1+recent64" and the like.

        Args:
          text: a format, then any of reference, scaled, centered, first<n>, recent<n>,
            boundary<n>, each after a plus sign.

        Raises:
          ValueError: an unknown format or option, or an option given twice.
        """
        if isinstance(text, Case):
            return text
        name, *options = text.split("+")
        fields: dict[str, Any] = {}
        for option in options:
            match = re.fullmatch(r"(first|recent|boundary)(\d+)", option)
            value: Any = option
            if match:
                field, value = _COUNTED[match[1]], int(match[2])
            elif option in _NAMED:
                field = _NAMED[option]
            else:
                raise ValueError(
                    f"case {text!r}: unknown option {option!r}, expected reference, scaled, "
                    "centered, first<n>, recent<n> or boundary<n>"
                )
            if field in fields:
                raise ValueError(f"case {text!r}: more than one option for {field}")
            fields[field] = value
        return cls(Format.parse(name), **fields)

    def __str__(self) -> str:
        options: list[str] = [x for x in (self.encoding, self.calibration) if x in _NAMED]
        options += [f"{o}{getattr(self, f)}" for o, f in _COUNTED.items() if getattr(self, f)]
        return "+".join([str(self.format), *options])

    def options(self, num_layers: int, step_tokens: int) -> dict[str, Any]:
        """The fields of `CacheConfig` that this case sets."""
        options: dict[str, Any] = {"format": self.format, "encoding": self.encoding}
        if self.boundary:
            options["layer_formats"] = boundary_formats(self.format, num_layers, self.boundary)
        if self.exact_first or self.exact_recent:
            options |= {"exact_first": self.exact_first, "exact_recent": self.exact_recent}
            options["max_step_tokens"] = step_tokens
        return options


_COUNTED = {"first": "exact_first", "recent": "exact_recent", "boundary": "boundary"}
_NAMED = {"reference": "encoding", "scaled": "calibration", "centered": "calibration"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What one case costs and loses.

    Attributes:
      case: the case, as text.
      perplexity: exp of the mean loss, every token but each window's first.
      reference_perplexity: the same in full precision.
      kl: mean Kullback-Leibler divergence from the full-precision prediction, in nats a token.
      agreement: share of tokens whose likeliest next token is the same.
      attention_error: relative error of attention's output, given the keys, values and queries of
        full precision, root mean square within a layer, mean over layers; None where the model
        does not tell its projections.
      bits: stored bits per element; copies of exact tokens are shared out over the window.
      bytes_per_token: likewise, bytes over all layers.
      tokens: how many losses were averaged.
      faults: what the cache counted, in words.
      seconds: how long it took.
    """

    case: str
    perplexity: float
    reference_perplexity: float
    kl: float
    agreement: float
    attention_error: float | None
    bits: float
    bytes_per_token: float
    tokens: int
    faults: str
    seconds: float

    @property
    def loss_of_perplexity(self) -> float:
        """Relative growth of the perplexity; 0.01 is one per cent."""
        return self.perplexity / self.reference_perplexity - 1


@dataclasses.dataclass(frozen=True)
class Recall:
    """Whether a model completes each window by its last tokens.

    Attributes:
      case: the case, as text.
      found: whether every token of the answer was the likeliest one.
      log_probability: of the whole answer, natural log.
    """

    case: str
    found: list[bool]
    log_probability: list[float]


@dataclasses.dataclass(frozen=True)
class Needles:
    """Contexts with a fact hidden in each, that end by asking for it and answering.

    Attributes:
      windows: int32 [depths, tokens].
      depths: where in its context each fact stands, 0 at the beginning and 1 at the end.
      answer_tokens: how many tokens at the end of a window are the answer.
    """

    windows: np.ndarray
    depths: tuple[float, ...]
    answer_tokens: int

    @classmethod
    def hide(
        cls,
        encode: Callable[[str], list[int]],
        text: Sequence[int] | np.ndarray,
        tokens: int = 4096,
        depths: Sequence[float] = (0.05, 0.25, 0.5, 0.75, 0.95),
    ) -> Needles:
        """Hides a five-digit code in a text, another at each depth.

        Args:
          encode: text to token ids.
          text: token ids of the haystack, at least `tokens`.
          tokens: length of a context, question and answer included.
          depths: from 0 to 1.

        Raises:
          ValueError: a text too short, or a depth out of range.
        """
        rows, answer_tokens = [], 0
        for index, depth in enumerate(depths):
            if not 0 <= depth <= 1:
                raise ValueError(f"depths: got {depth}, expected 0 to 1")
            # Every digit is a token of its own.
            code = f" {(index * 7919 + 48213) % 90000 + 10000}"
            fact = encode(f"\n\n{_QUESTION}{code}.\n\n")
            question, answer = encode(f"\n\n{_QUESTION}"), encode(code)
            room = tokens - len(fact) - len(question) - len(answer)
            if not 0 < room <= len(text):
                raise ValueError(f"text: got {len(text)} tokens, expected at least {max(room, 1)}")
            place = round(depth * room)
            row = [*text[:place], *fact, *text[place:room], *question, *answer]
            rows.append(np.asarray(row, np.int32))
            answer_tokens = len(answer)
        return cls(np.stack(rows), tuple(depths), answer_tokens)


_QUESTION = "The access code of the red lighthouse is"


class Evaluation:
    """One model on one set of windows; measures case after case.

    Args:
      model: as `jaxkv.generate.generate` takes it, able to run without a cache: `model(tokens)`
        gives the logits of whole sequences int32 [B, T]; one with `hidden` also has `logits` and
        `uncached_by_layer`, as `jaxkv.models.Llama`.
      windows: int32 [W, T] tokens, each window by itself.
      cache_config: makes a `CacheConfig` of the model's geometry from the other fields; None takes
        `model.config.cache_config`.
      calibration_tokens: int32 [n], for cases that need a calibration; other text than the windows.
      chunk: most tokens that a step appends to a window.
      batch: windows in one cache.
      directory: where results are kept, a file for each case, and found again, and beside them what
        the model said in full precision; None keeps nothing.
      on_reference: called with (windows done, windows in all) while the model runs in full
        precision, which the first case waits for.
    """

    def __init__(
        self,
        model: Any,
        windows: np.ndarray | Sequence[Sequence[int]],
        *,
        cache_config: Callable[..., CacheConfig] | None = None,
        calibration_tokens: Sequence[int] | np.ndarray = (),
        chunk: int = 1024,
        batch: int = 4,
        directory: str | Path | None = None,
        on_reference: Progress | None = None,
    ):
        self.windows = np.asarray(windows, np.int32)
        if self.windows.ndim != 2 or self.windows.shape[0] < 1 or self.windows.shape[1] < 2:
            raise ValueError(
                f"windows: got shape {list(self.windows.shape)}, expected [windows, tokens] with "
                "at least 2 tokens"
            )
        for name, value in (("chunk", chunk), ("batch", batch)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        self.model = model
        self._cache_config = cache_config or model.config.cache_config
        self._calibration_tokens = np.asarray(calibration_tokens, np.int32)
        self._chunk = min(chunk, self.windows.shape[1])
        self._batch = min(batch, self.windows.shape[0])
        self._directory = None if directory is None else Path(directory)
        self._on_reference = on_reference
        self._calibrations: dict[bool, Calibration] = {}

    @functools.cached_property
    def key(self) -> str:
        """Names model, windows, calibration text and chunk: results of another key are others'."""
        digest = hashlib.blake2b(digest_size=6)
        setting = [self._chunk, *self.windows.shape, jax.__version__]
        digest.update(json.dumps(setting).encode())
        digest.update(self.windows.tobytes() + self._calibration_tokens.tobytes())
        for leaf in jax.tree.leaves(self.model):
            # A sample tells two models apart without reading all of them.
            digest.update(np.asarray(leaf.reshape(-1)[::997]).tobytes())
        return digest.hexdigest()

    def config(self, case: str | Case, sequences: int = 1) -> CacheConfig:
        """The config of a cache that holds `sequences` windows in a case's format."""
        columns = -(-self.windows.shape[1] // _BLOCK_SIZE)
        shape = {
            "block_size": _BLOCK_SIZE,
            "num_blocks": sequences * columns,
            "max_sequences": sequences,
            "max_blocks_per_sequence": columns,
        }
        num_layers = self._cache_config(**shape).num_layers
        return self._cache_config(**shape, **Case.parse(case).options(num_layers, self._chunk))

    def calibration(self, case: str | Case) -> Calibration | None:
        """The calibration that a case needs, measured once."""
        kind = Case.parse(case).calibration
        if kind == "none":
            return None
        center = kind == "centered"
        if center not in self._calibrations:
            if not self._calibration_tokens.size:
                raise ValueError(f"calibration_tokens: got none, but {case} needs some")
            starts = range(0, len(self._calibration_tokens), _CALIBRATION_BATCH)
            batches = [self._calibration_tokens[s : s + _CALIBRATION_BATCH] for s in starts]
            self._calibrations[center] = self._kept(
                f"calibration-{kind}",
                "npz",
                lambda: calibrate(self.model, self.config("bf16"), batches, center_keys=center),
                lambda path, calibration: calibration.save(path),
                Calibration.load,
            )
        return self._calibrations[center]

    def _kept(
        self,
        name: str,
        suffix: str,
        make: Callable[[], Any],
        save: Callable[[Path, Any], None],
        load: Callable[[Path], Any],
    ) -> Any:
        """What `make` returns, from the directory if it is there."""
        path = self._path(name, suffix)
        if path is not None and path.exists():
            return load(path)
        made = make()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"partial-{path.name}")
            save(partial, made)
            os.replace(partial, path)
        return made

    def find(self, case: str | Case) -> Result | None:
        """The result that the directory holds for a case, if any."""
        known = self._find(str(Case.parse(case)))
        return None if known is None else Result(**known)

    def measure(self, case: str | Case, on_progress: Progress | None = None) -> Result:
        """Measures a case, or finds its result in the directory.

        Args:
          case: a `Case`, or its text.
          on_progress: called with (tokens done, tokens in all).

        Raises:
          ValueError: an unknown case, or no calibration tokens for a case that needs them.
          CacheError: the model produced NaN or infinity.
        """
        case = Case.parse(case)
        if (known := self.find(case)) is not None:
            return known
        start = time.perf_counter()
        calibration, reference = self.calibration(case), self._reference
        error = self._attention_error(case, calibration)
        sums, faults = self._compare(case, calibration, reference, on_progress)
        tokens = self.windows.shape[0] * (self.windows.shape[1] - 1)
        loss, reference_loss, divergence, agreed, _ = (sums / tokens).tolist()
        config = self.config(case)
        share = min(1.0, (case.exact_first + case.exact_recent) / self.windows.shape[1])
        exact_bits, bits = 16 * share, config.bits_per_element
        result = Result(
            case=str(case),
            perplexity=math.exp(loss),
            reference_perplexity=math.exp(reference_loss),
            kl=divergence,
            agreement=agreed,
            attention_error=error,
            bits=bits + exact_bits,
            bytes_per_token=config.bytes_per_token * (1 + exact_bits / bits),
            tokens=tokens,
            faults=faults,
            seconds=time.perf_counter() - start,
        )
        self._keep(str(case), result)
        return result

    def recall(
        self, case: str | Case, answer_tokens: int, on_progress: Progress | None = None
    ) -> Recall:
        """Whether the model still says the last tokens of each window, or finds what it said.

        Args:
          case: a `Case`, or its text; "f32" for no cache at all.
          answer_tokens: how many tokens at the end of a window are the answer.
          on_progress: called with (tokens done, tokens in all).

        Raises:
          ValueError: no answer, or one that leaves nothing of a window; not a case.
        """
        if not 0 < answer_tokens < self.windows.shape[1]:
            raise ValueError(
                f"answer_tokens: got {answer_tokens}, expected 1 to {self.windows.shape[1] - 1}"
            )
        exact = case == "f32"
        name = f"recall-{answer_tokens}-{'f32' if exact else Case.parse(case)}"
        if (known := self._find(name)) is not None:
            return Recall(**known)
        first = self.windows.shape[1] - answer_tokens - 1
        outs: dict[int, list[np.ndarray]] = {}
        if exact:
            outs = {window: [out[first:-1]] for window, out in enumerate(self._reference)}
        else:
            case = Case.parse(case)
            for window, begin, out in self._stream(
                case, self.calibration(case), set(), on_progress
            ):
                outs.setdefault(window, []).append(out[max(first - begin, 0) :])
        found, log_probabilities = [], []
        for window, parts in sorted(outs.items()):
            rows = np.concatenate(parts)[:answer_tokens]
            targets = self.windows[window, first + 1 :]
            loss, _, _, _, hits = _sums(self.model, rows, rows, targets)
            found.append(bool(hits == answer_tokens))
            log_probabilities.append(-float(loss))
        recall = Recall("f32" if exact else str(case), found, log_probabilities)
        self._keep(name, recall)
        return recall

    def _path(self, name: str, suffix: str = "json") -> Path | None:
        return None if self._directory is None else self._directory / f"{name}.{self.key}.{suffix}"

    def _find(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        if path is None or not path.exists():
            return None
        return json.loads(path.read_text(encoding="utf-8"))

    def _keep(self, name: str, result: Result | Recall) -> None:
        text = json.dumps(dataclasses.asdict(result), indent=1)
        self._kept(
            name,
            "json",
            lambda: text,
            _write_text,
            _read_text,
        )

    @functools.cached_property
    def _reference(self) -> list[np.ndarray]:
        """What the output layer reads in full precision, [T, n] of each window."""

        def measure() -> np.ndarray:
            rows = []
            for window in self.windows:
                rows.append(np.asarray(_uncached(self.model, window[None])[0]))
                if self._on_reference is not None:
                    self._on_reference(len(rows), len(self.windows))
            return np.stack(rows)

        return list(self._kept("reference", "npy", measure, np.save, np.load))

    @functools.cached_property
    def _projections(self) -> list[tuple[jax.Array, ...]]:
        """(q, k, v), [1, T, heads, dim] each, of every layer for the start of the first window."""
        found: list[tuple[jax.Array, ...]] = []
        if hasattr(self.model, "uncached_by_layer"):
            width = min(_ATTENTION_TOKENS, self._chunk)
            tokens = jnp.asarray(self.windows[:1, :width])
            self.model.uncached_by_layer(tokens, on_layer=lambda *qkv: found.append(qkv))
        return found

    def _compare(
        self,
        case: Case,
        calibration: Calibration | None,
        reference: list[np.ndarray],
        on_progress: Progress | None,
    ) -> tuple[np.ndarray, str]:
        """`_sums` over all windows, and faults."""
        sums, faults = np.zeros(5), set[str]()
        for window, begin, out in self._stream(case, calibration, faults, on_progress):
            targets = self.windows[window, begin + 1 : begin + len(out) + 1]
            exact = reference[window][begin : begin + len(out)]
            sums += _sums(self.model, out, exact, targets)
        return sums, "; ".join(sorted(faults))

    def _stream(
        self,
        case: Case,
        calibration: Calibration | None,
        faults: set[str],
        on_progress: Progress | None,
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Runs all windows: (window, first token, what the output layer reads) of each chunk."""
        count, width = self.windows.shape
        config = self.config(case, self._batch)
        for first in range(0, count, self._batch):
            rows = self.windows[first : first + self._batch]
            cache = init(config, calibration=calibration)
            for begin in range(0, width, self._chunk):
                tokens = np.zeros((self._batch, self._chunk), np.int32)
                part = rows[:, begin : begin + self._chunk]
                tokens[: len(part), : part.shape[1]] = part
                counts = np.where(np.arange(self._batch) < len(part), part.shape[1], 0)
                out, cache, _ = feed(self.model, cache, tokens, counts)
                for row in range(len(part)):
                    yield first + row, begin, np.asarray(out[row])[: part.shape[1]]
                if on_progress is not None:
                    on_progress(first * width + len(part) * (begin + part.shape[1]), count * width)
            check(cache)
            faults.add(report(cache))

    def _attention_error(self, case: Case, calibration: Calibration | None) -> float | None:
        if not self._projections:
            return None
        width = self._projections[0][0].shape[1]
        cache = init(self.config(case), calibration=calibration)
        cache, plan = reserve(cache, jnp.array([width]), max_new_tokens=width)
        errors = []
        for layer, (q, k, v) in enumerate(self._projections):
            cache = write(cache, layer, k, v, plan)
            errors.append(_relative_error(attend(cache, layer, q, plan), _exact(q, k, v)))
        return float(np.mean(errors))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _has_parts(model: Any) -> bool:
    """Whether hidden states and the output layer are to be had one by one."""
    return hasattr(model, "hidden")


def _uncached(model: Any, tokens: np.ndarray) -> jax.Array:
    """What the output layer reads, or logits: [B, T, n]."""
    rows = jnp.asarray(tokens)
    return model.uncached_by_layer(rows) if _has_parts(model) else _logits(model, rows)


@jax.jit
def _logits(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def _sums(model: Any, out: np.ndarray, exact: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(loss, loss of exact, divergence, agreement, hits) summed over tokens that have a target."""
    total = np.zeros(5)
    for begin in range(0, len(targets), _LOGIT_ROWS):
        part = slice(begin, min(begin + _LOGIT_ROWS, len(targets)))
        count = part.stop - begin
        rows = [np.zeros((_LOGIT_ROWS, *x.shape[1:]), x.dtype) for x in (out, exact, targets)]
        for padded, x in zip(rows, (out, exact, targets)):
            padded[:count] = x[part]
        total += np.asarray(_slice_sums(model, *rows, count), np.float64)
    return total


@jax.jit
def _slice_sums(
    model: Any, out: jax.Array, exact: jax.Array, targets: jax.Array, count: jax.Array
) -> jax.Array:
    def log_probabilities(x: jax.Array) -> jax.Array:
        logits = model.logits(x) if _has_parts(model) else x
        return jax.nn.log_softmax(logits.astype(jnp.float32))

    got, want = log_probabilities(out), log_probabilities(exact)
    rows = jnp.arange(len(targets))
    per_token = jnp.stack(
        [
            -got[rows, targets],
            -want[rows, targets],
            (jnp.exp(want) * (want - got)).sum(-1),
            got.argmax(-1) == want.argmax(-1),
            got.argmax(-1) == targets,
        ]
    )
    return jnp.where(rows < count, per_token, 0).sum(-1)


@jax.jit
def _exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention in f32: q, k, v [1, T, heads, dim] to [1, T, q_heads, v_dim]."""
    q = q.astype(jnp.float32).reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    precise = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = precise("bthgd,bshd->bhgts", q, k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    rows = jnp.arange(q.shape[1])
    scores = jnp.where(rows[:, None] >= rows, scores, -jnp.inf)
    out = precise("bhgts,bshd->bthgd", jax.nn.softmax(scores), v.astype(jnp.float32))
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got = got.astype(jnp.float32)
    return jnp.sqrt(jnp.square(got - want).sum() / jnp.square(want).sum())
