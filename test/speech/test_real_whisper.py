"""A trained Whisper: the check accepts its program, silence has no text, and a spoken sentence is right."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import real_whisper
from executorch_mlx.cli.main import main
from executorch_mlx.speech import SpeechModel, read_audio
from executorch_mlx.speech.export import export_speech

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "executorch-mlx"
BEGIN = "The sun is shining and the birds"
SENTENCE = f"{BEGIN} are singing."


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = real_whisper.fetch(CACHE)
    exported = export_speech(folder)
    exported.save(path := tmp_path_factory.mktemp("real") / "tiny.pte")  # with the check
    assert exported.check.ok and exported.check.agreeing == 8
    return path


@pytest.fixture(scope="module")
def model(program):
    with SpeechModel(program) as model:
        yield model


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed: tools/setup.sh speech")
    path = tmp_path_factory.mktemp("sound") / "spoken.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", path, SENTENCE], check=True)
    return path


def text(segments):
    return "".join(segment.text for segment in segments).strip()


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("kind", ["silence", "faint noise", "noise", "hum"])
def test_a_sound_without_speech_has_no_text(model, kind, timestamps):
    time = numpy.arange(5 * 16_000) / 16_000
    noise = numpy.random.default_rng(0).standard_normal(len(time))
    sounds = {"silence": 0 * time, "faint noise": 1e-4 * noise, "noise": 0.1 * noise}
    sound = sounds.get(kind, 0.05 * numpy.sin(2 * numpy.pi * 50 * time)).astype("float32")
    assert list(model.transcribe(sound, timestamps=timestamps)) == []
    if kind == "silence":  # without the rule, the model invents a word
        assert text(model.transcribe(sound, timestamps=timestamps, no_speech_threshold=1)) == "you"


def test_a_spoken_sentence_is_right(model, program, spoken, capsys):
    (segment,) = model.transcribe(spoken)
    assert segment.text.strip() == SENTENCE and 0 <= segment.start < 0.5 and 2 < segment.end < 4
    assert text(model.transcribe(spoken, timestamps=False)) == SENTENCE
    assert main(["transcribe", str(program), str(spoken), "--format", "plain"]) == 0
    assert capsys.readouterr().out.strip() == SENTENCE


def test_voice_activity_leaves_out_what_is_quiet(model, spoken):
    sound = read_audio(spoken)
    quiet = (1e-4 * numpy.random.default_rng(1).standard_normal(40 * 16_000)).astype("float32")
    sound = numpy.concatenate([quiet[: 16_000 * 3], sound, quiet, sound])
    first, second = model.transcribe(sound, voice_activity=True)
    assert text([first]).startswith(BEGIN) and text([second]).startswith(BEGIN)
    length = len(read_audio(spoken)) / 16_000
    assert 2.4 < first.start < 3.5 and 43 + length - 0.5 < second.start < 43 + length + 0.5


def test_a_prompt_spells_names(model, program, spoken, tmp_path, capsys):
    path = tmp_path / "name.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", path, "My name is Katherine Smyth."], check=True)
    prompt = "Catheryn Smithe"
    without, given = text(model.transcribe(path)), text(model.transcribe(path, prompt=prompt))
    assert prompt not in without and prompt in given
    arguments = ["transcribe", str(program), str(path), "--format", "plain", "--prompt", prompt]
    assert main(arguments) == 0 and capsys.readouterr().out.strip() == given
    # A special token in the text is text, and of a long text, the end counts.
    assert text(model.transcribe(path, prompt="<|endoftext|> word " * 500 + prompt))


def test_words_have_times(model, program, spoken, tmp_path, capsys):
    import soundfile

    sound = read_audio(spoken)
    pause, length = 1.5, len(sound) / 16_000
    silence = numpy.zeros(int(pause * 16_000), "float32")
    later = numpy.concatenate([silence, sound, silence])
    for options in ({}, {"timestamps": False}, {"voice_activity": True}):
        (segment,) = model.transcribe(later, words=True, **options)
        assert [word.text.strip() for word in segment.words] == SENTENCE.split(), options
        assert "".join(word.text for word in segment.words) == segment.text
        assert all(a.start < a.end <= b.start for a, b in itertools.pairwise(segment.words))
        first, last = segment.words[0], segment.words[-1]
        assert abs(first.start - pause) < 0.4 and abs(last.end - pause - length) < 0.4
        middle = next(word for word in segment.words if word.text == " and")
        assert 0.3 < (middle.start - pause) / length < 0.6
    assert not any(segment.words for segment in model.transcribe(spoken))
    soundfile.write(tmp_path / "later.wav", later, 16_000)
    assert main(["transcribe", str(program), str(tmp_path / "later.wav"), "--format", "json", "--words"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [word["text"].strip() for word in line["words"]] == SENTENCE.split()
