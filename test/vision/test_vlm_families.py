"""Families of vision-language models: pictures as processors prepare them, and tokens as transformers draws them."""

import numpy as np
import pytest
import small_vlm
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.vision.families import FAMILIES, picture_settings
from executorch_mlx.llm.vision.patches import patches_of
from executorch_mlx.llm.vision.processor import PictureProcessor

TOKENS = 64
CHUNKS = {"gemma4, whole": 80}  # a picture of up to 70 tokens is in one call
PICTURES = 200
# Where transformers resizes with torchvision: a level of 8 bits, and what bfloat16 and a second resize add.
TOLERANCES = {"llama4": 0.032, "phi4_multimodal": 0.0255}


def test_every_family_has_a_small_model():
    small = {name.partition(",")[0] for name in small_vlm.FAMILIES}
    assert small | small_vlm.SOUND_FAMILIES.keys() == FAMILIES.keys()


def messages(count: int, text: str = "def f(") -> list[dict]:
    parts = [{"type": "text", "text": text}]
    for index in range(count):
        parts += [{"type": "image"}, {"type": "text", "text": f" is {index} "}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("family", sorted(small_vlm.FAMILIES))
def test_tokens_are_those_of_transformers(family, tmp_path):
    """With 0, 1 and 3 pictures of odd sizes. They depend neither on other requests nor on the sizes of chunks."""
    model, processor = small_vlm.save(family, tmp_path)
    options = {"max_context_len": 512, "chunk": CHUNKS.get(family, 32), "batch": 2, "speculation": False}
    export_llm(tmp_path, pictures=True, verify=family == "gemma3", **options).save(tmp_path / "model.pte")
    prompts = {count: (messages(count), small_vlm.pictures(count)) for count in (0, 1, 3)}
    expected = {count: small_vlm.reference(model, processor, *prompt, TOKENS) for count, prompt in prompts.items()}
    for chunk in (0, 7):
        with LLM.load(tmp_path / "model.pte", chunk=chunk) as llm:
            running = {
                count: llm.chat(asked, images=images, max_new_tokens=TOKENS, ignore_eos=True)
                for count, (asked, images) in prompts.items()
            }
            found = {count: (generation.prompt, generation.result().tokens) for count, generation in running.items()}
            assert found == expected


def plain_inputs(family: str, found, settings: dict) -> list[np.ndarray]:
    """Return the inputs of the encoder from the pixels of a processor of transformers, for one picture."""
    name = "image_pixel_values" if settings["kind"] == "phi4" else "pixel_values"
    pixels = np.asarray(found[name])
    if settings["kind"] == "gemma4":
        edge, places = settings["patch"], np.asarray(found["image_position_ids"])[0]
        columns, rows = places.max(0) + 1
        picture = pixels[0, : rows * columns].reshape(rows, columns, edge, edge, 3)
        picture = picture.transpose(4, 0, 2, 1, 3).reshape(3, rows * edge, columns * edge)
        patches, _ = patches_of(picture, edge, settings["merge"])
        return [patches.transpose(0, 2, 1).reshape(len(patches), -1)]
    if settings["kind"] == "qwen":
        return [pixels]
    if settings["kind"] == "pixtral":
        patches, _ = patches_of(pixels[0], settings["patch"], settings["merge"])
        return [patches.reshape(len(patches), -1)]
    return [pixels.reshape(-1, *pixels.shape[-3:])]


@pytest.mark.parametrize("family", sorted(small_vlm.FAMILIES))
def test_pictures_are_those_of_the_processor(family, tmp_path):
    _, processor = small_vlm.save(family, tmp_path, weights=False)
    config = small_vlm.FAMILIES[family]()[1]
    settings = picture_settings(tmp_path, config, processor.tokenizer) | {"count": 4}
    prepare = PictureProcessor(settings)._prepare
    generator = np.random.default_rng(3)
    for index in range(PICTURES):
        (picture,) = small_vlm.pictures(1, index, tuple(generator.integers(2, 90, 2)))
        expected = plain_inputs(family, processor.image_processor(picture, return_tensors="np"), settings)
        _, encodings = prepare(picture, settings, PictureProcessor(settings)._pixels)
        pixels = np.concatenate([encoding.inputs[0] for encoding in encodings])
        assert pixels.dtype == np.float32 and pixels.shape == expected[0].shape, picture.size
        atol = TOLERANCES.get(family, 1e-5)
        torch.testing.assert_close(torch.from_numpy(pixels), torch.from_numpy(expected[0]).float(), atol=atol, rtol=0)
        assert np.isclose(pixels, expected[0], atol=1e-5).mean() > 0.5
