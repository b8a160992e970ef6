"""Encoders of texts and pictures, the preprocessing of pictures, and hostile picture files."""

import io
import json
import random
import zlib

import numpy as np
import pytest
import small_encoder
import torch
from executorch_mlx.encoders import Encoder
from executorch_mlx.encoders.export import export_encoder
from executorch_mlx.llm.errors import FieldError

Image = pytest.importorskip("PIL.Image")

from executorch_mlx.llm.vision import PictureError, Preprocessor, open_picture, preprocessor_settings  # noqa: E402
from executorch_mlx.llm.vision.picture import MAX_PIXELS  # noqa: E402

EDGE = 32
CLIP = {
    "size": {"shortest_edge": EDGE},
    "crop_size": {"height": EDGE, "width": EDGE},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
SIGLIP = {"size": {"height": EDGE, "width": EDGE}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TALL = {"size": EDGE - 8, "crop_size": EDGE, "do_center_crop": True, "do_normalize": False, "resample": 2}


def picture(seed: int, width: int, height: int, mode: str = "RGB"):
    """A picture with edges and smooth parts."""
    values = np.random.default_rng(seed).integers(0, 256, (max(1, height // 3), max(1, width // 3), 4), np.uint8)
    return Image.fromarray(values, "RGBA").resize((width, height), 2).convert(mode)


def save(folder, family: str):
    """Write a small CLIP or SigLIP with its processor."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(small_encoder.WORDS), "max_position_embeddings": 16, "initializer_range": 0.2}
    vision = sizes | {"image_size": EDGE, "patch_size": 8}
    if family == "clip":
        ends = {"bos_token_id": small_encoder.CLS, "eos_token_id": small_encoder.SEP, "pad_token_id": small_encoder.PAD}
        config = transformers.CLIPConfig(text_config=text | ends, vision_config=vision, projection_dim=24)
        model = transformers.CLIPModel(config)
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model = transformers.SiglipModel(config)
    model.save_pretrained(folder)
    small_encoder.save_tokenizer(folder)
    settings = CLIP if family == "clip" else SIGLIP
    kind = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}[family]
    small_encoder.write(folder / "preprocessor_config.json", settings | {"image_processor_type": kind})
    return folder


def processor(family: str, settings):
    """The processor of transformers that uses PIL."""
    import transformers

    name = {"clip": "CLIPImageProcessorPil", "siglip": "SiglipImageProcessorPil"}[family]
    return getattr(transformers, name)(**settings)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_towers_equal_transformers(family, tmp_path):
    import transformers

    folder = save(tmp_path / "model", family)
    exported = export_encoder(folder)
    assert not exported.report.refused
    exported.save(tmp_path / "model.pte")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["the cat sat on the mat", "a dog", "cat " * 40]
    images = [picture(seed, 40 + 9 * seed, 70 - 5 * seed) for seed in range(5)]
    padding = {"padding": "max_length"} if family == "siglip" else {}
    expected = []
    with torch.no_grad():
        for text in texts:
            inputs = tokenizer(text, truncation=True, max_length=16, return_tensors="pt", **padding)
            masked = {} if family == "siglip" else {"attention_mask": inputs.attention_mask}
            expected.append(model.get_text_features(inputs.input_ids, **masked).pooler_output)
        pixels = processor(family, CLIP if family == "clip" else SIGLIP)(images, return_tensors="pt").pixel_values
        features = model.get_image_features(pixels).pooler_output
    with Encoder(tmp_path / "model.pte") as encoder:
        text_vectors, image_vectors = encoder.encode(texts), encoder.encode(images=images)
        assert (encoder.encode(images=images[0]) == image_vectors[0]).all()
    normalized = torch.nn.functional.normalize
    assert np.abs(text_vectors - normalized(torch.cat(expected), dim=-1).numpy()).max() < 1e-5
    assert np.abs(image_vectors - normalized(features, dim=-1).numpy()).max() < 1e-5


@pytest.mark.parametrize("family, settings", [("clip", CLIP), ("siglip", SIGLIP), ("clip", TALL)])
def test_preprocessing_equals_transformers(family, settings):
    generator = random.Random(0)
    prepare, reference = Preprocessor(preprocessor_settings(settings, EDGE)), processor(family, settings)
    for seed in range(200):
        mode = generator.choice(["RGB", "L", "RGBA", "P"])
        image = picture(seed, generator.randint(1, 90), generator.randint(1, 90), mode)
        pixels = prepare(open_picture(image))
        expected = reference(image.convert("RGB"), return_tensors="np").pixel_values[0]
        assert pixels.shape == (3, EDGE, EDGE) and pixels.dtype == np.float32
        assert np.abs(pixels - expected).max() < 1e-5, (seed, image.size)


def test_sources_of_pictures(tmp_path):
    import base64

    image = picture(0, 20, 30)
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), data, url, image):
        assert open_picture(source).tobytes() == image.tobytes()
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    image.save(turned, "PNG", exif=exif)
    assert open_picture(turned.getvalue()).size == (30, 20)
    frames = io.BytesIO()
    image.save(frames, "GIF", save_all=True, append_images=[picture(1, 20, 30)])
    assert open_picture(frames.getvalue()).size == (20, 30)


def bomb(width: int, height: int) -> bytes:
    """A PNG file that claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "source, message",
    [
        (bomb(60000, 60000), "image: got too many pixels, expected at most 50000000"),
        (bomb(1, 60000), "image: got 1 x 60000 pixels, expected a longer edge of at most 200 times the other"),
        (bomb(3000, 3000), "image: damaged: "),
        (b"no picture", "image: got a file of another format, expected PNG, JPEG"),
        (b"", "image: got a file of another format"),
        (b"\x89PNG\r\n\x1a\n", "image: "),
        (bytes(33 << 20), "image: got 34603008 bytes, expected at most 33554432"),
        ("data:image/png;base64,!!!", "image: invalid base64"),
        ("data:image/png,abc", "image: got 'data:image/png', expected a data URL in base64"),
        (7, "image: got int, expected a path, bytes, a data URL or a picture of PIL"),
    ],
    ids=["bomb", "line", "cut", "text", "empty", "head", "large", "base64", "url", "number"],
)
def test_hostile_pictures_are_errors(source, message):
    with pytest.raises(PictureError) as error:
        open_picture(source)
    assert str(error.value).startswith(message) and isinstance(error.value, FieldError)


def test_mutated_pictures_are_pictures_or_errors():
    """1,000 damaged files: each is a picture within the limits, or one clear error. The memory stays bounded."""
    resource = pytest.importorskip("resource")
    generator, files = random.Random(0), []
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        for seed in range(3):
            data = io.BytesIO()
            picture(seed, 60, 40).save(data, form)
            files.append(data.getvalue())
    before, errors = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(1000):
        data = bytearray(generator.choice(files))
        for _ in range(generator.randint(1, 8)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        try:
            image = open_picture(bytes(data))
            assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
        except PictureError as error:
            errors += 1
            assert "\n" not in str(error)
    assert errors > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KB


@pytest.mark.parametrize(
    "change, message",
    [
        ({"size": {"longest_edge": 9}}, "size: got {'longest_edge': 9}, expected height and width"),
        ({"size": {"height": 16, "width": 16}, "crop_size": None, "do_center_crop": False}, "size: got pictures of"),
        ({"resample": 9}, "resample: got 9, expected a filter of PIL"),
        ({"image_mean": [0.5]}, r"image_mean: got \[0.5\], expected three numbers"),
    ],
)
def test_unknown_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        preprocessor_settings(json.loads(json.dumps(CLIP | change)), EDGE)
