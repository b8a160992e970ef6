"""Small vision-language models with random weights, and what transformers computes with them."""

from pathlib import Path

import numpy as np
import torch

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
CONTEXT = 1024
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.25, 0.2]}
# Each message is a line. Pictures are where their parts are.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == "image" -%}PLACEHOLDER{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}{{ "\n" }}
{%- endfor -%}"""


def tokenizer(tokens: list[str], placeholder: str):
    """Return the tokenizer of the demo model with more special tokens."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(DEMO)
    loaded.add_special_tokens({"additional_special_tokens": tokens})
    loaded.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return loaded


def _llava():
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    words = tokenizer(["<image>"], "<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, image_size=24, patch_size=8),
        text_config=LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )
    edge = {"height": 24, "width": 24}
    images = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=edge, **MEAN)
    processor = LlavaProcessor(
        images, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaForConditionalGeneration, config, processor


def _idefics3():
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokens = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *places]
    words = tokenizer(tokens, "<image>")
    config = Idefics3Config(
        vision_config={**VISION, "image_size": 16, "patch_size": 4},
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(words)},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 48}, max_image_size={"longest_edge": 16}, resample=3, **MEAN
    )
    return Idefics3ForConditionalGeneration, config, Idefics3Processor(images, words, image_seq_len=4)


def _smolvlm():
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil

    _, config, processor = _idefics3()
    settings = {**config.to_dict(), "model_type": "smolvlm"}
    settings["vision_config"]["model_type"] = "smolvlm_vision"
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 48}, max_image_size={"longest_edge": 16}, resample=3, **MEAN
    )
    processor.image_processor = images
    return SmolVLMForConditionalGeneration, SmolVLMConfig(**settings), processor


def _internvl():
    from transformers import GotOcr2ImageProcessorPil, InternVLConfig, InternVLForConditionalGeneration

    words = tokenizer(["<IMG_CONTEXT>", "<img>", "</img>"], "<IMG_CONTEXT>")
    config = InternVLConfig(
        vision_config={**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(words)},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        downsample_ratio=0.5,
    )
    size = {"height": 16, "width": 16}
    images = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=6, **MEAN)

    class Processor:
        image_processor, tokenizer = images, words

        def __call__(self, images, text, return_tensors):
            from transformers import BatchFeature

            if images is None:
                return self.tokenizer(text, return_tensors="pt")
            found = self.image_processor(images, return_tensors="pt")
            parts = text.split("<IMG_CONTEXT>")
            for count, part in zip(found.pop("num_patches"), parts[1:]):
                parts[0] += "<img>" + "<IMG_CONTEXT>" * 4 * int(count) + "</img>" + part
            return BatchFeature({**found, **self.tokenizer(parts[0], return_tensors="pt")})

    return InternVLForConditionalGeneration, config, Processor()


FAMILIES = {"idefics3": _idefics3, "internvl": _internvl, "llava": _llava, "smolvlm": _smolvlm}


def save(family: str, folder: Path):
    """Write a checkpoint of a family to `folder`. Return the model and a processor of transformers."""
    kind, config, processor = FAMILIES[family]()
    torch.manual_seed(1)
    model = kind(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return model, processor


def pictures(count: int, seed: int = 0) -> list:
    """Return pictures of PIL of odd sizes."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    sizes = [(37, 23), (19, 61), (50, 50), (7, 90)]
    found = []
    for index in range(count):
        width, height = sizes[index % len(sizes)]
        levels = generator.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
        found.append(Image.fromarray(levels).resize((width, height), Image.BICUBIC))
    return found


def reference(model, processor, messages, images, tokens: int) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt, and the greedy tokens of transformers after it."""
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = processor(images=images or None, text=text, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return out[0, :length].tolist(), out[0, length:].tolist()
