"""Vision-language models: programs answer pictures as transformers does, whatever else runs."""

import base64
import io

import pytest
import small_vlm
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.vision import PictureError
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

TOKENS = 64


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory):
    """A model of transformers, its processor, and its program with two rows."""
    folder = tmp_path_factory.mktemp("idefics3")
    model, processor = small_vlm.save("idefics3", folder)
    exported = export_llm(folder, max_context_len=small_vlm.CONTEXT, chunk=64, batch=2, speculation=False)
    assert exported.notes == ()
    exported.save(folder / "model.pte")
    with LLM.load(folder / "model.pte") as llm:
        yield model, processor, llm


def messages(count: int, text: str = "def f(") -> list[dict]:
    parts = [{"type": "text", "text": text}]
    for index in range(count):
        parts += [{"type": "image"}, {"type": "text", "text": f" is {index} "}]
    return [{"role": "user", "content": parts}]


def answer(llm, count, picture_seed=0, text="def f(", **options):
    images = small_vlm.pictures(count, picture_seed)
    return llm.chat(messages(count, text), images=images, max_new_tokens=TOKENS, ignore_eos=True, **options)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_answers_are_those_of_transformers(idefics3, count):
    model, processor, llm = idefics3
    ids, expected = small_vlm.reference(model, processor, messages(count), small_vlm.pictures(count), TOKENS)
    generation = answer(llm, count)
    assert generation.prompt == ids
    assert generation.result().tokens == expected


def test_answers_do_not_depend_on_others(idefics3):
    _, _, llm = idefics3
    requests = [
        {"count": 1 + i % 3, "picture_seed": i, "text": f"a{i}", "temperature": 0.8, "top_p": 0.9, "seed": i}
        for i in range(6)
    ]
    alone = [answer(llm, **request).result().tokens for request in requests]
    running = [answer(llm, **request) for request in requests]
    assert [generation.result().tokens for generation in running] == alone
    assert len({*map(tuple, alone)}) == len(alone)


def test_a_picture_is_a_part_of_the_prompt(idefics3):
    """Equal pictures are read once. Of another picture, nothing behind the text before it is reused."""
    _, _, llm = idefics3
    text = "x = 1\n" * 8
    first = answer(llm, 1, picture_seed=7, text=text).result()
    again = answer(llm, 1, picture_seed=7, text=text).result()
    other = answer(llm, 1, picture_seed=8, text=text).result()
    before = len(llm.encode(text))
    assert again.tokens == first.tokens != other.tokens
    assert again.metrics.cached_tokens > before + 4 >= other.metrics.cached_tokens


def test_messages_carry_pictures(idefics3):
    _, _, llm = idefics3
    (picture,) = small_vlm.pictures(1)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    question = {"type": "text", "text": "def g("}
    expected = llm.chat([{"role": "user", "content": "def g("}], images=[picture], max_new_tokens=8).result().tokens
    for part in (
        {"type": "image", "image": picture},
        {"type": "image", "image": file.getvalue()},
        {"type": "image_url", "image_url": {"url": url}},
    ):
        content = [part, question]
        assert llm.chat([{"role": "user", "content": content}], max_new_tokens=8).result().tokens == expected


def test_a_template_may_take_only_texts(idefics3):
    _, _, llm = idefics3
    template, images = llm.tokenizer.chat_template, small_vlm.pictures(2)
    options = {"images": images, "max_new_tokens": 8}
    expected = llm.chat(messages(2), **options)
    llm.tokenizer.replace_templates("{% for message in messages %}{{ message.content + '\n' }}{% endfor %}")
    try:
        found = llm.chat(messages(2), **options)
        before = llm.chat([{"role": "user", "content": "a"}], images=images[:1], max_new_tokens=2)
    finally:
        llm.tokenizer.replace_templates(template)
    assert (found.prompt, found.result().tokens) == (expected.prompt, expected.result().tokens)
    assert before.result().tokens


def test_errors_are_one_line(idefics3):
    _, _, llm = idefics3
    (picture,) = small_vlm.pictures(1)
    with pytest.raises(PictureError, match="^image: damaged|^image: got a file of another format"):
        llm.chat(messages(1), images=[b"no picture"])
    with pytest.raises(PictureError, match="fewer pictures"):
        llm.chat(messages(2), images=[picture])
    with pytest.raises(PictureError, match="1 pictures more"):
        llm.chat(messages(1), images=[picture, picture])
    # The name of the token is text if a user writes it.
    assert llm.chat(messages(1, "<image>"), images=[picture], max_new_tokens=2).result().tokens


def test_a_family_without_rules_is_refused(tmp_path):
    import json

    small_vlm.save("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "vipllava"}))
    with pytest.raises(
        ValueError, match="export_llm: pictures: got a model of kind vipllava, expected one of audioflamingo3, gemma3"
    ):
        export_llm(tmp_path, pictures=True)


@pytest.mark.parametrize("part", ["whole", "language_model"])
def test_an_adapter_may_change_the_encoder_too(part, tmp_path):
    """An adapter of the whole model, or of its language model alone."""
    model, processor = small_vlm.save("llava", tmp_path / "model")
    torch.manual_seed(3)
    settings = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "fc1"], init_lora_weights=False)
    trained = model
    if part == "language_model":
        trained = LlamaForCausalLM(model.config.text_config)
        trained.model, trained.lm_head = model.model.language_model, model.lm_head
    adapted = get_peft_model(trained, settings)
    adapted.save_pretrained(tmp_path / "adapter")
    assert any("vision_tower" in name and "lora" in name for name, _ in adapted.named_parameters()) == (part == "whole")
    adapted.merge_and_unload()
    ids, expected = small_vlm.reference(model, processor, messages(1), small_vlm.pictures(1), TOKENS)
    options = {"max_context_len": 256, "chunk": 64, "speculation": False, "verify": False}
    export_llm(tmp_path / "model", adapter=str(tmp_path / "adapter"), pictures=True, **options).save(tmp_path / "a.pte")
    with LLM.load(tmp_path / "a.pte") as llm:
        generation = answer(llm, 1)
        assert (generation.prompt, generation.result().tokens) == (ids, expected)


def test_the_command_takes_pictures(idefics3, tmp_path, capsys):
    _, _, llm = idefics3
    (picture,) = small_vlm.pictures(1)
    picture.save(tmp_path / "a.png")
    expected = llm.chat([{"role": "user", "content": "def g("}], images=[picture], max_new_tokens=8).result().text
    arguments = ["run", str(llm.program.path), "--prompt", "def g(", "--max-new-tokens", "8", "--temperature", "0"]
    assert main([*arguments, "--image", str(tmp_path / "a.png")]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert main([*arguments, "--image", str(tmp_path / "b.png")]) == 1
    assert "No such file" in capsys.readouterr().err
