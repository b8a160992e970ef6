"""`SpeechModel`: transcribes sound with an exported speech model."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FieldError, SettingError
from ..generation import Generation, Options, Token
from ..program import LLMProgram
from ..sampling_parameters import PARAMETERS, SamplingParameters
from ..scoring import allow_only
from ..tokenizer import Tokenizer
from .audio import read_audio
from .segments import Piece, Segment, TimestampSplitter, quiet_window_length, voiced_spans
from .words import Aligner, Word, split_words, without_pauses

if TYPE_CHECKING:
    import numpy

TASKS = ("transcribe", "translate")
NO_SPEECH_THRESHOLD = 0.6  # as in OpenAI's implementation


class SpeechModel:
    """Transcribes sound with a program that `export_speech` wrote.

        model = SpeechModel("whisper.pte")
        for segment in model.transcribe("talk.flac"):
            print(segment.start, segment.end, segment.text)

    - `device`: `cpu`, `gpu`, or None for the default.

    Attributes:

    - `languages`: the codes of the languages that the model knows; empty if it knows one language only.
    - `tasks`: the tasks that a prompt can name, such as `transcribe` and `translate`; empty if it can name none.
    - `has_timestamps`: whether the model can write timestamps.
    - `sample_rate`: in Hz.
    - `max_seconds`: the length of the longest window.
    - `program`: the loaded program.

    Raises FileNotFoundError if `path` does not exist, ValueError if the file is not a speech model, and RuntimeError if
    ExecuTorch rejects the file.
    """

    def __init__(self, path: str | Path, *, device: str | None = None):
        self.program = LLMProgram(path, device=device)
        config = self.program.data("speech_config")
        if config is None:
            raise ValueError(
                f"SpeechModel: {path}: got a language model, expected a speech model; executorch-mlx run runs it"
            )
        self._config = json.loads(config)
        self.languages: tuple[str, ...] = tuple(self._config["languages"])
        self.tasks: tuple[str, ...] = tuple(self._config["tasks"])
        self.has_timestamps: bool = self._config["timestamp_begin"] is not None
        self.sample_rate: int = self.program.get("speech_sample_rate")
        self._max_samples: int = self.program.get("speech_max_samples")
        self.max_seconds = self._max_samples / self.sample_rate
        self._aligning = threading.Lock()  # the two methods of the aligner belong together
        self.program.start()

    def close(self) -> None:
        """Free the memory of the program. Later calls raise RuntimeError."""
        self.program.close()

    def __enter__(self) -> SpeechModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transcribe(
        self,
        sound: str | Path | numpy.ndarray,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
        prompt: str | None = None,
        voice_activity: bool = False,
        words: bool = False,
        no_speech_threshold: float = NO_SPEECH_THRESHOLD,
        **settings: Any,
    ) -> Iterator[Segment]:
        """Yield the segments of a sound of any length, each as soon as it is complete.

        - `sound`: a file, as `read_audio` reads it, or samples `[N]` at `sample_rate`, from -1 to 1.
        - `language`: the spoken language as a code, such as `de`, or an English name. By default it is detected in the
          first window with speech.
        - `task`: `transcribe`, or `translate` to English.
        - `timestamps`: let the model write timestamps if it can. The next window then begins where the last complete
          segment ends. Without timestamps, each window is one segment, and ends at a quiet place.
        - `prompt`: text that the model takes for what was said before each window: names, the spelling of words, or a
          style.
        - `voice_activity`: leave out parts of the sound that are quiet for longer than a second.
        - `words`: give each segment its words with their times. A window's segments then come together. They have no
          words if their text fills the context. Needs torch, and runs the encoder a second time.
        - `no_speech_threshold`: a window has no segments if the model takes it for one without speech, with a higher
          probability than this. 1 turns this rule off. Moonshine does not have it.
        - `settings`: `max_new_tokens`, the limit for each window, and the fields of `SamplingParameters` that the
          program takes.

        Raises ValueError or SettingError, with the name of the argument in the message, when the iteration begins.
        """
        samples = self._samples(sound)
        timestamps = timestamps and self.has_timestamps
        language = self.language_code(language)
        self.prompt(language, task, timestamps)  # raises the errors of its arguments
        before = [] if prompt is None else self._earlier_text(prompt)
        if words and not self._config.get("align"):
            raise FieldError("words", problem="expected a Whisper that was exported with its alignment heads")
        for seek, stop in voiced_spans(samples) if voice_activity else [(0, len(samples))]:
            while seek < stop:  # `seek` is the first sample of the window
                rest = samples[seek:stop]
                window = rest[: self._max_samples if timestamps else quiet_window_length(rest, self._max_samples)]
                if no_speech_threshold < 1 and self.no_speech_probability(window) > no_speech_threshold:
                    seek += len(window)
                    continue
                if language is None and self.languages:
                    language = self.detect_language(window)
                answer = self._generate(window, before + self.prompt(language, task, timestamps), timestamps, settings)
                segments = self._segments(answer, seek, len(window), language, timestamps)
                if words:
                    segments = self._with_words(segments, window, self.prompt(language, task, False), seek)
                seek += yield from segments

    def generate(
        self,
        samples: numpy.ndarray,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        prompt: list[int] | None = None,
        **settings: Any,
    ) -> Generation:
        """Return the answer for one window, token by token.

        `samples` are those of the window. `prompt` replaces the tokens that the method `prompt` composes. All other
        arguments are those of `transcribe`. Raises ValueError or SettingError.
        """
        samples = self._samples(samples)
        if prompt is None:
            language = self.language_code(language)
            if language is None and self.languages:
                language = self.detect_language(samples)
            prompt = self.prompt(language, task, timestamps)
        return self._generate(samples, prompt, timestamps, settings)

    def detect_language(self, samples: numpy.ndarray) -> str:
        """Return the code of the language that is spoken in the first window of `samples`.

        Raises ValueError if the model has one language only.
        """
        if not self.languages:
            raise ValueError("detect_language: the model has one language only")
        token = self._first_token(samples, self._config["languages"].values())
        return next(code for code, id in self._config["languages"].items() if id == token.id)

    def no_speech_probability(self, samples: numpy.ndarray) -> float:
        """Return how likely the model finds the first window of `samples` to be without speech.

        It is 0 for a model that does not say so, and for a program of an earlier version.
        """
        token = self._config.get("no_speech")
        if token is None or not self.program.logprobs:
            return 0.0
        return math.exp(self._first_token(samples, [token], logprobs=1).logprob)

    def _first_token(self, samples: numpy.ndarray, allowed: Collection[int], logprobs: int | None = None) -> Token:
        """Return the most likely of the tokens `allowed` after the start token, for the first window of `samples`."""
        mask = allow_only(self.program.vocab_size, allowed)
        parameters = SamplingParameters(allowed_tokens=lambda answer: mask)
        options = Options(
            max_new_tokens=1,
            ignore_eos=True,
            allow_suppressed=True,
            samples=self._samples(samples)[: self._max_samples],
            logprobs=logprobs,
        )
        (token,) = Generation(self.program, [self._config["start"]], parameters, options)
        return token

    def _earlier_text(self, text: str) -> list[int]:
        """Return the tokens that precede the start token if `text` was said before: the last that have room.

        Raises ValueError if the model takes no such text.
        """
        if self._config.get("previous") is None:
            raise FieldError("prompt", problem="got text, but this model takes none")
        if self._tokenizer is None:
            raise FieldError("prompt", problem=f"got text, but {self.program.path.name} has no tokenizer")
        self._tokenizer.backend.encode_special_tokens = True  # a special token in the text is text
        tokens = self._tokenizer.encode(f" {text.strip()}", special=False)
        return [self._config["previous"], *tokens[-(self.program.max_context_len // 2 - 1) :]]

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        data = self.program.data("tokenizer_json")
        return None if data is None else Tokenizer(data.decode())

    def language_code(self, language: str | None) -> str | None:
        """Return the code of a language, given by its code or English name. Raises ValueError if it is unknown."""
        if language is None:
            return None
        name = language.lower()
        code = self._config["names"].get(name, name)
        if code not in self.languages:
            known = ", ".join(self.languages) if self.languages else "none: the model has one language only"
            raise FieldError("language", language, known)
        return code

    def prompt(self, language: str | None, task: str, timestamps: bool) -> list[int]:
        """Return the prompt of a window: the tokens that precede an answer.

        `language` is a code, an English name, or None. Raises ValueError for a language or a task that the model does
        not have.
        """
        language = self.language_code(language)
        if task not in (self.tasks or TASKS[:1]):
            raise FieldError("task", task, f"{' or '.join(self.tasks or TASKS[:1])} with this model")
        tokens = [self._config["start"], *self._config["forced"]]
        if language is not None:
            tokens.append(self._config["languages"][language])
        if self.tasks:
            tokens.append(self._config["tasks"][task])
        if not timestamps and self._config["no_timestamps"] is not None:
            tokens.append(self._config["no_timestamps"])
        return tokens

    def _samples(self, sound: Any) -> numpy.ndarray:
        import numpy

        if isinstance(sound, (str, Path)):
            return read_audio(sound, self.sample_rate)
        samples = numpy.asarray(sound)
        if not numpy.issubdtype(samples.dtype, numpy.floating):
            raise FieldError("sound", f"samples of {samples.dtype}", "floating-point numbers from -1 to 1")
        samples = numpy.ascontiguousarray(samples, dtype=numpy.float32)
        if samples.ndim != 1:
            raise FieldError("sound", f"shape {list(samples.shape)}", "samples [N]")
        return samples

    def _generate(self, samples, prompt: list[int], timestamps: bool, settings: dict[str, Any]) -> Generation:
        settings = dict(settings)
        limit = settings.pop("max_new_tokens", None)
        if limit is None and self._config["tokens_per_second"] is not None:
            limit = max(1, int(len(samples) / self.sample_rate * self._config["tokens_per_second"]))
        if unknown := sorted(settings.keys() - PARAMETERS.keys()):
            raise SettingError(unknown[0], problem=f"unknown, expected max_new_tokens, {', '.join(PARAMETERS)}")
        options = Options(max_new_tokens=limit, samples=samples, timestamps=timestamps)
        return Generation(self.program, prompt, SamplingParameters(**settings), options)

    def _segments(self, answer: Generation, seek: int, length: int, language: str | None, timestamps: bool):
        """Yield the segments of an answer, for the window of `length` samples that begins at `seek`.

        Return the distance in samples from this window's begin to that of the next window.
        """
        if not timestamps:
            answer.result()
            yield self._segment(answer.tokens, Piece(0, len(answer.tokens), 0, None), seek, length, language)
            return length
        splitter = TimestampSplitter(self._config["timestamp_begin"])
        for _ in answer:
            if piece := splitter.take(answer.tokens):
                yield self._segment(answer.tokens, piece, seek, length, language)
        rest, timestamp = splitter.finish(answer.tokens)
        if rest is not None:
            yield self._segment(answer.tokens, rest, seek, length, language)
        if timestamp is None:
            return length
        return min(length, max(1, round(timestamp * self._config["seconds_per_timestamp"] * self.sample_rate)))

    def _with_words(self, segments: Generator[Segment, None, int], samples, prompt: list[int], seek: int):
        """Yield `segments`, those of a window of `samples`, with their words, and return what `segments` returns."""
        import numpy

        found: list[Segment] = []
        while True:
            try:
                found.append(next(segments))
            except StopIteration as stop:
                distance = stop.value
                break
        text = [token for segment in found for token in segment.tokens if self.program.token_table[token]]
        padded = numpy.zeros(self._max_samples, dtype=numpy.float32)
        padded[: len(samples)] = samples
        unit = self._config["seconds_per_timestamp"]
        states = -(-len(samples) // round(unit * self.sample_rate))
        tokens = [*prompt, *text, min(self.program.eos_ids)]
        begins: list[int] = []
        if text and len(tokens) <= self.program.max_context_len:
            with self._aligning:
                begins = self._aligner.token_states(padded, tokens, len(prompt), states)
        times = [seek / self.sample_rate + begin * unit for begin in begins]
        first = 0  # of the tokens of the segment in `text`
        for segment in found:
            own = [token for token in segment.tokens if self.program.token_table[token]]
            words, at = [], first
            for count, word in (
                split_words(own, self.program.token_table.__getitem__, segment.language) if times else ()
            ):
                words.append(Word(times[at], times[at + count], word))
                at += count
            first += len(own)
            yield replace(segment, words=without_pauses(words))
        return distance

    @cached_property
    def _aligner(self) -> Aligner:
        return Aligner(self.program.path)

    def _segment(self, tokens: list[int], piece: Piece, seek: int, length: int, language: str | None) -> Segment:
        start, stop = seek / self.sample_rate, (seek + length) / self.sample_rate
        unit = self._config["seconds_per_timestamp"] or 0
        # The model may write a timestamp in the padding after the sound, so times are clamped to the window.
        begin = min(start + piece.begin_time * unit, stop)
        end = stop if piece.end_time is None else min(start + piece.end_time * unit, stop)
        part = tokens[piece.begin : piece.end]
        table = self.program.token_table
        text = "" if table is None else table.text(part)
        return Segment(begin, end, text, tuple(part), language)
