"""Training as exported programs: gradients, losses, optimizers, adapters, `export_training` and `finetune`.

A public name is imported when it is first used, because the command line reads `options` without torch.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .export import export_training
    from .finetuning import finetune
    from .gradients import jvp, value_and_grad, vjp
    from .lora import LoRA
    from .losses import cross_entropy, mean_squared_error
    from .optimizer import AdamW, clipped, constant, cosine
    from .program import TrainingProgram

_MODULES = {
    "AdamW": "optimizer",
    "LoRA": "lora",
    "TrainingProgram": "program",
    "clipped": "optimizer",
    "constant": "optimizer",
    "cosine": "optimizer",
    "cross_entropy": "losses",
    "export_training": "export",
    "finetune": "finetuning",
    "jvp": "gradients",
    "mean_squared_error": "losses",
    "value_and_grad": "gradients",
    "vjp": "gradients",
}

__all__ = [*_MODULES]

__getattr__, __dir__ = lazy_names(__name__, _MODULES, quiet=_MODULES)
