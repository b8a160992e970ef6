"""Videos as frames: tokens as transformers draws them, sizes as its processors have them, and errors."""

import json

import pytest
import small_vlm
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.vision import Video
from executorch_mlx.llm.vision.patches import qwen_video_size
from executorch_mlx.llm.vision.video import VideoError

TOKENS = 64
SIZE = (24, 16)  # in whole patches, so that no frame is resized
COUNT, FPS = 3, 4.0  # the last frame is repeated, and the time ends before the frames do on the other rotary axes


def messages() -> list[dict]:
    parts = [{"type": "text", "text": "def f("}, {"type": "video"}, {"type": "text", "text": " is "}, {"type": "image"}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}]}]


def qwen_inputs(processor, text: str, frames: list, picture, has_time_axis: bool) -> dict:
    """Return the inputs of a model of transformers."""
    padded = [*frames, frames[-1]]
    patches = [torch.from_numpy(processor.image_processor(f, return_tensors="np")["pixel_values"]) for f in padded]
    halves = [values.unflatten(1, (3, 2, 16))[:, :, 0] for values in patches]
    videos = [torch.stack(halves[i : i + 2], 2).flatten(1) for i in (0, 2)]
    image = processor.image_processor(picture, return_tensors="pt")
    tokens = "<|video_pad|>" * 6
    around = "<|vision_start|>{}<|vision_end|>"
    if has_time_axis:
        shown = around.format(tokens * 2)
    else:
        shown = f"<0.1 seconds>{around.format(tokens)}<0.5 seconds>{around.format(tokens)}"
    text = text.replace(around.format("<|video_pad|>"), shown)
    count = int(image["image_grid_thw"].prod() // 4)
    ids = processor.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt")
    of_image, of_video = map(processor.tokenizer.convert_tokens_to_ids, ["<|image_pad|>", "<|video_pad|>"])
    kinds = (ids["input_ids"] == of_image).int() + 2 * (ids["input_ids"] == of_video).int()
    inputs = {**ids, **image, "pixel_values_videos": torch.cat(videos), "mm_token_type_ids": kinds}
    inputs["video_grid_thw"] = torch.tensor([[2, SIZE[1] // 4, SIZE[0] // 4]])
    return inputs


def internvl_inputs(processor, text: str, frames: list, picture) -> dict:
    images = processor.image_processor
    found = images(picture, return_tensors="pt")
    shown = "\n".join(f"Frame{i + 1}: <img>{'<IMG_CONTEXT>' * 4}</img>" for i in range(len(frames)))
    tiles = "<img>" + "<IMG_CONTEXT>" * 4 * int(found.pop("num_patches")[0]) + "</img>"
    ids = processor.tokenizer(text.replace("<IMG_CONTEXT>", tiles).replace("<video>", shown), return_tensors="pt")
    pixels = [images(frame, crop_to_patches=False, return_tensors="pt")["pixel_values"] for frame in frames]
    return {**ids, "pixel_values": torch.cat([*pixels, found["pixel_values"]])}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl"])
def test_tokens_are_those_of_transformers(family, tmp_path):
    model, processor = small_vlm.save(family, tmp_path)
    size = {"shortest_edge": 256, "longest_edge": 6400}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({} if family == "internvl" else {"size": size}))
    options = {"max_context_len": 512, "chunk": 32, "speculation": False, "verify": False}
    export_llm(tmp_path, pictures=True, **options).save(tmp_path / "model.pte")
    frames, (picture,) = small_vlm.pictures(COUNT, seed=5, size=SIZE), small_vlm.pictures(1)
    text = processor.tokenizer.apply_chat_template(messages(), tokenize=False)
    if family == "internvl":
        inputs = internvl_inputs(processor, text, frames, picture)
    else:
        inputs = qwen_inputs(processor, text, frames, picture, has_time_axis=family in ("qwen2_vl", "qwen2_5_vl"))
    options = {"second_per_grid_ts": [2 / FPS]} if family == "qwen2_5_vl" else {}
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        out = model.generate(**inputs, **options, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0]
    for chunk in (0, 7):
        with LLM.load(tmp_path / "model.pte", chunk=chunk) as llm:
            found = llm.chat(
                messages(), images=[picture], videos=[Video(frames, FPS)], max_new_tokens=TOKENS, ignore_eos=True
            )
            assert found.prompt == out[:length].tolist()
            assert found.result().tokens == out[length:].tolist()
            if family == "internvl" and chunk:
                check_errors(llm, frames, picture)


def check_errors(llm, frames: list, picture) -> None:
    for video, problem in (
        (Video([]), "got 0 frames"),
        (Video(frames, 0), "fps: got 0"),
        (Video("a.mp4"), "got str, expected a list of frames"),
        ([*frames, picture], "expected one size"),
    ):
        with pytest.raises(VideoError, match=f"^video: .*{problem}"):
            llm.chat(messages(), images=[picture], videos=[video])
    with pytest.raises(VideoError, match="got fewer videos"):
        llm.chat(messages(), images=[picture])


def test_sizes_are_those_of_the_processor():
    """Width, height and frames of a video, and the size that transformers has for patches of 16, two by two."""
    cases = [(640, 480, 7, (384, 288)), (20, 300, 2, (96, 992)), (64, 64, 4, (192, 192)), (1919, 1080, 60, (128, 64))]
    for width, height, frames, size in cases:
        assert qwen_video_size((width, height), 32, 128 * 32 * 32, 32 * 32 * 768, frames, 2) == size
