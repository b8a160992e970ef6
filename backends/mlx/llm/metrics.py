"""How fast an answer came, and what it took."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Times are in seconds and count the model's work, not that of who reads the answer.

    `prompt_tokens` counts the whole prompt, `cached_tokens` what of it the KV cache held already;
    `generated_tokens` every token drawn, one that ended the answer included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0  # also the time to the first token: it is drawn by the same call
    generation_seconds: float = 0.0  # of the tokens after the first

    @property
    def time_to_first_token(self) -> float:
        return self.prompt_seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """Of the tokens that the cache did not hold."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prompt_seconds)

    @property
    def generation_tokens_per_second(self) -> float:
        return _rate(self.generated_tokens - 1, self.generation_seconds)

    def as_dict(self) -> dict[str, float]:
        """All of them, with the peaks of memory of this process so far, in bytes."""
        return asdict(self) | {
            "time_to_first_token": self.time_to_first_token,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "generation_tokens_per_second": self.generation_tokens_per_second,
            "peak_resident_bytes": peak_resident(),
            "peak_mlx_bytes": peak_mlx(),
        }

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"prompt: {self.prompt_tokens} tokens{cached}, "
            f"{self.prompt_tokens_per_second:.1f} tokens/s; "
            f"answer: {self.generated_tokens} tokens, "
            f"{self.generation_tokens_per_second:.1f} tokens/s; "
            f"first token after {self.time_to_first_token:.3f} s; peak memory: "
            f"{peak_resident() / 1e6:.0f} MB resident, {peak_mlx() / 1e6:.0f} MB of MLX"
        )


def peak_resident() -> int:
    """The most memory that this process ever had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def peak_mlx() -> int:
    """The most memory that MLX ever had in use for arrays, on whatever device, in bytes."""
    import mlx.core as mx  # only now: the delegate has to be loaded before

    return mx.get_peak_memory()


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
