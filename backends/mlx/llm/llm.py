"""`LLM`: a `.pte` and its tokenizer, text in and text out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .batch import generate_rows, in_groups
from .classify import Classification, Classifier
from .context import Context
from .generate import Answer, Generation, Result, check_length
from .program import LLMProgram
from .sampler import sampler_of
from .settings import SettingError, Settings
from .text import TokenTable
from .tokenizer import encode, encode_chat, end_ids, load_tokenizer
from .tokens import token_table

Prompt = str | Sequence[int]


class LLM:
    """A language model to talk to.

        llm = LLM.load("model.pte")
        for token in llm.generate("Once upon", temperature=0.8, seed=7):
            print(token.text, end="", flush=True)

    The settings of an answer are those of `Settings`, by name. Every way to generate takes:

    - `max_new_tokens`: None goes on until the answer ends or the context is full.
    - `stop`: a string, or several; the answer ends before the first one that comes.
    - `stop_ids`: token ids that end it, besides those of the model, which `ignore_eos` leaves out.

    There is one KV cache: an answer keeps what it shares with what was there before, so a
    growing chat is not read again. `eos_ids` are the ids that end an answer.
    """

    def __init__(self, program: LLMProgram, tokenizer: Any = None, eos_ids: Collection[int] = ()):
        self.program, self.tokenizer = program, tokenizer
        self.eos_ids = program.eos_ids | set(eos_ids)
        self._context = Context(program)
        self._table = _table(program, tokenizer)

    @classmethod
    def load(
        cls, path: str | Path, tokenizer: str | Path | None = None, *, profile: bool = False
    ) -> LLM:
        """The model in `path`; `tokenizer` is a Hugging Face folder, by default what is in the file.
        `profile` is that of `LLMProgram`.

        Raises FileNotFoundError, ValueError if it is no language model or the folder has no
        tokenizer, RuntimeError where ExecuTorch refuses the file.
        """
        program = LLMProgram(path, profile=profile)
        found = load_tokenizer(program, tokenizer)
        return cls(program, found, () if found is None else end_ids(found, tokenizer))

    # One answer -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        **settings: Any,
    ) -> Generation:
        """The tokens that follow `prompt`, a text or token ids, one by one as they come.

        Raises ValueError for what cannot be honoured, before anything runs; SettingError, a
        ValueError, names the setting.
        """
        check_length(max_new_tokens)
        return Generation(
            self._context,
            self.encode(prompt),
            _settings(settings),
            table=self._table,
            max_new_tokens=max_new_tokens,
            stop=_strings(stop),
            stop_ids=self._stop_ids(stop_ids, ignore_eos),
        )

    @property
    def chats(self) -> bool:
        """Whether there is a tokenizer with a chat template."""
        return bool(self.tokenizer is not None and self.tokenizer.chat_template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] = {},
        **options: Any,
    ) -> Generation:
        """The answer to `messages`, each with `role` and `content`, by the tokenizer's template.

        `template_options` are the template's own, such as `enable_thinking`; `options` those of
        `generate`.
        """
        if self.tokenizer is None:
            raise ValueError(f"chat: {self._name} has no tokenizer; give LLM.load a folder with one")
        ids = encode_chat(self.tokenizer, messages, template_options)
        return self.generate(ids, **options)

    # Many prompts -----------------------------------------------------------------------

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        **settings: Any,
    ) -> list[Result]:
        """The answers to all `prompts`; a prompt that is empty or too long gets an `error`.

        A program exported for B sequences runs B prompts side by side, where the noise of a
        row is its own; any other one after the other, each like `generate` with the same seed.
        """
        chosen = _settings(settings)
        check_length(max_new_tokens)
        ids, stop = self._stop_ids(stop_ids, ignore_eos), _strings(stop)
        if self.program.batch > 1 and chosen.allowed_tokens is not None:
            raise SettingError("allowed_tokens", " steers one answer, expected generate()")
        sampler_of(self.program, chosen)  # refuse before the first prompt runs

        def run(prompts: list[list[int]]) -> list[Result]:
            if self.program.batch == 1:
                length = {"max_new_tokens": max_new_tokens}
                rest = {"table": self._table, "stop": stop, "stop_ids": ids}
                generation = Generation(self._context, prompts[0], chosen, **length, **rest)
                return [generation.result()]
            answers = [Answer(self._table, stop, ids, max_new_tokens) for _ in prompts]
            sampler = sampler_of(self.program, chosen)
            return generate_rows(self._context, sampler, prompts, answers)

        asked = [_later(self.encode, prompt) for prompt in prompts]
        return in_groups(self.program, asked, run, lambda error: Result(error=error))

    def classify(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> list[Classification]:
        """Which of `labels` each prompt goes on with, and how likely each of them is.

        A label is a text as it would follow the prompt, a space before it included where one
        belongs. Nothing is drawn: a prompt is read once, and so are the tokens of a label but
        its last. Probabilities take a program with logits; `Classifier` says what others can do.
        """
        ids = {label: self.encode(label, special=False) for label in labels}
        if len(ids) < len(labels):
            raise ValueError(f"labels are {list(labels)}, expected different ones")
        classifier = Classifier(self._context, ids)

        def ask(prompt: Prompt) -> list[int]:
            found = self.encode(prompt)
            classifier.check(found)
            return found

        asked = [_later(ask, prompt) for prompt in prompts]
        failed = lambda error: Classification(error=error)  # noqa: E731
        return in_groups(self.program, asked, classifier.classify, failed)

    # Text and ids -----------------------------------------------------------------------

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """The ids of a text, with those that the model expects around it; ids as they are."""
        if not isinstance(prompt, str):
            return [operator.index(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError(
                f"the prompt is a text and {self._name} has no tokenizer; give token ids, or "
                "LLM.load a folder with a tokenizer"
            )
        return encode(self.tokenizer, prompt, special)

    def text(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; special ones have none."""
        if self._table is None:
            raise ValueError(f"{self._name} has neither token bytes nor a tokenizer")
        return self._table.text(tokens)

    @property
    def _name(self) -> str:
        return self.program.path.name

    def _stop_ids(self, more: Iterable[int], ignore_eos: bool) -> set[int]:
        return set(more) | (set() if ignore_eos else self.eos_ids)


def _table(program: LLMProgram, tokenizer: Any) -> TokenTable | None:
    if "token_bytes" in program.metadata:
        tensors: tuple[torch.Tensor, ...] = (program.get("token_bytes"), program.get("token_offsets"))
    elif tokenizer is not None:
        tensors = token_table(tokenizer, program.vocab_size)
    else:
        return None
    return TokenTable(*tensors)


def _settings(given: Mapping[str, Any]) -> Settings:
    unknown = [name for name in given if name not in Settings.__dataclass_fields__]
    if unknown:
        known = ", ".join(Settings.__dataclass_fields__)
        raise TypeError(f"{unknown[0]} is no setting; there are {known}")
    return Settings(**given)


def _strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _later(function: Callable, *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
