"""Small versions of popular models: each is lowered to one delegate, and its results equal those of eager torch."""

import functools

import pytest
import torch
import torch_zoo
import transformers_zoo as zoo
from model_case import Model, measure

LENGTHS = (3, 13)
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


def decoder(name: str, **options) -> Model:
    return Model(options.pop("title", name), functools.partial(zoo.decoder, name), **options)


MODELS = [
    decoder("llama", lengths=LENGTHS),
    decoder("llama", title="llama bfloat16", dtype=BFLOAT16, tolerance=2e-2),
    decoder("llama", title="llama float16", dtype=FLOAT16, tolerance=4e-3),
    decoder("mistral"),
    decoder("qwen2"),
    decoder("qwen3"),
    decoder("gemma2", lengths=LENGTHS),
    decoder("gemma3"),
    decoder("phi3"),
    decoder("smollm3"),
    decoder("olmo2"),
    Model("gpt2", zoo.gpt2),
    Model("bert", zoo.bert),
    Model("t5 encoder", zoo.t5_encoder),
    Model("vit", zoo.vit),
    Model("clip", zoo.clip),
    Model("whisper encoder", zoo.whisper_encoder),
    Model("whisper decoder", zoo.whisper_decoder),
    Model("resnet", torch_zoo.resnet),
    Model("mobilenet", torch_zoo.mobilenet),
    Model("unet", torch_zoo.unet),
    Model("lstm", torch_zoo.lstm),
    Model("gru", torch_zoo.gru),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_model(delegate, model):
    result = measure(model)
    assert (result.delegates, sorted(result.host)) == (model.delegates, sorted(model.host)), result.report
    assert {name: e for name, e in result.errors.items() if e > model.tolerance} == {}
