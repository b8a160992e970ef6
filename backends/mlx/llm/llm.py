"""`LLM`: the program of a language model and its tokenizer, for generation from Python."""

from __future__ import annotations

import json
import operator
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter_files import read_adapter
from .binding import BusyError
from .errors import FieldError, PromptLengthError, SettingError
from .generation import Generation, Options, Result, check_adapter_name
from .program import EngineStats, LLMProgram
from .sampling_parameters import PARAMETERS, SamplingParameters, check_integer, python_number
from .scoring import Classification, Classifier, Score, can_score, score
from .tokenizer import Tokenizer, reading_tokenizer
from .tokens import TokenTable, token_bytes
from .vision.messages import with_media
from .vision.picture import PictureError

if TYPE_CHECKING:
    from .vision.processor import Encoding, PictureProcessor

Prompt = str | Sequence[int]


class IsSpeechModel(ValueError):
    """Raised by `LLM` for the program of a speech model."""


class LLM:
    """Generates text with an exported language model.

        llm = LLM.load("model.pte")
        for token in llm.generate("Once upon", temperature=0.8, seed=7):
            print(token.text, end="", flush=True)

    `generate`, `chat` and `generate_batch` take the fields of `SamplingParameters` by name, and

    - `max_new_tokens`: the maximum length of the answer in tokens. With None, the answer ends at a
      stop id or stop string, or when the context is full.
    - `min_new_tokens`: the minimum length of the answer in tokens. Until then, no stop id is drawn, and stop strings
      are ordinary text. If there are stop ids, the program has to take `allowed_tokens` or return logits.
    - `stop`: one or several stop strings. The answer ends before the first one that occurs.
    - `stop_ids`: token ids that end the answer, in addition to `eos_ids`.
    - `ignore_eos`: do not stop at `eos_ids`.
    - `logprobs`: compute the log probability of each token, and find this number of most likely tokens. The log
      probabilities are those of the model itself: temperature 1, no filters and no penalties. None computes none. If
      only the head can compute them, this is at most the number of the export, `program.logprobs`.
    - `priority`: if requests wait, those with a higher priority start first.
    - `adapter`: the name of an adapter that `load_adapter` has loaded, or None.
    - `draft`: the number of tokens that speculation may guess in each step, which changes the speed and not the tokens.
      0 never guesses. -1 lets the engine choose, or is 0 if `allowed_tokens` is given: this function would get guesses
      as a part of the answer.

    The engine runs as many requests at once as the program has rows; others wait. It starts a request as soon as
    you make it. It has its own thread, so that Python code runs meanwhile. The tokens of an answer do not depend on
    other requests. If the KV cache already holds the first tokens of a prompt, these tokens are not computed again. A
    turn of a chat therefore only computes the new messages. All methods may be called from any thread. A process that
    was forked after a model was loaded can neither use it nor load another one: both raise RuntimeError.

    Attributes: `program`; `tokenizer`, or None; `eos_ids`, the token ids that end an answer; `rows`, the number of
    requests that run at once.
    """

    def __init__(
        self,
        program: LLMProgram,
        tokenizer: Tokenizer | None = None,
        eos_ids: Collection[int] = (),
        **engine_options: Any,
    ):
        self.program, self.tokenizer, self._folder_eos_ids = program, tokenizer, frozenset(eos_ids)
        self.rows = program.rows
        if program.data("speech_config") is not None:
            program.close()
            raise IsSpeechModel(
                f"{program.path}: got a speech model, expected a language model; executorch-mlx transcribe runs it"
            )
        if tokenizer is not None and program.token_table is None:
            program.set_token_bytes(token_bytes(tokenizer.backend, tokenizer.special_ids, program.vocab_size))
        program.start(**engine_options)

    @staticmethod
    def finetune(model: str | Path, data: str | Path, output: str | Path, **options: Any) -> list[list[float | None]]:
        """Train an adapter of the checkpoint `model` on the examples in `data`, and write it to the folder `output`.

        The arguments are those of `executorch_mlx.training.finetune`. Needs torch. Returns a row for each step: step,
        loss, validation loss or None, learning rate, tokens and tokens per second.
        """
        from ..training import finetune

        return finetune(model, data, output, **options).rows

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: str | Path | None = None,
        *,
        profile: bool = False,
        device: str | None = None,
        draft: str | Path | None = None,
        chat_template: str | Path | None = None,
        low_priority: bool = False,
        queue_limit: int = 0,
        chunk: int = 0,
        chunk_seconds: float = 0.0,
        reuse_prompts: bool = True,
        overlap: bool | None = None,
    ) -> LLM:
        """Load the `.pte` file `path`.

        - `tokenizer`: a Hugging Face folder; by default the tokenizer in the file, if there is one.
        - `profile`: time every instruction, see `LLMProgram`.
        - `device`: `cpu`, `gpu`, or None for the default.
        - `draft`: a `.pte` file of a smaller model with the same tokenizer. It guesses tokens for speculation, which
          changes the speed and not the tokens.
        - `chat_template`: a file with a chat template in Jinja, which takes the place of those of the tokenizer.
        - `low_priority`: let the engine and the CPU yield to other threads, for work that nobody waits for. The tokens
          are the same.
        - `queue_limit`: the number of requests that may wait. Further ones raise BusyError. 0: no limit.
        - `chunk`: the largest number of prompt tokens in one call. 0: the largest that the program
          takes, but at most 512 on a CPU.
        - `chunk_seconds`: while answers run, a chunk of another prompt should take about this long, in seconds, because
          the answers wait for it. 0: 0.25 s on a CPU, and any time on a GPU, where the last bits of the logits depend
          on the size of a chunk. `math.inf`: any time.
        - `reuse_prompts`: keep the rows of finished requests for later prompts that begin with the same tokens.
        - `overlap`: submit a step before the tokens of the previous step are read, so that the host works while the
          device does. None: only on a GPU. The tokens are the same. Requests with `allowed_tokens` or a draft model
          never overlap.

        Raises FileNotFoundError if a file does not exist, ValueError if it is not a language model, if `draft` does
        not fit to it or if the folder has no tokenizer, and RuntimeError if ExecuTorch rejects the file. If
        the program does not fit into memory, this RuntimeError is an `executorch_mlx.memory.OutOfMemoryError`.
        """
        if tokenizer is not None:
            loaded, eos_ids = Tokenizer.from_folder(tokenizer), _eos_ids_in(Path(tokenizer))
        program = LLMProgram(path, profile=profile, device=device, draft=draft, low_priority=low_priority)
        if tokenizer is None:
            loaded, eos_ids = _tokenizer_in(program), set()
        if chat_template is not None:
            if loaded is None:
                raise ValueError(f"chat_template: {Path(path).name} has no tokenizer; pass a folder with a tokenizer")
            loaded.replace_templates(Path(chat_template).read_text(encoding="utf-8"))
        return cls(
            program,
            loaded,
            eos_ids,
            queue_limit=queue_limit,
            chunk=chunk,
            chunk_seconds=chunk_seconds,
            reuse_prompts=reuse_prompts,
            overlap=-1 if overlap is None else bool(overlap),
        )

    def close(self) -> None:
        """Cancel all requests and free the memory of the program. Later requests raise RuntimeError."""
        self.program.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> EngineStats:
        """What the engine does now, and what it did so far."""
        return self.program.stats()

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        ids = self.program.eos_ids | self._folder_eos_ids | ({eos} if eos is not None else set())
        # The model never draws the others. Configs of small models keep the default ids of their family.
        return frozenset(id for id in ids if 0 <= id < self.program.vocab_size)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that the authors of the model recommend and the program takes, name → value.

        The commands and the server use them for what a user leaves open. `generate` does not.
        """
        values = json.loads(self.program.data("sampling_defaults") or b"{}")
        return {name: value for name, value in values.items() if name in PARAMETERS and self.program.takes(name)}

    @cached_property
    def pictures(self) -> PictureProcessor | None:
        """What prepares the pictures of prompts, or None if the program takes none."""
        settings = self.program.data("picture_settings")
        if settings is None:
            return None
        from .vision.processor import PictureProcessor

        return PictureProcessor(json.loads(settings))

    # One answer -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        priority: int = 0,
        draft: int = -1,
        adapter: str | None = None,
        images: Sequence[Any] = (),
        **parameters: Any,
    ) -> Generation:
        """Start to answer `prompt`, which is text or token ids. Return an iterator over the tokens of the answer.

        `images` are the pictures of a vision-language model: paths, bytes of files, data URLs or pictures of PIL. The
        prompt is then a text with a placeholder for each picture, as a chat template writes it; or both are what
        `picture_ids` returned.

        Raises PromptLengthError for an empty prompt, or one longer than the context; SettingError for an argument that
        is invalid, or that the program does not support; ValueError if `prompt` is text and there is no tokenizer, or
        if a token id is outside the vocabulary; TypeError for an unknown parameter, or a prompt of another type; and
        BusyError if the queue is full.
        """
        sampling, options = self._settings(
            max_new_tokens, min_new_tokens, stop, stop_ids, ignore_eos, logprobs, priority, draft, adapter, **parameters
        )
        if images and isinstance(prompt, str):
            ids, images = self.picture_ids(prompt, images)
        else:
            ids = self.prompt_ids(prompt)
        return Generation(self.program, ids, sampling, replace(options, pictures=images))

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer is not None and self.tokenizer.chat_template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_options: Mapping[str, Any] = {},
        continue_final_message: bool = False,
        parse_special: bool = False,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        **options: Any,
    ) -> Generation:
        """Start to answer `messages`. Return an iterator over the tokens of the answer.

        - `messages`: mappings with `role` and `content`, which the chat template formats. If it takes no system
          message, or only turns that alternate, messages are joined.
        - `continue_final_message`: continue the last message, such as the beginning of an answer.
        - `template_options`: variables of the template, such as `enable_thinking` or `tools`.
        - `parse_special`: special tokens in `messages` are control tokens. By default, they are text.
        - `images`: pictures, as in `generate`. Parts `{"type": "image"}` of messages say where they are. Without such
          parts, they precede the text of the last message of the user. Parts can also have the pictures: `{"type":
          "image", "image": …}`, or `{"type": "image_url", "image_url": {"url": "data:…"}}`.
        - `audio`: sounds for a model that hears, in the same ways: paths, bytes of files, data URLs, or samples at
          16 kHz, float32. Their parts are `{"type": "audio", "audio": …}`, or `{"type": "input_audio", "input_audio":
          {"data": …, "format": "wav"}}`.
        - `videos`: each a `vision.Video`, or a list of frames, two in a second. Their parts are `{"type": "video",
          "video": […], "fps": …}`.
        - `options`: the arguments of `generate`.

        Raises ValueError if there is no chat template or the template rejects the messages, and the
        errors of `generate`.
        """
        _check_list("messages", messages)
        if self.tokenizer is None:
            raise ValueError(f"chat: {self._name} has no tokenizer; pass a folder with a tokenizer to LLM.load")
        messages, images = with_media(messages, images, audio, videos)
        if not parse_special:
            messages, template_options = self.tokenizer.special_text.cut([messages, template_options])
        text = self.tokenizer.chat_text(messages, template_options, continue_final_message=continue_final_message)
        return (
            self.generate(text, images=images, **options) if images else self.generate(self.chat_ids(text), **options)
        )

    # Many prompts -----------------------------------------------------------------------

    def generate_batch(self, prompts: Sequence[Prompt], **options: Any) -> list[Result]:
        """Generate the answers to all `prompts`, and return the results in the order of the prompts.

        As many answers as the program has rows are generated at once. Each answer is equal to that of `generate`
        with the same seed. Without a seed, each answer has a random seed. The result for an invalid prompt has an
        `error`. `options` are the arguments of `generate`, besides `images`.

        Raises the errors of `generate`, except those about a prompt.
        """
        _check_list("prompts", prompts)
        sampling, settings = self._settings(**options)
        running: deque[Generation] = deque()
        answers: list[Generation | ValueError] = []
        for prompt in prompts:
            try:
                ids = self.prompt_ids(prompt)
            except ValueError as error:
                answers.append(error)
                continue
            running.append(self._start_when_free(ids, sampling, settings, running))
            answers.append(running[-1])
        return [Result(error=answer) if isinstance(answer, ValueError) else answer.result() for answer in answers]

    def _start_when_free(
        self, prompt: list[int], sampling: SamplingParameters, options: Options, running: deque[Generation]
    ) -> Generation:
        """Start an answer. If the queue is full, wait for the oldest of `running`."""
        while True:
            try:
                return Generation(self.program, prompt, sampling, options)
            except BusyError:
                if not running:
                    raise
                running.popleft().result()

    def classify(self, prompts: Sequence[Prompt], labels: Sequence[str]) -> list[Classification]:
        """For each prompt, find the most likely of `labels` and the probability of every label.

        A label is the text that directly follows the prompt, so a label usually begins with a space.
        The result is not random. The result for a prompt that is empty or too long has an `error`.
        There are probabilities only if the program returns logits or log probabilities. Other programs give only the
        label, and need a head with `allowed_tokens`.

        Raises ValueError if the labels cannot be distinguished, or if the program returns neither logits nor log
        probabilities and does not take `allowed_tokens`, and TypeError for arguments of another type.
        """
        _check_list("prompts", prompts)
        _check_list("labels", labels)
        ids = {label: self._encode("labels", label, special=False) for label in labels}
        if len(ids) < len(labels):
            raise ValueError(f"labels: got {list(labels)}, expected different labels")
        classifier = Classifier(self.program, ids)

        def classify(prompt: Prompt) -> Classification:
            try:
                prompt_ids = self.encode(prompt)
                classifier.check(prompt_ids)
                self._check_vocabulary("prompt", prompt_ids)
            except ValueError as error:
                return Classification(error=error)
            return classifier.classify(prompt_ids)

        return [classify(prompt) for prompt in prompts]

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        logprobs: int = 0,
        adapter: str | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Score]:
        """Compute the log probability of each of `continuations` after `prompt`. Both are text or token ids.

        The text of a continuation directly follows the prompt, so it usually begins with a space. It is encoded by
        itself, without special tokens. `logprobs` is the number of most likely tokens to return in the place of each
        token. `adapter` is the name of an adapter, or None. `is_cancelled` is called several times in a second. Once it
        returns true, the work ends soon, with a `scoring.CancelledError`.

        Raises ValueError if a continuation is empty or does not fit into the context, or if the program returns neither
        logits nor log probabilities; SettingError if it returns fewer than `logprobs` most likely tokens; and the
        errors of `generate` about prompts.
        """
        _check_list("continuations", continuations)
        if not can_score(self.program):
            raise ValueError(
                f"score: {self._name} returns neither logits nor log probabilities; export it with "
                'outputs="logits" or "both", or with logprobs in the head'
            )
        logprobs = python_number(logprobs)
        check_integer("logprobs", logprobs, 0, 2**31, "an integer of at least 0")
        if logprobs > self.program.logprobs and not self.program.has_logits:
            most = f"at most {self.program.logprobs}, the number that the program was exported with"
            raise SettingError("logprobs", logprobs, most)
        check_adapter_name(adapter)
        prompt_ids = self.prompt_ids(prompt)
        ids = [self._encode("continuations", continuation, special=False) for continuation in continuations]
        room = self.program.max_context_len - len(prompt_ids) + 1
        for continuation in ids:
            if not 0 < len(continuation) <= room:
                raise ValueError(f"continuations: got {len(continuation)} tokens, expected 1 to {room}")
            self._check_vocabulary("continuations", continuation)
        return [score(self.program, prompt_ids, continuation, logprobs, adapter, is_cancelled) for continuation in ids]

    # Adapters ---------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded, sorted."""
        return self.program.adapters

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load the LoRA adapter in `folder`, of peft or mlx-lm, so that requests can name it.

        If there is an adapter of this name, the new one takes its place. Requests that were made before keep the old
        one until they end. An adapter takes a slot of the program as long as it has a name, or a request that has not
        ended.

        Raises FileNotFoundError if a file is missing; AdapterError, a ValueError, if the folder has another kind of
        adapter; SettingError if it does not fit the program, or the program was exported without adapters; and
        BusyError if no slot is free.
        """
        if name is None:
            raise SettingError("adapter", None, "a name")
        check_adapter_name(name)
        self.program.load_adapter(name, read_adapter(folder))

    def unload_adapter(self, name: str) -> None:
        """Take the name away from an adapter. Requests that were made before keep the adapter until they end.

        Raises SettingError if there is no such adapter.
        """
        self.program.unload_adapter(name)

    # The caches -------------------------------------------------------------------------

    def prefill(self, prompt: Prompt) -> None:
        """Read a prompt into the KV cache, and wait until it is read.

        A request whose prompt begins with these tokens then begins with the next one. Raises the errors of `generate`
        about prompts.
        """
        self.program.prefill(self.prompt_ids(prompt))

    def clone(self, prompt: Prompt) -> None:
        """Copy the KV cache of a conversation, which is `prompt` so far, to another row.

        Two requests that begin with `prompt` and go on differently then both find it. Tokens that are not in the cache
        are computed first. Raises BusyError if no other row is free; ValueError if the program has one row, or keeps
        state that cannot be copied; and the errors of `generate` about prompts.
        """
        self.program.clone(self.prompt_ids(prompt))

    def logits(self, prompt: Prompt) -> list[float]:
        """Return the logits of all tokens of the vocabulary after `prompt`.

        Raises SettingError if the program does not return logits, and the errors of `generate` about prompts.
        """
        return self.program.logits(self.prompt_ids(prompt))

    def suspend(self) -> None:
        """Wait for the running step, and start no other one until `resume`: the device has no work then.

        Requests stay, and can be made and cancelled. Both may be called repeatedly.
        """
        self.program.suspend()

    def resume(self) -> None:
        """Go on after `suspend`."""
        self.program.resume()

    def release_memory(self) -> None:
        """Free the memory that the engine can do without, between two steps or while it is suspended.

        If no request runs, the program is unloaded, with its caches, unless it has slots for adapters. The next request
        loads it again, and reads its whole prompt.
        """
        self.program.release_memory()

    def save_prefix(self, prompt: Prompt, path: str | Path, *, adapter: str | None = None) -> None:
        """Write the KV cache of `prompt` to a file, so that `load_prefix` saves the time of the prefill.

        `adapter` is the name of an adapter, or None. It must be loaded when the file is read, under any name.

        Raises the errors of `generate` about prompts, and RuntimeError if the file cannot be written.
        """
        check_adapter_name(adapter)
        self.program.save_prefix(self.prompt_ids(prompt), path, adapter)

    def load_prefix(self, path: str | Path) -> int:
        """Read the KV cache of a prompt, and return the number of its tokens.

        Prompts that begin with these tokens do not compute them again. Raises FileNotFoundError if there is no file,
        and ValueError if it is damaged, or belongs to another program or another version of the format.
        """
        return self.program.load_prefix(path)

    # Text and ids -----------------------------------------------------------------------

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        """Return the token ids of `prompt`. If `prompt` holds token ids, return a list of the same ids.

        `special` adds the special tokens that the model expects around a text. Raises ValueError if
        `prompt` is text and there is no tokenizer, and TypeError if it is neither text nor token ids.
        """
        return self._encode("prompt", prompt, special)

    def _encode(self, argument: str, text: Prompt, special: bool) -> list[int]:
        if not isinstance(text, str):
            try:
                return _token_ids(text)
            except TypeError as error:
                raise TypeError(f"{argument}: got {reprlib.repr(text)}, expected text or token ids") from error
        if self.tokenizer is None:
            problem = f"got text, but {self._name} has no tokenizer; pass token ids, or a folder with one to LLM.load"
            raise FieldError(argument, problem=problem)
        return self.tokenizer.encode(text, special)

    def prompt_ids(self, prompt: Prompt, special: bool = True) -> list[int]:
        """Return the token ids of `prompt`. `special`: see `encode`. Raises the errors of `generate` about prompts."""
        return self._checked_ids(prompt, lambda: self.encode(prompt, special))

    def chat_ids(self, text: str) -> list[int]:
        """Return the token ids of the text of a chat; see `Tokenizer.encode_chat`. Raises the same errors."""
        return self._checked_ids(text, lambda: self.tokenizer.encode_chat(text, special=self.pictures is not None))

    def picture_ids(self, text: Prompt, images: Sequence[Any]) -> tuple[list[int], list[Encoding]]:
        """Return the token ids of a text with a placeholder for each of `images`, and their encodings.

        Raises PictureError, a ValueError, if the program takes no pictures, or for one that is invalid.
        """
        if self.pictures is None:
            raise PictureError(f"{self._name} takes no pictures or sounds")
        if not isinstance(text, str) or self.tokenizer is None:
            raise PictureError("expected a prompt that is text, and a tokenizer")
        encodings: list[Encoding] = []

        def encode() -> list[int]:
            ids, found = self.pictures.insert(
                text, images, lambda shown: self.tokenizer.encode_chat(shown, special=True)
            )
            encodings.extend(found)
            return ids

        return self._checked_ids(text, encode), encodings

    def _checked_ids(self, prompt: Prompt, encode: Callable[[], list[int]]) -> list[int]:
        longest = self.program.max_context_len
        if isinstance(prompt, str) and self.tokenizer is not None and self.tokenizer.has_more_tokens(prompt, longest):
            raise PromptLengthError(None, longest)
        ids = encode()
        if not 0 < len(ids) <= longest:
            raise PromptLengthError(len(ids), longest)
        self._check_vocabulary("prompt", ids)
        return ids

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Special tokens have no text.

        Raises ValueError if there are neither token bytes nor a tokenizer.
        """
        return self._token_table("text").text(tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, possibly part of a character. Special tokens have none.

        Raises ValueError if there are neither token bytes nor a tokenizer.
        """
        return self._token_table("token_bytes")[token]

    def _token_table(self, function: str) -> TokenTable:
        if self.program.token_table is None:
            raise FieldError(function, problem=f"{self._name} has neither token bytes nor a tokenizer")
        return self.program.token_table

    @property
    def _name(self) -> str:
        return self.program.path.name

    def _check_vocabulary(self, argument: str, ids: Sequence[int]) -> None:
        size = self.program.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            outside = next(token for token in ids if not 0 <= token < size)
            raise FieldError(argument, problem=f"id {outside} is outside the vocabulary [0, {size})")

    def _settings(
        self,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        priority: int = 0,
        draft: int = -1,
        adapter: str | None = None,
        **parameters: Any,
    ) -> tuple[SamplingParameters, Options]:
        try:
            strings = (stop,) if isinstance(stop, str) else tuple(stop)
        except TypeError as error:
            raise SettingError("stop", reprlib.repr(stop), "stop strings") from error
        try:
            own = frozenset(_token_ids(stop_ids))
        except TypeError as error:
            raise SettingError("stop_ids", reprlib.repr(stop_ids), "token ids") from error
        stops = own if ignore_eos else own | self.eos_ids
        unknown = [name for name in parameters if name not in PARAMETERS]
        if unknown:
            raise TypeError(f"{unknown[0]}: unknown parameter, expected one of {', '.join(PARAMETERS)}")
        return SamplingParameters(**parameters), Options(
            max_new_tokens, min_new_tokens, strings, stops, ignore_eos, logprobs, priority, draft, adapter=adapter
        )


def _token_ids(values: Iterable[int]) -> list[int]:
    """Return token ids as Python integers. Raises TypeError for other values; bytes are not token ids."""
    if isinstance(values, (bytes, bytearray)):
        raise TypeError("got bytes")
    return [operator.index(token) for token in values]


def _check_list(argument: str, values: Any) -> None:
    """Raise TypeError for a single element: iteration over a text or a mapping would yield parts of the element."""
    if isinstance(values, (str, bytes, bytearray, Mapping)):
        raise TypeError(f"{argument}: got {reprlib.repr(values)}, expected a list")


def _tokenizer_in(program: LLMProgram) -> Tokenizer | None:
    data = program.data("tokenizer_json")
    if data is None:
        return None
    with reading_tokenizer("tokenizer: cannot read the one in the program"):
        return Tokenizer(data.decode(), json.loads(program.data("tokenizer_config") or b"{}"))


def _eos_ids_in(folder: Path) -> set[int]:
    """Return the token ids that end an answer according to the generation config of a folder, if there is one."""
    config = folder / "generation_config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id") if config.is_file() else None
    return set(found if isinstance(found, list) else [] if found is None else [found])
