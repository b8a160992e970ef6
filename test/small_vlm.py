"""Small models for pictures or sounds and text, with random weights, and what transformers computes with them."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image

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
UNTIED = TEXT | {"tie_word_embeddings": False}  # so that scaled embeddings do not repeat a token for ever
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.25, 0.2]}
# Tensors that begin as constants of transformers, and about which values they lie here.
INITIAL = {"position_embedding_table": 0.0, "std_bias": 0.0, "std_scale": 1.0}
INITIAL |= {"sub_img_feature_extensor": 0.0, "global_img_feature_extensor": 0.0}
INITIAL |= {"input_min": -1.0, "input_max": 1.0, "output_min": -1.5, "output_max": 1.5}
# Each message is a line. Pictures are where their parts are.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ("image", "audio") -%}PLACEHOLDER{%- elif part.type == "video" -%}VIDEO
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}{{ "\n" }}
{%- endfor -%}"""


def tokenizer(tokens: list[str], placeholder: str, video: str = ""):
    """Return the tokenizer of the demo model with more special tokens."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(DEMO)
    loaded.add_special_tokens({"additional_special_tokens": tokens})
    loaded.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder).replace("VIDEO", video)
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

    words = tokenizer(["<IMG_CONTEXT>", "<img>", "</img>"], "<IMG_CONTEXT>", "<video>")
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


class _Joined:
    """A processor of pictures and text, where that of transformers needs torchvision for videos."""

    def __init__(self, images, words, expand, placeholder):
        self.image_processor, self.tokenizer, self.expand, self.placeholder = images, words, expand, placeholder

    def __call__(self, images, text, return_tensors):
        from transformers import BatchFeature

        if images is None:
            return self.tokenizer(text, return_tensors="pt")
        found = self.image_processor(images, return_tensors="pt")
        parts = text.split(self.placeholder)
        for index, part in enumerate(parts[1:]):
            parts[0] += self.expand(found, index) + part
        inputs = BatchFeature({**found, **self.tokenizer(parts[0], return_tensors="pt")})
        inputs.pop("num_crops", None)
        inputs.pop("num_patches", None)
        return inputs


QWEN = {
    "Qwen2": "Qwen2VL",
    "Qwen2.5": "Qwen2_5_VL",
    "Qwen3": "Qwen3VL",
    "Qwen3 MoE": "Qwen3VLMoe",
    "Qwen3.5": "Qwen3_5",
    "Qwen3.5 MoE": "Qwen3_5Moe",
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def _qwen(kind: str):
    import transformers

    tokens = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    words = tokenizer(tokens, "<|image_pad|>", "<|vision_start|><|video_pad|><|vision_end|>")
    token = words.convert_tokens_to_ids("<|image_pad|>")
    vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    if kind == "Qwen2":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16}
        vision |= {"fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = TEXT
    if kind.startswith("Qwen3"):
        vision = {"depth": 3, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
        vision |= {"num_position_embeddings": 36}
    if kind.startswith("Qwen3.5"):
        rope |= {"partial_rotary_factor": 0.25}
        text = TEXT | {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"], **DELTA}
    elif kind.startswith("Qwen3"):
        vision |= {"deepstack_visual_indexes": [0, 2]}
    if kind.endswith(" MoE"):
        text = text | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32} if kind == "Qwen3.5 MoE" else {}
    name = QWEN[kind]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**vision, "initializer_range": 0.3},
        text_config={**text, "vocab_size": len(words), "rope_parameters": rope},
        image_token_id=token,
        video_token_id=words.convert_tokens_to_ids("<|video_pad|>"),
    )
    size = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
    images = transformers.Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2, **MEAN)

    def expand(found, index):
        return "<|image_pad|>" * int(found["image_grid_thw"][index].prod() // 4)

    processor = _Joined(images, words, expand, "<|image_pad|>")

    def call(images, text, return_tensors, plain=processor):
        inputs = _Joined.__call__(plain, images, text, return_tensors)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).int()
        return inputs

    processor.call = call
    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor


def _mistral3():
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralImageProcessorPil

    words = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    config = Mistral3Config(
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 48, "patch_size": 4},
        text_config={**TEXT, "model_type": "mistral", "vocab_size": len(words), "sliding_window": None},
        image_token_id=words.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 8, "width": 8}, **MEAN)

    def expand(found, index):
        rows, columns = (int(edge) // 8 for edge in found["image_sizes"][index])
        return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"

    return Mistral3ForConditionalGeneration, config, _Joined(images, words, expand, "[IMG]")


def _llava_next():
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
    )

    words = tokenizer(["<image>"], "<image>")
    sizes = [[16, 32], [32, 16], [32, 32], [16, 48]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VISION, image_size=16, patch_size=4),
        text_config=LlamaConfig(**TEXT, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=sizes,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=sizes, **MEAN
    )
    processor = LlavaNextProcessor(
        images, words, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaNextForConditionalGeneration, config, processor


class _Resizing:
    """An image processor in place of that of transformers, which needs torchvision, and resizes as torch does.

    With `uses_pil`, it resizes as Pillow does, so that the pixels are those of the program, bit for bit.
    """

    uses_pil = False

    def _resized(self, levels, size):
        if not self.uses_pil:
            return torch.nn.functional.interpolate(levels[None], size, mode="bilinear", antialias=True)[0]
        picture = Image.fromarray(levels.movedim(0, -1).numpy()).resize(size[::-1], Image.BILINEAR)
        return torch.from_numpy(np.array(picture)).movedim(-1, 0)


class _Canvas(_Resizing):
    """The image processor of Llama 4."""

    def __init__(self, edge: int, tiles: int):
        self.edge, self.tiles = edge, tiles

    def save_pretrained(self, folder):
        size = {"height": self.edge, "width": self.edge}
        settings = {"image_processor_type": "Llama4ImageProcessor", "size": size, "max_patches": self.tiles}
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings | MEAN))

    def __call__(self, images, return_tensors):
        found, grids = [], []
        for picture in images if isinstance(images, list) else [images]:
            tiles, grid = self._cut(torch.from_numpy(np.array(picture)).movedim(-1, 0))
            found += tiles
            grids.append(grid)
        pixels = torch.stack(found).to(torch.bfloat16) * (1 / 255)
        mean, std = (torch.tensor(MEAN[name], dtype=torch.bfloat16)[:, None, None] for name in MEAN)
        return {"pixel_values": ((pixels - mean) / std).float(), "aspect_ratios": grids}

    def _cut(self, levels):
        edge, (height, width) = self.edge, levels.shape[1:]
        grids = [(r, c) for r in range(1, self.tiles + 1) for c in range(1, self.tiles + 1) if r * c <= self.tiles]
        scales = torch.tensor([[r * edge / height, c * edge / width] for r, c in grids], dtype=torch.float32).amin(1)
        best = scales[scales >= 1].min() if (scales >= 1).any() else scales.max()
        rows, columns = min((grid for grid, scale in zip(grids, scales) if scale == best), key=np.prod)
        limits = min(max(height, edge), rows * edge), min(max(width, edge), columns * edge)
        limit, along = min(zip(limits, (height, width)), key=lambda pair: pair[0] / pair[1])
        inner = [max(1, length * limit // along) for length in (height, width)]
        canvas = torch.zeros(3, rows * edge, columns * edge, dtype=torch.uint8)
        canvas[:, : inner[0], : inner[1]] = self._resized(levels, inner)
        tiles = [row.split(edge, 2) for row in canvas.split(edge, 1)]
        whole = [self._resized(levels, (edge, edge))] if rows * columns > 1 else []
        return [tile for row in tiles for tile in row] + whole, (rows, columns)


class _Crops(_Resizing):
    """The image processor of Phi-4 multimodal, for pictures of up to `tiles` tiles."""

    def __init__(self, edge: int, patch: int, tiles: int):
        self.edge, self.patch, self.tiles = edge, patch, tiles

    def save_pretrained(self, folder):
        size = {"height": self.edge, "width": self.edge}
        settings = {"size": size, "patch_size": self.patch, "dynamic_hd": self.tiles, **MEAN}
        settings["image_processor_type"] = "Phi4MultimodalImageProcessor"
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))

    def __call__(self, images, return_tensors):
        found = [self._cut(picture) for picture in (images if isinstance(images, list) else [images])]
        most = max(len(tiles) for tiles, _, _ in found)
        pixels, masks = torch.zeros(len(found), most, 3, self.edge, self.edge), []
        for index, (tiles, held, _) in enumerate(found):
            pixels[index, : len(tiles)] = tiles
            masks.append(torch.cat([held, torch.ones(most - len(held), *held.shape[1:])]))
        sizes = torch.tensor([size for _, _, size in found])
        return {"image_pixel_values": pixels, "image_sizes": sizes, "image_attention_mask": torch.stack(masks)}

    def _cut(self, picture):
        edge, patch, (width, height) = self.edge, self.patch, picture.size
        columns, rows = -(-width // edge), -(-height // edge)
        if rows * columns > self.tiles:
            numbers = range(1, self.tiles + 1)
            grids = sorted({(i, j) for i in numbers for j in numbers if i * j <= self.tiles}, key=np.prod)
            gaps = [abs(width / height - i / j) for i, j in grids]
            ties = [grid for grid, gap in zip(grids, gaps) if gap == min(gaps)]
            large = [grid for grid in ties[1:] if width * height > 0.5 * edge**2 * np.prod(grid)]
            columns, rows = [ties[0], *large][-1]
        ratio = min(columns * edge / width, rows * edge / height)
        inner = [rows * edge, max(1, int(width * ratio))]
        if columns * edge / width < rows * edge / height:
            inner = [max(1, int(height * ratio)), columns * edge]
        canvas = torch.full((3, rows * edge, columns * edge), 255, dtype=torch.uint8)
        levels = torch.from_numpy(np.array(picture)).movedim(-1, 0)
        canvas[:, : inner[0], : inner[1]] = self._resized(levels, inner)
        mean, std = (torch.tensor(MEAN[name])[:, None, None] for name in MEAN)
        pixels = (canvas * (1 / 255) - mean) / std
        held = torch.ones(rows * edge // patch, columns * edge // patch)
        held[(inner[0] + patch - 1) // patch :] = 0
        held[:, (inner[1] + patch - 1) // patch :] = 0
        whole = torch.nn.functional.interpolate(pixels[None], (edge, edge), mode="bicubic")
        tiles = [tile for row in pixels.split(edge, 1) for tile in row.split(edge, 2)]
        masks = [mask for row in held.split(edge // patch, 0) for mask in row.split(edge // patch, 1)]
        masks = torch.stack([torch.ones_like(masks[0]), *masks])
        return torch.cat([whole, torch.stack(tiles)]), masks, canvas.shape[1:]


def _phi4():
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    words = tokenizer(["<|image|>", "<|audio|>"], "<|image|>")
    image, audio = map(words.convert_tokens_to_ids, ["<|image|>", "<|audio|>"])
    text = {name: value for name, value in UNTIED.items() if name != "head_dim"}
    vision = {**VISION, "num_hidden_layers": 3, "image_size": 20, "crop_size": 20, "patch_size": 4}
    sound = {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
    sound |= {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}
    config = Phi4MultimodalConfig(
        **text,
        vocab_size=len(words),
        vision_config=vision | {"image_token_id": image},
        audio_config=sound | {"audio_token_id": audio},
    )

    def expand(found, index):
        masks, (height, width) = found["image_attention_mask"][index], found["image_sizes"][index] // 20
        held = masks[1 : 1 + height * width, ::2, ::2].reshape(height, width, 3, 3).transpose(1, 2)
        held = held.reshape(height * 3, width * 3)
        return "<|image|>" * (9 + 1 + int(held.sum()) + int(held[:, 0].sum()) + 3)

    processor = _Joined(_Crops(20, 4, 6), words, expand, "<|image|>")

    def call(images, text, return_tensors, plain=processor):
        plain.image_processor.uses_pil = True
        return _Joined.__call__(plain, images, text, return_tensors)

    processor.call = call
    return Phi4MultimodalForCausalLM, config, processor


def _llama4():
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    names = ["image_start", "image_end", "patch", "image", "tile_x_separator", "tile_y_separator"]
    begin, end, token, place, x, y = names = [f"<|{name}|>" for name in names]
    words = tokenizer(names, place)
    text = {**TEXT, "no_rope_layers": [1, 0], "attention_chunk_size": 64}
    text |= {"intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    vision = {**VISION, "image_size": 16, "patch_size": 4, "intermediate_size": 128, "projector_input_dim": 32}
    vision |= {"projector_output_dim": 32, "vision_output_dim": 32}
    config = Llama4Config(
        vision_config=vision,
        text_config={**text, "vocab_size": len(words)},
        image_token_index=words.convert_tokens_to_ids(token),
        boi_token_index=words.convert_tokens_to_ids(begin),
        eoi_token_index=words.convert_tokens_to_ids(end),
    )

    def expand(found, index):
        rows, columns = found["aspect_ratios"][index]
        line = x.join([token * 4] * columns) + y
        return begin + (line * rows if rows * columns > 1 else "") + place + token * 4 + end

    processor = _Joined(_Canvas(16, 6), words, expand, place)

    def call(images, text, return_tensors, plain=processor):
        plain.image_processor.uses_pil = True
        inputs = _Joined.__call__(plain, images, text, return_tensors)
        inputs.pop("aspect_ratios", None)
        return inputs

    processor.call = call
    return Llama4ForConditionalGeneration, config, processor


def _gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessorPil

    words = tokenizer(["<image_soft_token>", "<start_of_image>", "<end_of_image>"], "<start_of_image>")
    token, begin, end = map(words.convert_tokens_to_ids, ["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
    config = Gemma3Config(
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        text_config={**UNTIED, "vocab_size": len(words), "sliding_window": 24, "query_pre_attn_scalar": 8},
        tie_word_embeddings=False,
        image_token_index=token,
        boi_token_index=begin,
        eoi_token_index=end,
        mm_tokens_per_image=4,
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_pan_and_scan=False, **MEAN)
    text = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    processor = _Joined(images, words, lambda found, index: text, "<start_of_image>")

    def call(images, text, return_tensors, plain=processor):
        inputs = _Joined.__call__(plain, images, text, return_tensors)
        inputs["token_type_ids"] = (inputs["input_ids"] == token).int()
        return inputs

    processor.call = call
    return Gemma3ForConditionalGeneration, config, processor


def _gemma4(whole: bool):
    """With `whole`, the tokens of a picture attend to each other. Otherwise, layers have inputs of their own."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4ImageProcessorPil

    words = tokenizer(["<|image|>", "<|image>", "<image|>"], "<|image|>")
    token, begin, end = map(words.convert_tokens_to_ids, ["<|image|>", "<|image>", "<image|>"])
    text = {**UNTIED, "num_hidden_layers": 4, "vocab_size": len(words), "sliding_window": 24}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
    if whole:
        text |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    else:
        text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(words), "num_kv_shared_layers": 2}
    vision = {**VISION, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 512}
    vision |= {"pooling_kernel_size": 2, "use_clipped_linears": not whole, "standardize": whole}
    config = Gemma4Config(
        vision_config=vision,
        text_config=text,
        audio_config=None,
        tie_word_embeddings=False,
        image_token_id=token,
        boi_token_id=begin,
        eoi_token_id=end,
    )
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)

    def expand(found, index):
        return "<|image>" + "<|image|>" * int(found["num_soft_tokens_per_image"][index]) + "<image|>"

    processor = _Joined(images, words, expand, "<|image|>")

    def call(images, text, return_tensors, plain=processor):
        inputs = _Joined.__call__(plain, images, text, return_tensors)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).int()
        inputs.pop("num_soft_tokens_per_image", None)
        return inputs

    processor.call = call
    return Gemma4ForConditionalGeneration, config, processor


FAMILIES = {
    "gemma3": _gemma3,
    "gemma4": lambda: _gemma4(False),
    "gemma4, whole": lambda: _gemma4(True),
    "llama4": _llama4,
    "llava_next": _llava_next,
    "mistral3": _mistral3,
    "phi4_multimodal": _phi4,
    "qwen3_5": lambda: _qwen("Qwen3.5"),
    "qwen3_5_moe": lambda: _qwen("Qwen3.5 MoE"),
    "qwen3_vl": lambda: _qwen("Qwen3"),
    "qwen3_vl_moe": lambda: _qwen("Qwen3 MoE"),
    "qwen2_vl": lambda: _qwen("Qwen2"),
    "qwen2_5_vl": lambda: _qwen("Qwen2.5"),
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "smolvlm": _smolvlm,
}


def _hearing(name: str, token: str, mask: str):
    """`mask` is the name of the argument of the model for the mask of the features."""
    import transformers
    from transformers import WhisperFeatureExtractor

    words = tokenizer([token, "<|audio_bos|>", "<|audio_eos|>"], f"<|audio_bos|>{token}<|audio_eos|>")
    audio = {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    audio |= {"d_model": 32, "max_source_positions": 50, "initializer_range": 0.3}
    audio["model_type"] = {"Qwen2Audio": "qwen2_audio_encoder"}.get(name, f"{name.lower()}_encoder")
    kind = getattr(transformers, f"{name}Config")
    config = kind(
        audio_config=audio,
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(words)},
        **{"audio_token_index" if name == "Qwen2Audio" else "audio_token_id": words.convert_tokens_to_ids(token)},
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    processor = _Joined(extractor, words, None, token)

    def call(images, text, return_tensors):
        if images is None:
            return words(text, return_tensors="pt")
        options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        windows = [sound[at : at + 16000] for sound in images for at in range(0, len(sound), 16000)]
        found = extractor(windows, sampling_rate=16000, **options)
        found[mask] = found.pop("attention_mask")
        parts = text.split(token)
        for sound, part in zip(images, parts[1:]):
            frames = -(-len(sound) // 160)
            parts[0] += token * ((((frames - 1) // 2 + 1) - 2) // 2 + 1) + part
        return {**found, **processor.tokenizer(parts[0], return_tensors="pt")}

    processor.call = call
    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor


def _voxtral():
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor

    words = tokenizer(["[AUDIO]", "[BEGIN_AUDIO]"], "[AUDIO]")
    audio = {"num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    audio |= {"hidden_size": 32, "max_source_positions": 50, "initializer_range": 0.3}
    config = VoxtralConfig(
        audio_config={**audio, "model_type": "voxtral_encoder"},
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(words)},
        audio_token_id=words.convert_tokens_to_ids("[AUDIO]"),
    )
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    processor = _Joined(extractor, words, None, "[AUDIO]")

    def call(images, text, return_tensors):
        if images is None:
            return words(text, return_tensors="pt")
        found = extractor(images, sampling_rate=16000, padding="max_length", return_tensors="pt")
        text = text.replace("[AUDIO]", "[BEGIN_AUDIO]" + "[AUDIO]" * 25)
        return {**found, **processor.tokenizer(text, return_tensors="pt")}

    processor.call = call
    return VoxtralForConditionalGeneration, config, processor


SOUND_FAMILIES = {
    "audioflamingo3": lambda: _hearing("AudioFlamingo3", "<sound>", "input_features_mask"),
    "qwen2_audio": lambda: _hearing("Qwen2Audio", "<|AUDIO|>", "feature_attention_mask"),
    "voxtral": _voxtral,
}


def sounds(count: int, seed: int = 0) -> list:
    """Return sounds of odd lengths below a second at 16 kHz, float32."""
    generator = np.random.default_rng(seed)
    lengths = [5003, 15999, 11111]
    found = []
    for index in range(count):
        time = np.arange(lengths[index % len(lengths)]) / 16000
        tone = np.sin(2 * np.pi * generator.uniform(100, 2000) * time * (1 + time))
        found.append((0.3 * tone + 0.01 * generator.standard_normal(len(time))).astype(np.float32))
    return found


def save(family: str, folder: Path, weights: bool = True):
    """Write a checkpoint of a family to `folder`. Return the model and a processor of transformers.

    Without `weights`, there are only the files of the processor, and the model is None.
    """
    from transformers import AutoTokenizer

    kind, config, processor = (FAMILIES | SOUND_FAMILIES)[family]()
    torch.manual_seed(1)
    model = kind(config).eval() if weights else None
    if weights:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (last := name.rpartition(".")[2]) in INITIAL:
                tensor.data = INITIAL[last] + 0.1 * torch.randn(tensor.shape)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    if weights:  # the class of the tokenizer depends on the kind of the model
        processor.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, processor


def pictures(count: int, seed: int = 0, size: tuple[int, int] | None = None) -> list:
    """Return pictures of PIL of odd sizes, or of `size`."""
    generator = np.random.default_rng(seed)
    sizes = [(37, 23), (19, 61), (50, 50), (7, 90)]
    found = []
    for index in range(count):
        width, height = sizes[index % len(sizes)] if size is None else size
        levels = generator.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
        found.append(Image.fromarray(levels).resize((int(width), int(height)), Image.BICUBIC))
    return found


def reference(model, processor, messages, images, tokens: int) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt, and the greedy tokens of transformers after it."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    inputs = getattr(processor, "call", processor)(images=images or None, text=text, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    # Llama 4 of transformers reads this attribute, which the result of its language model lacks.
    missing = mock.patch.object(MoeCausalLMOutputWithPast, "image_outputs", None, create=True)
    with torch.no_grad(), missing:
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return out[0, :length].tolist(), out[0, length:].tolist()
