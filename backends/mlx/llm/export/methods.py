"""The methods of a language model's program: a decoder, with or without the sampling head."""

from __future__ import annotations

import inspect

import torch

from ..sampling_head import sample_logits
from ..sampling_parameters import INPUTS
from .decoder import CachedDecoder
from .head_config import HeadConfig
from .history import TokenHistory

# The argument `outputs` of `export_llm` → the methods of the program, and for each whether it returns tokens. The
# others return logits.
OUTPUTS = {
    "tokens": {"forward": True},
    "logits": {"forward": False},
    "both": {"forward": False, "sample": True},
}


def export_methods(
    decoder: CachedDecoder, outputs: str, head: HeadConfig
) -> dict[str, torch.export.ExportedProgram]:
    """Export the methods for `outputs`, a key of `OUTPUTS`. Returns the exported programs by name of the method."""
    history = TokenHistory(decoder.batch, decoder.max_context_len, head.penalties) if head.penalties else None
    vocab_size = decoder.model.config.get_text_config().vocab_size
    methods = {}
    for name, returns_tokens in OUTPUTS[outputs].items():
        method = _Method(decoder, history, returns_tokens)
        methods[name] = _export(method, head.inputs(decoder.batch, vocab_size) if returns_tokens else {})
    return methods


class _Method(torch.nn.Module):
    """One method of the program.

    Every method has the same module structure, because ExecuTorch shares weights, caches and history
    between methods by the names of the parameters and buffers.
    """

    def __init__(self, decoder: CachedDecoder, history: TokenHistory | None, returns_tokens: bool):
        super().__init__()
        self.decoder, self.history, self.returns_tokens = decoder, history, returns_tokens

    def forward(self, tokens, input_pos, start=None, **parameters):
        logits = self.decoder(tokens, input_pos, start)
        # A method that returns logits also updates the history: the next call may be of a method that draws a token
        # and needs the whole history.
        if self.history is not None:
            parameters["history"], parameters["history_valid"] = self.history.update(tokens, input_pos, start)
        return sample_logits(logits[:, -1], **parameters) if self.returns_tokens else logits


# torch.export looks up the names in dynamic_shapes in the signature of `forward`. It would not find the names of
# sampling parameters, which are passed in **parameters. The signature is therefore set explicitly.
_ARGUMENTS = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "tokens", "input_pos")]
_ARGUMENTS += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("start", *INPUTS)]
_Method.forward.__signature__ = inspect.Signature(_ARGUMENTS)


def _export(method: _Method, head_inputs: dict[str, torch.Tensor]) -> torch.export.ExportedProgram:
    batch, chunk = method.decoder.batch, method.decoder.chunk
    args = torch.zeros(batch, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    kwargs = {"start": torch.zeros(batch, dtype=torch.int64)} if batch > 1 else {}
    kwargs |= head_inputs
    shapes = {"tokens": {1: torch.export.Dim("sequence", min=1, max=chunk)}, "input_pos": None}
    with torch.no_grad():
        return torch.export.export(method, args, kwargs, dynamic_shapes=shapes | dict.fromkeys(kwargs))
