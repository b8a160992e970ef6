"""Exported speech models give the tokens of transformers, and sound files become text."""

import copy
import json
import shutil
import subprocess

import numpy
import pytest
import small_speech
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.inspect.pte import read_pte
from executorch_mlx.llm import LLM, SettingError
from executorch_mlx.speech import SpeechModel, read_audio
from executorch_mlx.speech.export import export_speech
from small_speech import EOS, noise
from transformers import WhisperFeatureExtractor

MAX_TOKENS = 20


class Exported:
    """A model of transformers and its program."""

    def __init__(self, folder, original, name, **options):
        self.original, self.path = copy.deepcopy(original), folder / f"{name}.pte"
        self.exported = export_speech(original, tokenizer=small_speech.tokenizer(), **options)
        self.exported.save(self.path)
        self.model = SpeechModel(self.path)

    def tokens(self, samples, **options):
        answer = self.model.generate(samples, max_new_tokens=MAX_TOKENS, **options)
        return answer.prompt + answer.result().tokens


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return Exported(tmp_path_factory.mktemp("whisper"), small_speech.whisper(), "whisper", feature_extractor=extractor)


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory):
    return Exported(tmp_path_factory.mktemp("moonshine"), small_speech.moonshine(), "moonshine", max_seconds=2.0)


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming")
    return Exported(folder, small_speech.moonshine_streaming(), "streaming", max_seconds=1.0)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A WAV file of speech at 22,050 Hz."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed: tools/setup.sh speech")
    path = tmp_path_factory.mktemp("sound") / "spoken.wav"
    subprocess.run(["espeak-ng", "-w", path, "The quick brown fox jumps over the lazy dog."], check=True)
    return path


def features(samples):
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return torch.as_tensor(extractor(samples, sampling_rate=16_000)["input_features"])


def reference(exported, **inputs):
    options = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        tokens = exported.original.generate(**inputs, **options)[0].tolist()
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


@pytest.mark.parametrize("count", [16_000, 7_000])
@pytest.mark.parametrize(
    "options",
    [{"language": "de", "task": "translate"}, {"task": "transcribe"}, {"language": "english", "timestamps": True}],
    ids=["translate", "detect", "timestamps"],
)
def test_whisper_gives_the_tokens_of_transformers(whisper, options, count):
    samples = noise(count, seed=count)
    theirs = {"task": "transcribe"} | options
    theirs["return_timestamps"] = theirs.pop("timestamps", False)
    expected = reference(whisper, input_features=features(samples), force_unique_generate_call=True, **theirs)
    assert whisper.tokens(samples, **options) == expected
    assert len(set(expected)) > 8


def test_moonshine_gives_the_tokens_of_transformers(moonshine):
    answers = set()
    for count in (32_000, 16_000, 9_999, 1_279):
        samples = noise(count, seed=count)
        expected = reference(moonshine, input_values=torch.as_tensor(samples)[None])
        assert moonshine.tokens(samples) == expected, count
        answers.add(tuple(expected))
    assert len(answers) == 4


def test_moonshine_streaming_gives_the_tokens_of_transformers(streaming):
    """The reference gets the mask of its feature extractor. Without a mask, its encoder would use full attention."""
    for count in (16_000, 8_030, 640):
        samples = noise(count, seed=count)
        padded = -(-count // 80) * 80  # a whole number of frames of 80 samples
        values, mask = torch.zeros(1, padded), torch.zeros(1, padded, dtype=torch.int64)
        values[0, :count], mask[0, :count] = torch.as_tensor(samples), 1
        assert streaming.tokens(samples) == reference(streaming, input_values=values, attention_mask=mask), count


def test_each_method_is_one_delegate_and_only_encode_has_the_cross_attention_keys(whisper, moonshine, streaming):
    for exported in (whisper, moonshine, streaming):
        assert exported.exported.report.refused == ()
        contents = read_pte(exported.path)
        assert not any(contents.calls_outside_mlx.get(name) for name in ("encode", "forward"))
        names = {
            delegate.method: {slot.name for slot in delegate.graph.named_slots or ()} for delegate in contents.delegates
        }
        assert sorted(names) == ["encode", "forward"] and len(contents.delegates) == 2
        projections = {method: sum("encoder_attn.k_proj.weight" in n for n in found) for method, found in names.items()}
        assert projections == {"encode": 1, "forward": 0}


def test_requests_with_the_same_sound_share_the_encoder(whisper):
    samples, other = noise(16_000, seed=1), noise(16_000, seed=2)
    alone = whisper.model.generate(samples, language="de", max_new_tokens=MAX_TOKENS).result().tokens
    again = whisper.model.generate(samples.copy(), language="de", max_new_tokens=MAX_TOKENS)
    assert again.result().tokens == alone and again.metrics.cached_tokens > 0
    changed = whisper.model.generate(other, language="de", max_new_tokens=MAX_TOKENS)
    assert changed.result().tokens != alone and changed.metrics.cached_tokens == 0
    assert whisper.tokens(samples, language="de")[4:] == alone


def test_sampling_depends_on_the_seed_alone(whisper):
    samples = noise(16_000)
    settings = {"language": "en", "temperature": 1.0}
    draws = [whisper.tokens(samples, seed=seed, **settings) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_long_sound_is_transcribed_in_windows(whisper, moonshine):
    samples = noise(56_000, seed=4)
    segments = list(whisper.model.transcribe(samples, language="de", max_new_tokens=MAX_TOKENS))
    assert segments[0].start < 1 and segments[-1].end <= 3.5
    assert all(a.start <= a.end and a.start <= b.start for a, b in zip(segments, segments[1:]))
    assert all(segment.language == "de" and segment.text for segment in segments)
    first = list(segments[0].tokens)
    assert whisper.tokens(samples[:16_000], language="de", timestamps=True)[3:][: len(first)] == first
    windows = list(moonshine.model.transcribe(samples))
    assert [w.start for w in windows[1:]] == [w.end for w in windows[:-1]] and windows[-1].end == 3.5
    assert 2 <= len(windows) <= 3 and all(w.end - w.start <= 2 for w in windows)
    for window in windows:  # the tokens per second are limited
        assert len(window.tokens) <= 6.5 * (window.end - window.start)
    assert list(whisper.model.transcribe(samples[:0])) == []


def test_transcribe_reads_sound_files(whisper, spoken, tmp_path, capsys):
    import soundfile

    samples, rate = soundfile.read(spoken, dtype="float32")
    assert rate == 22_050
    for name in ("stereo.flac", "stereo.mp3"):
        soundfile.write(tmp_path / name, numpy.stack([samples, samples], 1), rate)
    outputs = {}
    for path in (spoken, tmp_path / "stereo.flac", tmp_path / "stereo.mp3"):
        assert main(["transcribe", str(whisper.path), str(path), "--format", "json", "--max-new-tokens", "12"]) == 0
        outputs[path.suffix] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert outputs[".wav"] == outputs[".flac"] and outputs[".mp3"]
    ours = read_audio(spoken)
    assert abs(len(ours) / 16_000 - len(samples) / 22_050) < 0.01
    expected = list(whisper.model.transcribe(ours, max_new_tokens=12))
    assert [segment["text"] for segment in outputs[".wav"]] == [segment.text for segment in expected]
    assert outputs[".wav"][-1]["end"] <= len(samples) / 22_050 + 0.01
    arguments = ["transcribe", str(whisper.path), str(spoken), "--language", "fr", "--task", "translate"]
    assert main([*arguments, "--format", "srt", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith("1\n00:00:00,")
    assert main([*arguments, "--no-timestamps", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith("[00:00.000 → 00:")


def test_read_audio_mixes_and_resamples(tmp_path):
    import soundfile

    time = numpy.arange(44_100) / 44_100
    tone = numpy.sin(2 * numpy.pi * 440 * time)
    soundfile.write(tmp_path / "tone.wav", numpy.stack([tone, 0 * tone], 1), 44_100, subtype="FLOAT")
    samples = read_audio(tmp_path / "tone.wav")
    expected = 0.5 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(16_000) / 16_000)
    assert len(samples) == 16_000
    numpy.testing.assert_allclose(samples[1000:-1000], expected[1000:-1000], atol=1e-3)


def test_errors_name_the_argument(whisper, moonshine, tmp_path, capsys, logits_program):
    samples = noise(1000)
    bad = tmp_path / "text.wav"
    bad.write_text("no sound")
    for arguments, message in [
        ([str(bad)], "text.wav: "),
        (["/nowhere.wav"], "/nowhere.wav: no such file"),
        ([str(bad), "--language", "tlh"], "text.wav"),
    ]:
        assert main(["transcribe", str(whisper.path), *arguments]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="language: got tlh, expected en, de, fr"):
        whisper.model.prompt("tlh", "transcribe", timestamps=False)
    with pytest.raises(ValueError, match="language: got tlh, expected en, de, fr"):
        whisper.model.generate(samples, language="tlh")
    with pytest.raises(ValueError, match="language: got de, expected none: the model has one language only"):
        moonshine.model.generate(samples, language="de")
    with pytest.raises(ValueError, match="task: got translate, expected transcribe with this model"):
        moonshine.model.generate(samples, task="translate")
    with pytest.raises(SettingError, match="timestamps: the model has no timestamp tokens"):
        moonshine.model.generate(samples, timestamps=True)
    with pytest.raises(SettingError, match="samples: got 16001, expected 1 to 16000 at 16000 Hz"):
        whisper.model.generate(noise(16_001), language="de")
    with pytest.raises(SettingError, match="samples: got NaN or infinity"):
        whisper.model.generate(samples * numpy.nan, language="de")
    with pytest.raises(ValueError, match=r"sound: got shape \[2, 500\], expected samples \[N\]"):
        whisper.model.generate(samples.reshape(2, -1), language="de")
    with pytest.raises(ValueError, match="sound: got samples of int16, expected floating-point numbers from -1 to 1"):
        whisper.model.generate((samples * 32767).astype(numpy.int16), language="de")
    with pytest.raises(SettingError, match="volume: unknown, expected max_new_tokens, temperature"):
        whisper.model.generate(samples, language="de", volume=11)
    with pytest.raises(ValueError, match="got a speech model, expected a language model"):
        LLM.load(whisper.path)
    with pytest.raises(ValueError, match="got a language model, expected a speech model"):
        SpeechModel(logits_program)


def test_transcriptions_of_the_server(whisper, tmp_path):
    from executorch_mlx.serve import Models, create_app
    from executorch_mlx.serve.models import load_model
    from fastapi.testclient import TestClient

    soundfile = pytest.importorskip("soundfile")
    path = tmp_path / "talk.wav"
    soundfile.write(path, noise(40_000), 16_000)
    segments = list(whisper.model.transcribe(path, temperature=0.0))
    text = "".join(segment.text for segment in segments).strip()
    models = Models()
    models.add("whisper", lambda: load_model(whisper.path), 0)
    with TestClient(create_app(models)) as client:

        def post(sound=None, task="transcriptions", **fields):
            files = {"file": ("talk.wav", sound or path.read_bytes())}
            return client.post(f"/v1/audio/{task}", data={"model": "whisper"} | fields, files=files)

        assert post().json() == {"text": text}
        assert post(response_format="text", temperature="0").text == text + "\n"
        given = post(response_format="verbose_json").json()
        assert [part["text"] for part in given["segments"]] == [segment.text for segment in segments]
        assert given["language"] == segments[0].language and given["duration"] == segments[-1].end
        assert post(response_format="vtt").text.startswith("WEBVTT\n\n00:00:0")
        assert post(response_format="srt").text.startswith("1\n00:00:0")
        expected = list(whisper.model.transcribe(path, task="translate"))
        assert post(task="translations").json()["text"] == "".join(part.text for part in expected).strip()
        for fields, message in (
            ({"sound": b"no sound"}, "file: "),
            ({"language": "xx"}, "language: got xx"),
            ({"prompt": "Oslo"}, "prompt: got text, but this model takes none"),
            ({"temperature": "hot"}, "temperature: got 'hot', expected a number from 0 to 2"),
            ({"response_format": "xml"}, "response_format: got 'xml'"),
        ):
            response = post(**fields)
            assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)
        response = client.post("/v1/completions", json={"model": "whisper", "prompt": "x"})
        assert response.json()["error"]["message"] == "model: got 'whisper', expected a language model"
        assert client.get("/v1/models").json()["data"][0]["task"] == "transcription"
