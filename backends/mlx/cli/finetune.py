"""`executorch-mlx finetune`"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from .errors import CommandError
from .extras import EXPORT, check_installed
from .files import CHECKPOINTS, check_checkpoint

# Option → what it is. The names and defaults are those of `FinetuneOptions`.
_HELP = {
    "r": "rank of the adapter",
    "alpha": "factor of the adapter, which is divided by the rank",
    "dropout": "probability of dropping an element of an adapter's input",
    "targets": "patterns of the linear layers that get an adapter",
    "batch": "rows of a batch",
    "length": "tokens of a row; longer examples are cut off",
    "steps": "updates of the adapter (default: those of --epochs)",
    "epochs": "how often each example is used",
    "accumulate": "batches for each update",
    "lr": "learning rate",
    "schedule": "learning rate over the steps: cosine or constant",
    "warmup": "steps of the linear warm-up of the learning rate",
    "weight_decay": "decoupled weight decay of AdamW",
    "max_norm": "largest norm of the gradient",
    "validation": "part of the examples that is kept for validation",
    "evaluate_every": "steps between validations",
    "save_every": "steps between saves of the state",
    "patience": "stop after this number of validations without a lower loss, and keep the best adapter; 0: never",
    "quantize": "train on a model in int4 or int8, or none",
    "seed": "seed of the adapter, the order of the examples and dropout",
}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "finetune",
        help="train an adapter of a language model",
        description="Train a LoRA adapter of a language model on chats, completions or text, and write it to a folder "
        "in peft's format. Run the same command again to resume a training that was interrupted.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=CHECKPOINTS)
    add(
        "data",
        metavar="DATA",
        type=Path,
        help="file of JSON lines with messages, prompt and completion, or text; or a folder with train.jsonl and "
        "valid.jsonl",
    )
    add("-o", "--output", required=True, metavar="FOLDER", type=Path, help="folder for the adapter")
    add("--validation-data", metavar="FILE", type=Path, help="file of JSON lines for validation")
    add("--pack", action="store_true", help="put several examples into a row")
    add("--learn-prompt", action="store_true", help="learn the prompts too, not only the answers")
    add("--checkpoint", action="store_true", help="compute intermediate results twice, to save memory")
    for name, default in _defaults().items():
        more = {"nargs": "+"} if name == "targets" else {"type": float if default is None else type(default)}
        shown = " ".join(default) if name == "targets" else default
        note = "" if name == "steps" else f" (default: {shown})"
        text = _HELP[name].replace("%", "%%") + note
        add(f"--{name.replace('_', '-')}", metavar="VALUE", default=argparse.SUPPRESS, help=text, **more)
    parser.set_defaults(run=run)


def _defaults() -> dict[str, Any]:
    from ..training.options import FinetuneOptions

    return {field.name: field.default for field in dataclasses.fields(FinetuneOptions) if field.name in _HELP}


def run(options: argparse.Namespace) -> int:
    check_installed("finetune", "export", EXPORT)
    check_checkpoint(options.model, CHECKPOINTS)
    values = {name: value for name, value in vars(options).items() if name in _HELP}
    values |= {"pack": options.pack, "checkpoint": options.checkpoint, "mask_prompt": not options.learn_prompt}
    from ..training import finetune

    try:
        done = finetune(
            options.model,
            options.data,
            options.output,
            validation_data=options.validation_data,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
            **values,
        )
    except ValueError as error:
        raise CommandError(error) from error
    print(f"{options.output}: adapter after {done.step} steps, last loss {done.rows[-1][1]:.4f}")
    return 0
