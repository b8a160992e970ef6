"""`export_training`: a model and the settings of its training → a program with the methods of a training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchProgramManager
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from torch.export import default_decompositions
from torch.utils.checkpoint import checkpoint

from ..collector import paused_collector
from ..partitioner import MLXPartitioner
from ..quiet import quiet_lowering
from ..weights_file import check_name, methods
from .fused import fuse_norms
from .lora import LoRA, add_adapters
from .optimizer import AdamW
from .program import SETTINGS
from .step import Forward, TrainingModule, logits_of

OPTIMIZERS = {"adamw": AdamW}


@paused_collector()
def export_training(
    model: torch.nn.Module,
    *,
    lora: LoRA | None = LoRA(),  # noqa: B008  (frozen)
    optimizer: str | AdamW = "adamw",
    batch: int = 1,
    length: int = 128,
    seed: int = 0,
    accumulate: bool = False,
    checkpoint_layers: Sequence[torch.nn.Module] = (),
    forward: Forward = logits_of,
    weights_file: str | None = None,
) -> ExecutorchProgramManager:
    """Export the training of `model`, a module that takes tokens `[B, T]` and returns logits `[B, T, V]`.

    The program has these methods. `tokens` and `targets` are int64 `[batch, length]`, `mask` float32 of the same shape,
    and the loss is the mean of the cross-entropy of the targets, weighted by `mask`:

    - `train_step(tokens, targets, mask, lr, step)` → loss before the step. `lr` is a float32 and `step`, which begins
      with 1, an int64 of shape [].
    - `eval_loss(tokens, targets, mask)` → loss.
    - `read_state()` → parameters, mean, square; `write_state(parameters, mean, square)`. They are the trained
      parameters and AdamW's averages of the gradients and of their squares, each a float32 vector.
    - with `accumulate` also `accumulate(tokens, targets, mask, step)` → loss, which adds the gradient to a sum, and
      `apply(lr, step)`, which updates the parameters by the mean.

    The arguments:

    - `lora`: the adapters that are trained. Changes `model` in place. With None, all parameters are trained that
      require a gradient.
    - `optimizer`: `adamw`, or an `AdamW` with other settings.
    - `seed`: of the initial adapters and of dropout.
    - `checkpoint_layers`: submodules whose intermediate results are computed again in the backward pass, which takes
      less memory and more time.
    - `forward`: a function of the model and the tokens that returns the logits.
    - `weights_file`: the name of a `.ptd` file for the weights, which `save_program` writes beside the `.pte`. With the
      name of that of a program for inference in the same folder, both programs share the weights that are equal.

    Raises ValueError for settings that do not fit the model, and RuntimeError if MLX cannot run all operators.
    """
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"export_training: optimizer: got {optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        optimizer = OPTIMIZERS[optimizer]()
    if weights_file is not None:
        check_name(weights_file)
    dtypes = _trained_dtypes(model.eval(), lora, seed)
    fuse_norms(model)
    for layer in checkpoint_layers:
        _checkpoint(layer)
    module = TrainingModule(
        model, list(dtypes), optimizer, dtypes=dtypes, forward=forward, seed=seed, accumulates=accumulate
    )
    programs = {
        name: torch.export.export(_Method(module, name), inputs)
        for name, inputs in _example_inputs(module, batch, length).items()
    }
    settings = {
        "batch": batch,
        "length": length,
        "accumulate": accumulate,
        "lora": None if lora is None else {**vars(lora), "targets": list(lora.targets)},
        "tensors": {name: list(shape) for name, shape in zip(module.names, module.shapes)},
    }
    return _lower(programs, settings, weights_file)


def _trained_dtypes(model: torch.nn.Module, lora: LoRA | None, seed: int) -> dict[str, torch.dtype]:
    """Add the adapters to `model`. Return the names of the trained tensors, with the dtype that the model uses."""
    if lora is not None:
        layers = add_adapters(model, lora, seed)
        return {f"{path}.{name}": layer.dtype for path, layer in layers.items() for name in ("lora_A", "lora_B")}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not dtypes:
        raise ValueError("export_training: model: got no parameter that requires a gradient, expected at least one")
    return dtypes


class _Method(torch.nn.Module):
    def __init__(self, training: TrainingModule, name: str):
        super().__init__()
        self.training_module, self.name = training, name

    def forward(self, *inputs: torch.Tensor) -> Any:
        return getattr(self.training_module, self.name)(*inputs)


def _example_inputs(module: TrainingModule, batch: int, length: int) -> dict[str, tuple[torch.Tensor, ...]]:
    # torch.export takes two inputs that are one tensor for one input.
    tokens, targets = (torch.zeros(batch, length, dtype=torch.int64) for _ in range(2))
    mask, lr, step = torch.ones(batch, length), torch.tensor(1e-3), torch.tensor(1)
    state = tuple(torch.zeros_like(module.parameters_) for _ in range(3))
    inputs: dict[str, tuple] = {
        "train_step": (tokens, targets, mask, lr, step),
        "eval_loss": (tokens, targets, mask),
        "read_state": (),
        "write_state": state,
    }
    if module.accumulates:
        inputs |= {"accumulate": (tokens, targets, mask, step), "apply": (lr, step)}
    return inputs


def _checkpoint(layer: torch.nn.Module) -> None:
    """Let `layer` compute its intermediate results again in the backward pass."""
    forward: Callable = layer.forward

    def recomputed(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    layer.forward = recomputed


def _lower(
    programs: dict[str, torch.export.ExportedProgram], settings: dict, weights_file: str | None
) -> ExecutorchProgramManager:
    """Lower the methods to MLX, and add the settings. Raises RuntimeError if MLX cannot run all operators.

    The delegate reads the ATen dialect, so that the programs need not become edge programs, which takes longer than the
    rest of the export.
    """
    partitioner = MLXPartitioner(allow_extensions=True, weights_file=weights_file)
    constants = {SETTINGS: torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)}
    constants |= methods(weights_file)
    config = EdgeCompileConfig(_check_ir_validity=False)
    with quiet_lowering():
        decomposed = {name: _decomposed(program, partitioner) for name, program in programs.items()}
        try:
            lowered = EdgeProgramManager(decomposed, constants, config).to_backend(partitioner)
            report = partitioner.explain()
        except RuntimeError:
            report = partitioner.explain()
            if not report.refused:
                raise
        if report.refused or report.kept_buffers:
            raise RuntimeError(f"export_training: MLX cannot run the whole step:\n{report}")
        return lowered.to_executorch()


def _decomposed(program: torch.export.ExportedProgram, partitioner: MLXPartitioner) -> torch.export.ExportedProgram:
    """Return a functional program in which only operators with a handler of the delegate are not decomposed."""
    program = partitioner.transform_for_pre_decomposition(program)
    preserved = partitioner.lowered_targets(program)
    table = {t: f for t, f in default_decompositions().materialize().items() if t not in preserved}
    return remove_unused_parameters_pass(program.run_decompositions(table))
