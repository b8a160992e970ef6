"""The table of the options of an export.

`ExportOptions` holds the options of one export, and `HeadConfig` those of its sampling head. The two classes are the
table: the metadata of a field is an `OptionSpec`. `export_llm`, `export_speech`, `executorch-mlx export` and the checks
read the table, and a test compares docs/language-models.md with it.

This module does not import torch, so that `--help` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..weights_file import check_name
from .errors import OptionError
from .sampling_parameters import SCALARS, mask_word_count

if TYPE_CHECKING:
    import torch

TEXT, SPEECH, ENCODER = "language", "speech", "encoder"  # the kinds of models
_ALL = (TEXT, SPEECH, ENCODER)
QUANTIZED = ("int4", "int8", "mixed", "nvfp4", "mxfp4", "mxfp8")
GROUPED = ("int4", "int8")  # the quantizations that take a group size
DEFAULT_SECONDS = 30.0


@dataclass(frozen=True)
class OptionSpec:
    """The entry of the table for one option.

    - `help`: the line for the command line.
    - `group`: the title under which the command line lists the option.
    - `default`, `default_text`: its default, and how the command line names it.
    - `type`: reads an argument of the command line.
    - `choices`, `low`, `above`: the permitted values: these, those of at least `low`, or those of more than `above`.
    - `models`: the kinds of models that take the option.
    - `text_only`: those of the `choices` that only a language model takes.
    - `needs`: another option, and the values of it that permit this option.
    - `metavar`: the name of the argument on the command line.
    - `flags`: of an option without an argument on the command line, its flags there → their values.
    """

    help: str
    group: str = ""
    default: Any = None
    default_text: str | None = None
    type: Callable[[str], Any] = str
    choices: tuple = ()
    low: float | None = None
    above: float | None = None
    models: tuple[str, ...] = (TEXT, SPEECH)
    text_only: tuple = ()
    needs: tuple[str, tuple] | None = None
    metavar: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> None:
        """Raise OptionError if `value` is not permitted."""
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise OptionError(name, value, ", ".join(map(str, self.choices)))
        if self.low is not None and not value >= self.low:
            raise OptionError(name, value, f"at least {self.low}")
        if self.above is not None and not value > self.above:
            raise OptionError(name, value, f"more than {self.above}")


def _option(default: Any, help: str, **spec: Any) -> Any:
    return field(default=default, metadata={"spec": OptionSpec(help, default=default, **spec)})


def _specs(table: type) -> dict[str, OptionSpec]:
    return {entry.name: entry.metadata["spec"] for entry in fields(table) if "spec" in entry.metadata}


def _window(argument: str) -> str | int:
    """Read the argument of `--sliding-window`. `ExportOptions` refuses other texts than `auto`."""
    return int(argument) if argument.isdecimal() else argument


def _names(argument: str) -> tuple[str, ...]:
    return tuple(name for name in argument.split(",") if name)


_HEAD = "outputs and sampling"


@dataclass(frozen=True)
class HeadConfig:
    """The optional inputs of a program's sampling head. An input that is left out costs nothing.

    `temperature` and `top_p` are always inputs. `penalties` is the number of last tokens in which the
    penalties count occurrences. `logit_bias` is the largest number of tokens with a bias. `logprobs` is the number
    of most likely tokens whose log probabilities the program can return. If one of these three
    numbers is 0, the program lacks the inputs for it.

    Raises ValueError for a negative number.
    """

    seed: bool = _option(
        True,
        "whether the program has an input for the seed; without one, draws differ from run to run",
        group=_HEAD,
        flags={"--seeded": True, "--unseeded": False},
    )
    top_k: bool = True
    min_p: bool = True
    penalties: int = _option(
        0,
        "a window of N tokens: give the program inputs for repetition, presence and frequency penalties, which count "
        "the last N tokens of prompt and answer",
        group=_HEAD,
        type=int,
        low=0,
        models=(TEXT,),
        metavar="N",
        default_text="0, no penalties",
    )
    logit_bias: int = _option(
        0,
        "give the program an input for logit biases of up to K tokens",
        group=_HEAD,
        type=int,
        low=0,
        metavar="K",
        default_text="0, no biases",
    )
    allowed_tokens: bool = _option(
        False,
        "give the program an input for a mask of the tokens that may be drawn",
        group=_HEAD,
        flags={"--allowed-tokens": True},
    )
    logprobs: int = _option(
        0,
        "let the program return log probabilities: of the drawn token and of the K most likely tokens",
        group=_HEAD,
        type=int,
        low=0,
        metavar="K",
        default_text="0, none",
    )

    def __post_init__(self):
        for name, spec in _specs(HeadConfig).items():
            spec.check(f"head.{name}", getattr(self, name))

    @classmethod
    def minimal(cls) -> HeadConfig:
        """Return the config of a head with `temperature` and `top_p` only."""
        return cls(seed=False, top_k=False, min_p=False)

    def logits_processors(self) -> list[str]:
        """The names of the enabled logits processors: the fields above that change the logits before the filters."""
        return [name for name in ("penalties", "logit_bias", "allowed_tokens") if getattr(self, name)]

    def inputs(self, batch: int, vocab_size: int, *, per_row: bool = False) -> dict[str, torch.Tensor]:
        """Return example inputs of the head by name, in the order in which the method takes them.

        All have their off values. `batch` is the number of draws in a call. With `per_row`, each draw has values of its
        own: every input has a first dimension of size `batch`. Otherwise, only `allowed_tokens` has this dimension.
        """
        import torch

        metadata = self.metadata()
        inputs = {n: s.tensor() for n, s in SCALARS.items() if s.metadata is None or metadata[s.metadata]}
        if self.logit_bias:
            inputs["bias_tokens"] = torch.zeros(self.logit_bias, dtype=torch.int64)
            inputs["bias_values"] = torch.zeros(self.logit_bias)
        if self.logprobs:
            inputs["logprobs"] = torch.tensor(0)
        if per_row:
            inputs = {name: value.expand(batch, *value.shape).clone() for name, value in inputs.items()}
        if self.allowed_tokens:
            inputs["allowed_tokens"] = torch.full((batch, mask_word_count(vocab_size)), -1, dtype=torch.int32)
        # `logprobs` is the last input.
        return {name: inputs[name] for name in sorted(inputs, key=lambda name: name == "logprobs")}

    def metadata(self) -> dict[str, bool | int]:
        """Return the metadata methods that describe the head, name → value."""
        return {
            "sampling_seed": self.seed,
            "sampling_top_k": self.top_k,
            "sampling_min_p": self.min_p,
            "sampling_penalties": self.penalties > 0,
            "sampling_history": self.penalties,
            "sampling_logit_bias": self.logit_bias,
            "sampling_allowed_tokens": self.allowed_tokens,
            "sampling_logprobs": self.logprobs,
        }


# What a portable program can have, and why it can have nothing else.
_ONE_METHOD = "a portable program has one method, because methods share no caches on ExecuTorch's own MLX delegate"
_PORTABLE = {
    "batch": ((1,), "a portable program answers one request at a time"),
    "outputs": (("tokens", "logits"), _ONE_METHOD),
    "adapters": ((0,), _ONE_METHOD),
    "allow_extensions": ((False,), "ExecuTorch's own MLX delegate lacks these IR nodes"),
}


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export, with their defaults. A speech model and an encoder take those that say so.

    - `adapter`: a folder of `peft` or mlx-lm with a LoRA adapter to merge into the weights.
    - `adapters`: room for this number of LoRA adapters, which are loaded while the program runs, and of which each
      request names one or none. `lora_rank` is their largest rank. `adapter_targets` are the layers that have adapters:
      names such as `q_proj`, or patterns of paths such as `model.layers.*.mlp.*`; by default all linear layers of the
      decoder layers.
    - `dtype`: the dtype of the weights and of the computation, or its name, for language and speech models; by default
      float32, or the dtype of a loaded model.
    - `quantize`: `int4` or `int8` in groups of `group_size` (32, 64 or 128; by default 32); `mixed`, which
      has 4 bits but keeps sensitive layers wider; `nvfp4`, `mxfp4` or `mxfp8`; or `none`. The embedding
      and the output projection get 8 bits. A speech model takes all but `mixed`. Its convolutions stay in full
      precision.
    - `calibrate`: a text file. With `int4`, `int8` or `mixed`, the layers are tuned, one after the other, to their
      inputs on this text. By default, no layer is tuned. Below 8 bits, the quantization then weights its errors by the
      inputs on a part of Python's documentation.
    - `activations`: `float`; or `int8`: the linear layers with affine weights of 4 or 8 bits round their inputs to
      8 bits. Use `allow_extensions` as well: a kernel for Linux CPUs then multiplies the integers.
    - `max_context_len`: capacity of the KV caches in positions; by default the limit of the model, as far as all rows
      of the caches fit into half of the memory of this machine, and at most 4096 with `portable`. If attention chooses
      keys with an index, the limit is the number of keys that it chooses. Of a speech model, it is the capacity of the
      cache of tokens. Of an encoder, it is the largest number of tokens of a text; longer texts are cut.
    - `chunk`: the largest number of tokens in one call; by default 2048, or 512 for a model with sliding windows.
      Runners split longer prompts. The engine feeds at most 512 tokens in a call on a CPU.
    - `sliding_window`: `auto` follows the config of the model; a number is the window of every
      layer in positions, where 0 stands for no window.
    - `batch`: number of rows of the KV caches: the sequences that the program can decode side by side.
    - `kv_bits`: 8 or 4 for quantized KV caches, or 16 for float16 in place of float32. By default, the caches have the
      dtype of the model.
    - `max_seconds`: the longest sound of a call of Moonshine, in seconds. Whisper's length is fixed.
    - `outputs`: `tokens`; `logits`; or `both`, as several methods.
    - `speculation`: whether a program that returns tokens has the method `verify`, which checks draft tokens.
    - `head`: the sampling parameters that the program takes as inputs. A speech model always has `allowed_tokens`, and
      cannot have penalties.
    - `allow_extensions`: use IR nodes that ExecuTorch's own MLX delegate lacks, for language and speech models. That
      delegate then cannot run the program.
    - `portable`: make a program that gives the same values on ExecuTorch's own MLX delegate. It has a single method,
      `forward`, and one row, because methods share no caches there; `speculation` has no effect. What that delegate
      would compute differently is an error.
    - `pictures`: whether the program takes pictures. By default, it does if the folder of a model for text and pictures
      has the settings of its processor and the family is supported; otherwise, a note says why it does not.
    - `rerank`: of a causal language model that judges documents with `yes` and `no`, make a reranker: an encoder.
    - `verify`: whether `save` compares the finished file with the eager model, for language and speech models. The
      model stays in memory until then.

    Raises OptionError, a ValueError, with the name of the option.
    """

    dtype: torch.dtype | str | None = _option(
        None,
        "dtype of weights and computation",
        group="weights",
        choices=("float32", "float16", "bfloat16"),
        models=_ALL,
        default_text="float32",
    )
    quantize: str = _option(
        "none",
        "quantize linear layers and embeddings; mixed has 4 bits and keeps sensitive layers wider",
        group="weights",
        choices=("none", *QUANTIZED),
        text_only=("mixed",),
        models=_ALL,
    )
    group_size: int | None = _option(
        None,
        "number of weights that share a quantization scale",
        group="weights",
        type=int,
        choices=(32, 64, 128),
        models=_ALL,
        needs=("quantize", GROUPED),
        default_text="32",
    )
    calibrate: str | Path | None = _option(
        None,
        "measure the model on the text in this file instead of a part of Python's documentation; with int4, int8 "
        "and mixed, also tune the weights on this text, which takes longer",
        group="weights",
        type=Path,
        models=(TEXT,),
        needs=("quantize", QUANTIZED),
        metavar="FILE",
    )
    activations: str = _option(
        "float",
        "int8 rounds the inputs of the quantized linear layers to 8 bits, which is faster on a CPU with "
        "--allow-extensions",
        group="weights",
        choices=("float", "int8"),
        models=(TEXT,),
    )
    adapter: str | Path | None = _option(
        None,
        "merge the LoRA adapter in this folder of peft or mlx-lm",
        group="weights",
        type=Path,
        models=(TEXT,),
        metavar="DIR",
    )
    adapters: int = _option(
        0,
        "room for N LoRA adapters, which are loaded while the program runs and which each request chooses among",
        group="weights",
        type=int,
        low=0,
        models=(TEXT,),
        metavar="N",
        default_text="0, none",
    )
    lora_rank: int = _option(
        16, "the largest rank of these adapters", group="weights", type=int, low=1, models=(TEXT,), metavar="R"
    )
    adapter_targets: Sequence[str] | None = _option(
        None,
        "the layers that have such adapters, separated by commas: names such as q_proj, or patterns of paths",
        group="weights",
        type=_names,
        models=(TEXT,),
        metavar="NAMES",
        default_text="all linear layers of the decoder layers",
    )
    weights_file: str | None = _option(
        None,
        "store the weights beside the program, in the file NAME, such as model.ptd, which other programs can share",
        group="weights",
        models=_ALL,
        metavar="NAME",
        default_text="in the program",
    )
    max_context_len: int | None = _option(
        None,
        "capacity of the KV caches in positions; of an encoder, the largest number of tokens of a text",
        group="sizes",
        type=int,
        models=_ALL,
        metavar="N",
        default_text="the model's limit, as far as all rows fit into half of the memory; at most 4096 with --portable",
    )
    sliding_window: str | int = _option(
        "auto",
        "attention window of every layer in positions, 0 for none",
        group="sizes",
        type=_window,
        models=(TEXT,),
        metavar="N",
        default_text="auto, as in the model's config",
    )
    chunk: int | None = _option(
        None,
        "largest number of tokens in one call",
        group="sizes",
        type=int,
        low=2,
        models=(TEXT,),
        metavar="N",
        default_text="2048; 512 for a model with sliding windows",
    )
    batch: int = _option(
        1,
        "rows of the KV caches: requests that the program serves side by side",
        group="sizes",
        type=int,
        low=1,
        models=(TEXT,),
        metavar="N",
        default_text="4; 1 with --portable, and with --outputs logits or both, as ExecuTorch's own runner expects",
    )
    kv_bits: int | None = _option(
        None,
        "16: KV caches of float16 in place of float32; 8 or 4: quantize the KV caches",
        group="sizes",
        type=int,
        choices=(16, 8, 4),
        models=(TEXT,),
        default_text="the dtype of the model",
    )
    max_seconds: float = _option(
        DEFAULT_SECONDS,
        "speech models that take sounds of different lengths: the longest sound that one call takes",
        group="sizes",
        type=float,
        above=0,
        models=(SPEECH,),
        metavar="S",
        default_text="30",
    )
    outputs: str = _option(
        "tokens", "what the program returns", group=_HEAD, choices=("tokens", "logits", "both"), models=(TEXT,)
    )
    head: HeadConfig = HeadConfig()
    speculation: bool = _option(
        True,
        "leave out the method that checks draft tokens: the program is smaller, and answers need a call per token",
        group=_HEAD,
        models=(TEXT,),
        flags={"--no-speculation": False},
    )
    allow_extensions: bool = _option(
        False,
        "use IR nodes that ExecuTorch's own MLX delegate lacks; that delegate then cannot run the file",
        models=_ALL,
        flags={"--allow-extensions": True},
    )
    portable: bool = _option(
        False,
        "write a file that gives the same values on ExecuTorch's own MLX delegate, which phones have: one method, "
        "one row, no speculation; what would differ there is an error",
        models=(TEXT, ENCODER),
        flags={"--portable": True},
    )
    pictures: bool | None = _option(
        None,
        "whether the program takes pictures; by default, if the folder has a processor of pictures that is supported",
        models=(TEXT,),
        flags={"--pictures": True, "--no-pictures": False},
        default_text="if the model is supported",
    )
    rerank: bool = _option(
        False,
        "MODEL is a causal language model that judges documents with `yes` and `no`, such as Qwen3-Reranker: export a "
        "reranker",
        models=(ENCODER,),
        flags={"--rerank": True},
    )
    verify: bool = _option(
        True, "write the file without comparing it with the eager model", models=_ALL, flags={"--no-verify": False}
    )

    def __post_init__(self):
        for name, spec in _specs(ExportOptions).items():
            value = getattr(self, name)
            if name != "dtype" or isinstance(value, str):
                spec.check(name, value)
            if spec.needs is not None and value is not None:
                other, values = spec.needs
                if (got := getattr(self, other)) not in values:
                    needs = f"{other} {', '.join(values[:-1])} or {values[-1]}"
                    raise OptionError(name, f"{value} with {got}", needs, needs)
        if self.sliding_window != "auto" and not (isinstance(self.sliding_window, int) and self.sliding_window >= 0):
            raise OptionError("sliding_window", self.sliding_window, "'auto' or a number of positions")
        if self.weights_file is not None:
            try:
                check_name(self.weights_file)
            except ValueError as error:
                raise OptionError("weights_file", self.weights_file, str(error).partition("expected ")[2]) from error
        self._check_outputs()
        for name, (values, reason) in _PORTABLE.items() if self.portable else ():
            if (got := getattr(self, name)) not in values:
                expected = f"{' or '.join(map(str, values))}: {reason}"
                raise OptionError(name, f"{got} with portable", expected)

    def _check_outputs(self) -> None:
        processors = self.head.logits_processors() + (["logprobs"] if self.head.logprobs else [])
        if self.outputs == "logits" and processors:
            raise OptionError(
                f"head.{processors[0]}",
                f"{getattr(self.head, processors[0])} with outputs 'logits'",
                "outputs 'tokens' or 'both'; a program that returns logits supports it on the host",
            )

    def value(self, name: str) -> Any:
        """Return the value of an option of the table."""
        return getattr(self.head if name in HEAD_OPTIONS else self, name)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype as torch has it."""
        import torch

        return getattr(torch, self.dtype) if isinstance(self.dtype, str) else self.dtype

    @classmethod
    def of(cls, function: str, model: str, values: Mapping[str, Any]) -> ExportOptions:
        """Return the options of a call of `function`, which exports a model of the kind `model`, such as `TEXT`.

        Raises ValueError for an invalid option, and for one that this kind of model does not take.
        """
        try:
            options = cls(**values)
            for name, spec in OPTIONS.items():
                got, path = options.value(name), f"head.{name}" if name in HEAD_OPTIONS else name
                if model not in spec.models and got != spec.default:
                    raise OptionError(path, got, f"{spec.default} for a {model} model")
                if model != TEXT and got in spec.text_only:
                    choices = (str(choice) for choice in spec.choices if choice not in spec.text_only)
                    raise OptionError(path, got, ", ".join(choices))
        except OptionError as error:
            raise ValueError(f"{function}: {error}") from error
        return options


HEAD_OPTIONS = _specs(HeadConfig)
OPTIONS = _specs(ExportOptions) | HEAD_OPTIONS  # all that the command line has
