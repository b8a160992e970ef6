"""`LLM`: the program of a language model and its tokenizer, for generation from Python."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .generate.batch import generate_side_by_side, run_in_groups
from .generate.classify import Classification, Classifier
from .generate.context import Context
from .generate.generate import AnswerBuilder, Generation, Result, StopConditions
from .generate.program import LLMProgram
from .generate.sampler import sampler_for
from .generate.text import TokenTable
from .generate.tokenizer import encode, encode_chat, load_tokenizer
from .generate.tokenizer import eos_ids as tokenizer_eos_ids
from .sampling_parameters import PARAMETERS, SamplingParameters, SettingError
from .tokens import token_table

Prompt = str | Sequence[int]


class LLM:
    """Generates text with an exported language model.

        llm = LLM.load("model.pte")
        for token in llm.generate("Once upon", temperature=0.8, seed=7):
            print(token.text, end="", flush=True)

    `generate`, `chat` and `generate_batch` take the fields of `SamplingParameters` by name, and

    - `max_new_tokens`: the maximum length of the answer in tokens. With None, the answer ends at a
      stop id or stop string, or when the context is full.
    - `stop`: one or several stop strings. The answer ends before the first one that occurs.
    - `stop_ids`: token ids that end the answer, in addition to `eos_ids`.
    - `ignore_eos`: do not stop at `eos_ids`.

    All answers share one KV cache. If the cache already holds the first tokens of a prompt, these
    tokens are not computed again. A turn of a chat therefore only computes the new messages.

    Attributes: `program`, `tokenizer` (or None), and `eos_ids`, the token ids that end an answer.
    """

    def __init__(self, program: LLMProgram, tokenizer: Any = None, eos_ids: Collection[int] = ()):
        self.program, self.tokenizer = program, tokenizer
        self.eos_ids = program.eos_ids | set(eos_ids)
        self._context = Context(program)
        self._table = _token_table(program, tokenizer)

    @classmethod
    def load(
        cls, path: str | Path, tokenizer: str | Path | None = None, *, profile: bool = False
    ) -> LLM:
        """Load the `.pte` file `path`.

        - `tokenizer`: a Hugging Face folder; by default the tokenizer in the file, if there is one.
        - `profile`: time every instruction, see `LLMProgram`.

        Raises FileNotFoundError if `path` does not exist, ValueError if the file is not a language
        model or the folder has no tokenizer, and RuntimeError if ExecuTorch rejects the file:
        `executorch_mlx.memory.OutOfMemoryError` if it does not fit into memory.
        """
        program = LLMProgram(path, profile=profile)
        loaded = load_tokenizer(program, tokenizer)
        return cls(program, loaded, () if loaded is None else tokenizer_eos_ids(loaded, tokenizer))

    # One answer -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        **parameters: Any,
    ) -> Generation:
        """Return an iterator over the tokens that follow `prompt`, which is text or token ids.

        Raises, before anything runs: PromptLengthError for an empty prompt, or one longer than the
        context; SettingError for an argument that is invalid, or that the program does not support;
        ValueError if `prompt` is text and there is no tokenizer, or if a token id is outside the
        vocabulary; TypeError for an unknown parameter.
        """
        conditions = self._stop_conditions(max_new_tokens, stop, stop_ids, ignore_eos)
        ids = self.encode(prompt)
        return Generation(self._context, ids, _sampling_parameters(parameters), self._table, conditions)

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer is not None and self.tokenizer.chat_template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] = {},
        **options: Any,
    ) -> Generation:
        """Return an iterator over the tokens of the answer to `messages`.

        - `messages`: mappings with `role` and `content`, which the chat template formats.
        - `template_options`: variables of the template, such as `enable_thinking`.
        - `options`: the arguments of `generate`.

        Raises ValueError if there is no chat template or the template rejects the messages, and the
        errors of `generate`.
        """
        if self.tokenizer is None:
            raise ValueError(f"chat: {self._name} has no tokenizer; pass a folder with a tokenizer to LLM.load")
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
        **parameters: Any,
    ) -> list[Result]:
        """Generate the answers to all `prompts`, and return the results in the order of the prompts.

        A program exported for B sequences answers B prompts side by side, each with different noise.
        A program for one sequence answers the prompts one after the other; each answer is the one
        that `generate` gives with the same seed. The result for an invalid prompt has an `error`.

        Raises the errors of `generate`, except those about a prompt.
        """
        sampling = _sampling_parameters(parameters)
        conditions = self._stop_conditions(max_new_tokens, stop, stop_ids, ignore_eos)
        if self.program.batch > 1 and sampling.allowed_tokens is not None:
            raise SettingError(
                "allowed_tokens", f": expected a program for one sequence, got {self.program.batch}; use generate()"
            )
        sampler_for(self.program, sampling)  # raises SettingError before the first prompt runs

        def run(group: list[list[int]]) -> list[Result]:
            if self.program.batch == 1:
                return [Generation(self._context, group[0], sampling, self._table, conditions).result()]
            builders = [AnswerBuilder(self._table, conditions) for _ in group]
            return generate_side_by_side(self._context, sampler_for(self.program, sampling), group, builders)

        return run_in_groups(self.program, prompts, self.encode, run, lambda error: Result(error=error))

    def classify(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> list[Classification]:
        """For each prompt, find the most likely of `labels` and the probability of every label.

        A label is the text that directly follows the prompt, so a label usually begins with a space.
        The result is not random. The result for a prompt that is empty or too long has an `error`.
        There are probabilities only if the program returns logits. Other programs give only the
        label, and need a head with `allowed_tokens`.

        Raises ValueError if the labels cannot be distinguished, or if the program neither returns
        logits nor takes `allowed_tokens`.
        """
        ids = {label: self.encode(label, special=False) for label in labels}
        if len(ids) < len(labels):
            raise ValueError(f"labels: got {list(labels)}, expected different labels")
        classifier = Classifier(self._context, ids)

        def encode_and_check(prompt: Prompt) -> list[int]:
            prompt_ids = self.encode(prompt)
            classifier.check(prompt_ids)
            return prompt_ids

        return run_in_groups(
            self.program, prompts, encode_and_check, classifier.classify, lambda error: Classification(error=error)
        )

    # Text and ids -----------------------------------------------------------------------

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """Return the token ids of `prompt`. If `prompt` holds token ids, return a list of the same ids.

        `special` adds the special tokens that the model expects around a text. Raises ValueError if
        `prompt` is text and there is no tokenizer.
        """
        if not isinstance(prompt, str):
            return [operator.index(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError(
                f"prompt: got text, but {self._name} has no tokenizer; pass token ids, or pass a folder with a "
                "tokenizer to LLM.load"
            )
        return encode(self.tokenizer, prompt, special)

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Special tokens have no text.

        Raises ValueError if there are neither token bytes nor a tokenizer.
        """
        if self._table is None:
            raise ValueError(f"text: {self._name} has neither token bytes nor a tokenizer")
        return self._table.text(tokens)

    @property
    def _name(self) -> str:
        return self.program.path.name

    def _stop_conditions(
        self, max_new_tokens: int | None, stop: str | Iterable[str], stop_ids: Iterable[int], ignore_eos: bool
    ) -> StopConditions:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        ids = set(stop_ids) | (set() if ignore_eos else self.eos_ids)
        return StopConditions(max_new_tokens, strings, ids)


def _token_table(program: LLMProgram, tokenizer: Any) -> TokenTable | None:
    if "token_bytes" in program.metadata:
        return TokenTable(program.get("token_bytes"), program.get("token_offsets"))
    return None if tokenizer is None else TokenTable(*token_table(tokenizer, program.vocab_size))


def _sampling_parameters(arguments: Mapping[str, Any]) -> SamplingParameters:
    unknown = [name for name in arguments if name not in PARAMETERS]
    if unknown:
        raise TypeError(f"{unknown[0]}: unknown parameter, expected one of {', '.join(PARAMETERS)}")
    return SamplingParameters(**arguments)
