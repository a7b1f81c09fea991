"""Text to token ids and back, with the chat format that the model was tuned on."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# What each `tokenizer.ggml.pre` name stands for; ByteLevel brings GPT-2's own splitting rule.
_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """A byte-level BPE tokenizer with optional ChatML turns.

    Text is always read as plain text: a marker such as "<|im_end|>" inside a prompt is spelled
    out, never taken for the end of a turn.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        system: str | None = None,
        end_of_text: int | None = None,
    ):
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._system = system
        self._start = tokenizer.token_to_id(TURN_START)
        self._end = tokenizer.token_to_id(TURN_END)
        stops = {end_of_text, self._end} - {None}
        self.stop_tokens: tuple[int, ...] = tuple(sorted(t for t in stops if t is not None))

    @classmethod
    def from_vocabulary(
        cls,
        *,
        tokens: Sequence[str],
        merges: Sequence[str],
        is_special: Sequence[bool],
        pre_tokenizer: str,
        chat_template: str | None = None,
        end_of_text: int | None = None,
    ) -> "Tokenizer":
        """Builds the tokenizer from the lists that a GGUF file carries.

        Args:
          tokens: the vocabulary, by id.
          merges: BPE merges, "left right", by rank.
          is_special: whether each token is a marker instead of text.
          pre_tokenizer: the file's name for the rule that splits text into words.
          chat_template: the file's Jinja template; only looked at for its default system turn.
          end_of_text: the id that ends a text.

        Raises:
          ValueError: an unknown pre_tokenizer.
        """
        if pre_tokenizer not in _PRE_TOKENIZERS:
            raise ValueError(
                f"pre-tokenizer {pre_tokenizer!r} is not supported; known: "
                f"{', '.join(_PRE_TOKENIZERS)}"
            )
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre_tokenizer]())
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([t for t, special in zip(tokens, is_special) if special])
        has_system = SMOLLM2_SYSTEM in (chat_template or "")
        return cls(
            tokenizer, system=SMOLLM2_SYSTEM if has_system else None, end_of_text=end_of_text
        )

    @classmethod
    def from_file(cls, path: str | Path, *, end_of_text: int | None = None) -> "Tokenizer":
        """Reads a Hugging Face `tokenizer.json`."""
        return cls(tokenizers.Tokenizer.from_file(str(path)), end_of_text=end_of_text)

    @property
    def has_chat(self) -> bool:
        """Whether the vocabulary has the turn markers that `chat` needs."""
        return self._start is not None and self._end is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without any marker added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; markers are left out."""
        return self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=True)

    def chat(self, prompt: str, *, system: str | None = None) -> list[int]:
        """Token ids of a conversation that waits for the assistant's answer.

        Args:
          prompt: the user's turn.
          system: the system turn; None means the model's own default, if it has one.

        Raises:
          ValueError: the vocabulary has no turn markers.
        """
        system = self._system if system is None else system
        turns = [("system", system)] if system else []
        ids: list[int] = []
        for role, text in [*turns, ("user", prompt)]:
            ids += [self._marker(self._start), *self.encode(f"{role}\n{text}")]
            ids += [self._marker(self._end), *self.encode("\n")]
        return [*ids, self._marker(self._start), *self.encode("assistant\n")]

    @staticmethod
    def _marker(token: int | None) -> int:
        if token is None:
            raise ValueError(
                f"this tokenizer has no {TURN_START} and {TURN_END} markers; use plain text"
            )
        return token


class TextStream:
    """Turns tokens that arrive a few at a time into text, whole characters only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._shown = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text that the new tokens complete; a cut-off character waits for its last byte."""
        self._pending += map(int, tokens)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[self._shown :], len(text)
        if text.endswith("\n"):
            # Nothing before a line's end changes how later tokens decode.
            self._pending, self._shown = [], 0
        return new

    def flush(self) -> str:
        """What is left, complete or not."""
        text = self._tokenizer.decode(self._pending)[self._shown :]
        self._pending, self._shown = [], 0
        return text
