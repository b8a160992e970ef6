"""Metrics of an answer: token counts and times, and the memory of the process."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass

from .. import memory


@dataclass(frozen=True)
class Metrics:
    """Numbers of tokens, and times in seconds.

    - `prompt_tokens`: the number of tokens in the prompt.
    - `cached_tokens`: the number of tokens of the prompt that were in the KV cache already.
    - `generated_tokens`: the number of generated tokens, including a stop id.
    - `drafted_tokens`, `accepted_tokens`: the number of draft tokens, and how many of them were accepted.
    - `calls`: the number of calls that drew the tokens; without speculation, one for each token.
    - `queue_seconds`: the time from the request to its first chunk.
    - `prompt_seconds`: the time of the prefill, which also draws the first token.
    - `generation_seconds`: the time of all steps after the first token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    calls: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        """The time from the request to the first token."""
        return self.queue_seconds + self.prompt_seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """The speed of the prefill. Tokens that were in the KV cache do not count."""
        return _ratio(self.prompt_tokens - self.cached_tokens, self.prompt_seconds)

    @property
    def generation_tokens_per_second(self) -> float:
        """The speed of the tokens after the first."""
        return _ratio(self.generated_tokens - 1, self.generation_seconds)

    @property
    def tokens_per_call(self) -> float:
        """The number of tokens that one call drew on average."""
        return _ratio(self.generated_tokens, self.calls)

    def as_dict(self) -> dict[str, float]:
        """Return all metrics by name, and the peak memory of this process so far, in bytes."""
        return asdict(self) | {
            "time_to_first_token": self.time_to_first_token,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "generation_tokens_per_second": self.generation_tokens_per_second,
            "tokens_per_call": self.tokens_per_call,
            "peak_resident_bytes": peak_resident(),
            "peak_mlx_bytes": memory.get_peak_memory(),
        }

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        accepted = f" ({self.accepted_tokens} of {self.drafted_tokens} drafts accepted)" if self.drafted_tokens else ""
        return (
            f"prompt: {self.prompt_tokens} tokens{cached}, "
            f"{self.prompt_tokens_per_second:.1f} tokens/s; "
            f"answer: {self.generated_tokens} tokens{accepted}, "
            f"{self.generation_tokens_per_second:.1f} tokens/s; "
            f"first token after {self.time_to_first_token:.3f} s; peak memory: "
            f"{peak_resident() / 1e6:.0f} MB resident, {memory.get_peak_memory() / 1e6:.0f} MB in MLX arrays"
        )


def peak_resident() -> int:
    """Return the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB


def _ratio(count: int, divisor: float) -> float:
    return count / divisor if count > 0 and divisor > 0 else 0.0
