"""Rerankers that are causal language models: the score of a document is the logit of a token, such as `yes`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...llm import chat_template
from .checkpoint import LOGIT_SCORE, EncoderFolder

_ROWS = "score_rows"  # a buffer of the decoder: the rows of the output projection for the tokens
# The text of a pair with which Qwen3-Reranker was trained.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: "
)
_BETWEEN = "\n<Document>: "
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QUERY, _DOCUMENT = "<0>", "<1>"


class Judgement(torch.nn.Module):
    """Tokens and mask `[B, L]` → scores `[B, 1]`, float32, by the last token of each text.

    A score is the logit of the first of the tokens, less that of the second one, if there is one.
    """

    def __init__(self, decoder: PreTrainedModel):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        last = (mask.sum(1) - 1).clamp(min=0)
        hidden = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        logits = (hidden @ getattr(self.decoder, _ROWS).to(hidden.dtype).T).float()
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] > 1 else logits


def decoder_of(encoder: EncoderFolder, model: PreTrainedModel, tokenizer: Any) -> PreTrainedModel:
    """Return the decoder of a causal language model, with what `Judgement` needs of the output projection.

    Raises ValueError if there are no such tokens, or if the model computes the logits in another way.
    """
    decoder, head, tokens = model.get_decoder(), model.get_output_embeddings(), _tokens(encoder, tokenizer)
    where = f"export_encoder: model: {encoder.path}"
    vocabulary = head.weight.shape[0]
    if not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
        raise ValueError(f"{where}: got the tokens {tokens}, expected ids in [0, {vocabulary})")
    decoder.register_buffer(_ROWS, head.weight[tokens].detach().clone())
    ids = torch.arange(4)[None] % vocabulary
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1, tokens].float()
        score = Judgement(decoder)(ids, torch.ones_like(ids))
    if not torch.allclose(logits[:, :1] - logits[:, 1:].sum(1, keepdim=True), score, atol=1e-3, rtol=1e-3):
        raise ValueError(f"{where}: got a model that changes the logits, expected those of its output projection")
    return decoder


def _tokens(encoder: EncoderFolder, tokenizer: Any) -> list[int]:
    settings = next(part.settings for part in encoder.parts or () if part.kind in LOGIT_SCORE)
    if not settings:
        vocabulary = tokenizer.get_vocab()
        return [vocabulary.get(word, -1) for word in ("yes", "no")]
    return [settings[name] for name in ("true_token_id", "false_token_id") if settings.get(name) is not None]


def pair_text(encoder: EncoderFolder, tokenizer: Any) -> tuple[str, ...]:
    """Return the texts before a query, between it and a document, and behind that; or () for a pair of texts.

    They are those of a chat template with the roles `query` and `document`. Raises ValueError if a language model has
    none.
    """
    if encoder.judges and not encoder.has_modules:
        return _BEFORE, _BETWEEN, _AFTER
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    if template and (encoder.judges or "query" in template and "document" in template):
        messages = [{"role": "query", "content": _QUERY}, {"role": "document", "content": _DOCUMENT}]
        default = encoder.settings.get("default_prompt_name")
        if prompt := (encoder.settings.get("prompts") or {}).get(default):
            messages.insert(0, {"role": "system", "content": prompt})
        options = (encoder.text_settings.get("processing_kwargs") or {}).get("chat_template") or {}
        prompted = options.get("add_generation_prompt", True)
        text = chat_template.render(template, messages, dict(tokenizer.special_tokens_map), prompted)
        before, found, rest = text.partition(_QUERY)
        between, also, after = rest.partition(_DOCUMENT)
        if found and also and _QUERY not in after and _DOCUMENT not in before:
            return before, between, after
    if encoder.judges:
        raise ValueError(
            f"export_encoder: model: {encoder.path}: chat_template: expected one that shows a message of the role "
            "query, and then one of the role document"
        )
    return ()
