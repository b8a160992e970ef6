"""`FinetuneOptions`: the settings of `finetune`. The command line reads them without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOWEST = {
    **dict.fromkeys(("r", "batch", "length", "accumulate", "evaluate_every", "save_every"), 1),
    **dict.fromkeys(("steps", "warmup", "weight_decay", "patience"), 0),
}
ABOVE_ZERO = ("alpha", "lr", "epochs", "max_norm")
CHOICES = {"schedule": ("constant", "cosine"), "quantize": ("none", "int4", "int8")}


@dataclass(frozen=True)
class FinetuneOptions:
    """The settings of `finetune`.

    - `r`, `alpha`, `dropout`, `targets`: the adapter, as in `LoRA`.
    - `batch`, `length`: rows of a batch, and tokens of a row; longer examples are cut off.
    - `steps`: updates of the parameters; with 0, those of `epochs`.
    - `accumulate`: batches for each update.
    - `lr`, `schedule`, `warmup`: the learning rate, `cosine` or `constant`, and the steps of its linear warm-up.
    - `weight_decay`, `max_norm`: of AdamW.
    - `pack`: put several examples into a row. `mask_prompt`: learn answers only.
    - `validation`: the part of the examples that is kept for validation, if there is no file with them.
    - `evaluate_every`, `save_every`: steps between validations, and between saves of the state.
    - `patience`: stop after this number of validations without a lower loss, and keep the best adapter. 0: never.
    - `checkpoint`: compute intermediate results of the layers twice, to save memory.
    - `quantize`: `int4` or `int8` for the weights of the model, or `none`.
    - `seed`: of the adapter, the order of the examples and dropout.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Sequence[str] = ("*_proj",)
    batch: int = 4
    length: int = 512
    steps: int = 0
    epochs: float = 1.0
    accumulate: int = 1
    lr: float = 1e-4
    schedule: str = "cosine"
    warmup: int = 0
    weight_decay: float = 0.0
    max_norm: float | None = 1.0
    pack: bool = False
    mask_prompt: bool = True
    validation: float = 0.05
    evaluate_every: int = 100
    save_every: int = 50
    patience: int = 0
    checkpoint: bool = False
    quantize: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in LOWEST.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ValueError(f"finetune: {name}: got {value}, expected at least {low}")
        for name in ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"finetune: {name}: got {value}, expected a number above 0")
        for name in ("dropout", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"finetune: {name}: got {getattr(self, name)}, expected 0 up to 1, exclusive")
        for name, expected in CHOICES.items():
            if getattr(self, name) not in expected:
                raise ValueError(
                    f"finetune: {name}: got {getattr(self, name)!r}, expected one of {', '.join(expected)}"
                )
