"""`TrainingModule`: the methods of a training program as functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from .gradients import call_with, value_and_grad
from .lora import set_dropout_seeds
from .losses import summed_cross_entropy
from .optimizer import AdamW

# Logits of a model, from tokens [B, T].
Forward = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of a causal language model of transformers, or of a module that returns logits."""
    if hasattr(model, "get_output_embeddings"):
        return model(input_ids=tokens, use_cache=False).logits
    return model(tokens)


class TrainingModule(torch.nn.Module):
    """A model with its trained parameters and the state of their optimizer.

    The trained tensors of the model, whose names are `names`, are parts of one float32 vector, the buffer
    `parameters_`, in this order. The optimizer's averages of gradients and of their squares are the buffers `mean` and
    `square`. One update of three long vectors takes fewer instructions than one for each tensor. So does one cast of
    the vector: the model gets the tensors in `dtypes`, by name, or in their own dtype. With `accumulates`,
    there is a fourth vector, `sums`, with the sum of gradients, and `count`, the number of tokens in this sum.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        optimizer: AdamW,
        *,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        forward: Forward = logits_of,
        seed: int = 0,
        accumulates: bool = False,
    ):
        super().__init__()
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.model, self.names, self.optimizer, self.seed = model, tuple(names), optimizer, seed
        self.shapes = [tensors[name].shape for name in self.names]
        self.dtypes = [dtypes.get(name, tensors[name].dtype) for name in self.names]
        self.forward_logits, self.accumulates = forward, accumulates
        flat = torch.cat([tensors[name].detach().float().reshape(-1) for name in self.names])
        self.register_buffer("parameters_", flat)
        for name in ("mean", "square", *(["sums"] if accumulates else [])):
            self.register_buffer(name, torch.zeros_like(flat))
        if accumulates:
            self.register_buffer("count", torch.zeros(1))
        self._value_and_grad = value_and_grad(model, self._summed_loss, self.names)

    # The methods -----------------------------------------------------------------------------

    def train_step(self, tokens, targets, mask, lr, step):
        """Update the parameters by one batch, and return its loss before the update."""
        total, count, gradient = self._gradient(tokens, targets, mask, step)
        self._update(gradient / count, lr, step)
        return total / count

    def accumulate(self, tokens, targets, mask, step):
        """Add the gradient of a batch to those since the last `apply`, and return the loss of the batch.

        `step` is the number of this batch, which gives the seed of dropout.
        """
        total, count, gradient = self._gradient(tokens, targets, mask, step)
        self.sums.copy_(self.sums + gradient)
        self.count.copy_(self.count + count)
        return total / count

    def apply(self, lr, step):
        """Update the parameters by the mean gradient of all tokens since the last `apply`."""
        self._update(self.sums / self.count.clamp(min=1), lr, step)
        self.sums.copy_(torch.zeros_like(self.sums))
        self.count.copy_(torch.zeros_like(self.count))
        return step + 1

    def eval_loss(self, tokens, targets, mask):
        """Return the loss of a batch without dropout."""
        total, count = call_with(self.model, self._losses, self.tensors(), tokens, targets, mask)
        return total / count.clamp(min=1)

    def read_state(self):
        """Return `parameters`, `mean` and `square`."""
        return self.parameters_.clone(), self.mean.clone(), self.square.clone()

    def write_state(self, parameters, mean, square):
        """Set `parameters`, `mean` and `square`. Gradients that were accumulated are dropped."""
        for name, value in zip(("parameters_", "mean", "square"), (parameters, mean, square)):
            getattr(self, name).copy_(value)
        if self.accumulates:
            self.sums.copy_(torch.zeros_like(self.sums))
            self.count.copy_(torch.zeros_like(self.count))
        return parameters.sum()

    # -----------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors by name, as parts of the vector of parameters."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = {dtype: self.parameters_.to(dtype).split(sizes) for dtype in dict.fromkeys(self.dtypes)}
        values = (parts[dtype][i] for i, dtype in enumerate(self.dtypes))
        return {name: value.view(shape) for name, value, shape in zip(self.names, values, self.shapes)}

    def _summed_loss(self, model, tokens, targets, mask, step):
        set_dropout_seeds(model, step, self.seed)
        return self._losses(model, tokens, targets, mask)[0]

    def _losses(self, model, tokens, targets, mask):
        return summed_cross_entropy(self.forward_logits(model, tokens), targets, mask)

    def _gradient(self, tokens, targets, mask, step):
        try:
            total, gradients = self._value_and_grad(tokens, targets, mask, step, parameters=self.tensors())
        finally:
            set_dropout_seeds(self.model, None)  # in the backward pass, checkpointing reads the seeds again
        gradient = torch.cat([gradients[name].reshape(-1) for name in self.names]).float()
        return total, mask.float().sum().clamp(min=1), gradient

    def _update(self, gradient, lr, step):
        new = self.optimizer.update(self.parameters_, gradient, self.mean, self.square, lr, step)
        for buffer, value in zip((self.parameters_, self.mean, self.square), new):
            buffer.copy_(value)
