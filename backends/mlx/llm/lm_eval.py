"""The adapter with which the package `lm-eval` evaluates an exported language model on tasks.

    lm_eval.simple_evaluate(model=LMEvalModel("model.pte"), tasks=["arc_easy"])

On the command line, this module takes the arguments of `lm_eval` and knows the model `executorch-mlx`:

    python -m executorch_mlx.llm.lm_eval run --model executorch-mlx --model_args model=model.pte --tasks arc_easy
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from .generation import Generation
from .llm import LLM

# The generation settings of lm-eval's tasks that are sampling parameters of the same name.
PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@register_model("executorch-mlx")
class LMEvalModel(TemplateLM):
    """An exported language model for lm-eval.

    - `model`: the path of the `.pte` file, or an `LLM`.
    - `tokenizer`: a Hugging Face folder; by default the tokenizer in the file.
    - `max_gen_toks`: the maximum length of an answer in tokens, for tasks that do not set one.
    - `device`: `cpu`, `gpu`, or None for the default.

    The beginning of a prompt that is too long is dropped. Raises ValueError if there is no tokenizer, and the errors
    of `LLM.load`.
    """

    def __init__(
        self,
        model: str | Path | LLM,
        tokenizer: str | Path | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,  # lm-eval passes it; it has no effect, because the program determines its rows
        device: str | None = None,
        **_: Any,
    ):
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM.load(model, tokenizer, device=device)
        if self.llm.tokenizer is None:
            raise ValueError(f"tokenizer: {self.llm.program.path.name} has none, expected a Hugging Face folder")
        self.tokenizer = self.llm.tokenizer
        self.max_gen_toks = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        if not self.llm.eos_ids:
            raise ValueError(f"stop ids: {self.tokenizer_name} has none, expected at least one")
        return min(self.llm.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        bos = self.llm.program.get("get_bos_id", -1)
        return self.eot_token_id if bos < 0 else bos

    @property
    def tokenizer_name(self) -> str:
        return self.llm.program.path.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template may have put the first special token in front already
            bos = self.tokenizer.special_tokens.get("bos_token")
            add_special_tokens = bos is None or not string.startswith(bos)
        return self.llm.encode(string, special=add_special_tokens)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        # Without the prompt, the last message is the beginning of an answer.
        return self.tokenizer.chat_text(chat_history, continue_final_message=not add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        results: dict[int, tuple[float, bool]] = {}
        # In this order, consecutive requests have the longest common prefixes, which are not computed again.
        for index in sorted(range(len(requests)), key=lambda index: requests[index][1]):
            texts, context, continuation = requests[index]
            results[index] = self._score(context, continuation)
            self.cache_hook.add_partial("loglikelihood", texts, results[index])
        return [results[index] for index in range(len(requests))]

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        room = self.llm.program.max_context_len + 1 - len(continuation)  # the last token needs no position
        (score,) = self.llm.score(context[-room:] if room > 0 else context[:0], [continuation])
        return score.logprob, score.is_greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        return [self._rolling(text) for (text,) in (request.args for request in requests)]

    def _rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.llm.program.max_context_len,
            context_len=1,
        )
        return sum(self._score(*make_disjoint_window(window))[0] for window in windows)

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        answers = [self._answer(*request.args) for request in requests]  # all run at once
        return [answer.result().text for answer in answers]

    def _answer(self, context: str, settings: Mapping[str, Any]) -> Generation:
        count = int(settings.get("max_gen_toks", settings.get("max_new_tokens", self.max_gen_toks)))
        until = settings.get("until") or []
        parameters = {name: settings[name] for name in PARAMETERS if name in settings}
        if settings.get("do_sample", parameters.get("temperature", 0) > 0):
            parameters.setdefault("temperature", 1.0)  # the default of transformers
        else:
            parameters = {}
        room = self.llm.program.max_context_len - count
        if room < 1:
            raise ValueError(
                f"max_gen_toks: got {count}, expected less than the context of {self.llm.program.max_context_len} "
                "tokens, which also holds the prompt"
            )
        prompt = self.tok_encode(context)[-room:]
        stop = [until] if isinstance(until, str) else [text for text in until if text]
        return self.llm.generate(prompt, max_new_tokens=count, stop=stop, **parameters)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
