"""Sounds in chats: programs answer them as transformers does."""

import base64
import contextlib
import io

import numpy as np
import pytest
import small_vlm
import soundfile
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.vision.families import FAMILIES, picture_settings
from executorch_mlx.llm.vision.sound import MAX_CHANNELS, Sound, SoundError, open_sound

TOKENS = 64


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory):
    """A model of transformers, its processor, and the file of its program with two rows."""
    folder = tmp_path_factory.mktemp("qwen2_audio")
    model, processor = small_vlm.save("qwen2_audio", folder)
    exported = export_llm(folder, pictures=True, max_context_len=256, chunk=32, batch=2, speculation=False)
    exported.save(folder / "model.pte")
    return model, processor, folder / "model.pte"


@pytest.fixture
def llm(qwen2_audio):
    with LLM.load(qwen2_audio[2]) as llm:
        yield llm


def messages(count: int, text: str = "def f(") -> list[dict]:
    parts = [{"type": "text", "text": text}]
    for index in range(count):
        parts += [{"type": "audio"}, {"type": "text", "text": f" is {index} "}]
    return [{"role": "user", "content": parts}]


def wav(samples: np.ndarray, rate: int = 16000, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", "subtype": "FLOAT"} | options)
    return file.getvalue()


def test_a_model_hears_the_silence_behind_a_sound(tmp_path):
    model, processor = small_vlm.save("voxtral", tmp_path)
    options = {"max_context_len": 256, "chunk": 32, "speculation": False, "verify": False}
    export_llm(tmp_path, pictures=True, **options).save(tmp_path / "model.pte")
    with LLM.load(tmp_path / "model.pte") as llm:
        for count in (0, 1, 3):
            sounds = small_vlm.sounds(count)
            expected = small_vlm.reference(model, processor, messages(count), sounds, TOKENS)
            generation = llm.chat(messages(count), audio=sounds, max_new_tokens=TOKENS, ignore_eos=True)
            assert (generation.prompt, generation.result().tokens) == expected
        with pytest.raises(SoundError, match="expected at most 1"):
            llm.chat(messages(1), audio=[np.zeros(16001, np.float32)])


def test_long_sounds_are_read_in_windows(tmp_path):
    model, processor = small_vlm.save("audioflamingo3", tmp_path)
    options = {"max_context_len": 256, "chunk": 32, "speculation": False, "verify": False}
    export_llm(tmp_path, pictures=True, **options).save(tmp_path / "model.pte")
    short, other = small_vlm.sounds(2)
    with LLM.load(tmp_path / "model.pte") as llm:
        for sounds in ([short], [np.concatenate([other, short, other])], [short, np.concatenate([short, other])]):
            expected = small_vlm.reference(model, processor, messages(len(sounds)), sounds, TOKENS)
            generation = llm.chat(messages(len(sounds)), audio=sounds, max_new_tokens=TOKENS, ignore_eos=True)
            assert (generation.prompt, generation.result().tokens) == expected


@pytest.mark.parametrize("chunk", [0, 7])
def test_tokens_are_those_of_transformers(qwen2_audio, chunk):
    """With 0, 1, 2 and 3 sounds, alone and beside other requests, whatever the sizes of chunks."""
    model, processor, path = qwen2_audio
    prompts = {count: (messages(count), small_vlm.sounds(count)) for count in range(4)}
    expected = {count: small_vlm.reference(model, processor, *prompt, TOKENS) for count, prompt in prompts.items()}
    with LLM.load(path, chunk=chunk) as llm:
        running = {
            count: llm.chat(asked, audio=sounds, max_new_tokens=TOKENS, ignore_eos=True)
            for count, (asked, sounds) in prompts.items()
        }
        found = {count: (generation.prompt, generation.result().tokens) for count, generation in running.items()}
    assert found == expected
    assert len({tuple(tokens) for _, tokens in found.values()}) == len(found)


def test_features_are_those_of_the_processor(tmp_path):
    _, processor = small_vlm.save("qwen2_audio", tmp_path, weights=False)
    config = small_vlm.SOUND_FAMILIES["qwen2_audio"]()[1]
    settings = picture_settings(tmp_path, config, processor.tokenizer)
    features = FAMILIES["qwen2_audio"].features(settings)
    for sound in small_vlm.sounds(3, seed=4):
        plain = processor.image_processor(sound, sampling_rate=16000, padding="max_length", return_tensors="pt")
        padded = torch.zeros(1, settings["samples"])
        padded[0, : len(sound)] = torch.from_numpy(sound)
        torch.testing.assert_close(features(padded), plain["input_features"], atol=1e-4, rtol=0)


def test_messages_carry_sounds(llm, tmp_path, capsys):
    (sound,) = small_vlm.sounds(1)
    question = {"type": "text", "text": "def g("}
    expected = llm.chat([{"role": "user", "content": "def g("}], audio=[sound], max_new_tokens=8).result()
    data = base64.b64encode(wav(sound)).decode()
    for part in (
        {"type": "audio", "audio": sound},
        {"type": "audio", "audio": wav(np.stack([sound, sound], 1))},
        {"type": "audio", "audio": f"data:audio/wav;base64,{data}"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ):
        found = llm.chat([{"role": "user", "content": [part, question]}], max_new_tokens=8).result()
        assert found.tokens == expected.tokens
    (tmp_path / "a.wav").write_bytes(wav(sound))
    arguments = ["run", str(llm.program.path), "--prompt", "def g(", "--max-new-tokens", "8", "--temperature", "0"]
    assert main([*arguments, "--audio", str(tmp_path / "a.wav")]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_errors_are_one_line(llm):
    (sound,) = small_vlm.sounds(1)
    (picture,) = small_vlm.pictures(1)
    one = wav(sound)
    for data, problem in (
        (b"no sound", "damaged, or of another format"),
        (one[:20], "damaged, or of another format"),
        (wav(np.zeros(0, np.float32)), "got 0.0 s"),
        (wav(np.zeros(16002, np.float32)), "got more than 1 s"),
        (wav(np.zeros((9, MAX_CHANNELS + 1), np.float32)), "channels"),
        (wav(np.zeros(99, np.float32), format="AU"), "expected WAV"),
        (sound.astype(np.float64), "expected samples float32"),
        (sound[:100], "enough for a token"),
        (7, "expected a path, bytes, a data URL or samples"),
    ):
        with pytest.raises(SoundError, match=f"^audio: .*{problem}"):
            llm.chat(messages(1), audio=[data])
    with pytest.raises(SoundError, match="got fewer sounds"):
        llm.chat(messages(2), audio=[sound])
    with pytest.raises(ValueError, match="^image: the model takes sounds only"):
        llm.chat([{"role": "user", "content": "a"}], images=[picture])


def test_mutated_files_cost_an_error_at_most(llm):
    """A damaged file has samples or an error, and never more samples than the model takes."""
    generator = np.random.default_rng(5)
    (sound,) = small_vlm.sounds(1)
    files = [wav(sound), wav(sound, format="FLAC", subtype="PCM_16"), wav(sound, format="OGG", subtype="VORBIS")]
    for index in range(150):
        data = bytearray(files[index % len(files)])
        for place in generator.integers(0, min(len(data), 200), 4):
            data[place] = generator.integers(256)
        with contextlib.suppress(SoundError):
            assert 0 < len(open_sound(Sound(bytes(data)), 16000, 16000)) <= 16000
