"""`/v1/audio/transcriptions`, called with the `openai` package."""

import functools
import io
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import served
import small_speech
from executorch_mlx.serve import Models, Settings, create_app
from executorch_mlx.serve.models import load_model
from executorch_mlx.speech import SpeechModel
from executorch_mlx.speech.export import export_speech
from small_speech import noise
from transformers import WhisperFeatureExtractor

soundfile = pytest.importorskip("soundfile")
SECONDS = 2.5


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Whisper with alignment heads, and Moonshine, which takes no prompt and gives no words."""
    folder = tmp_path_factory.mktemp("speech")
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    whisper = small_speech.whisper()
    whisper.generation_config.alignment_heads = [[0, 1], [0, 2]]
    whisper.generation_config.prev_sot_token_id = 1475
    options = {"whisper": {"feature_extractor": extractor}, "moonshine": {"max_seconds": 2.0}}
    for name, model in {"whisper": whisper, "moonshine": small_speech.moonshine()}.items():
        exported = export_speech(model, tokenizer=small_speech.tokenizer(), **options[name])
        exported.save(folder / f"{name}.pte")
    return folder


def limited(model):
    """The answers of random weights would fill the context."""
    model.transcribe = functools.partial(model.transcribe, max_new_tokens=16)
    return model


@pytest.fixture(scope="module")
def client(programs):
    models = Models()
    for path in sorted(programs.iterdir()):
        models.add(path.stem, lambda path=path: limited(load_model(path)), path.stat().st_size)
    settings = Settings(host="127.0.0.1", grace_seconds=0, strict=True)
    with served.listening(create_app(models, settings=settings), settings) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    models.close()


@pytest.fixture(scope="module")
def sound():
    file = io.BytesIO()
    soundfile.write(file, noise(int(SECONDS * 16_000)), 16_000, format="WAV")
    return "a.wav", file.getvalue()


@pytest.fixture(scope="module")
def segments(programs, sound):
    with limited(SpeechModel(programs / "whisper.pte")) as model:
        samples, _ = soundfile.read(io.BytesIO(sound[1]), dtype="float32")
        yield lambda **options: list(model.transcribe(samples, language="en", **options))


def create(client, sound, model="whisper", **fields):
    return client.audio.transcriptions.create(model=model, file=sound, language="en", **fields)


def text_of(segments):
    return "".join(segment.text for segment in segments).strip()


def test_formats(client, sound, segments):
    parts = segments()
    assert create(client, sound).text == text_of(parts)
    assert create(client, sound, response_format="text") == text_of(parts) + "\n"
    assert create(client, sound, response_format="srt").count(" --> ") == len(parts)
    assert create(client, sound, response_format="vtt").startswith("WEBVTT\n")
    body = create(client, sound, response_format="verbose_json")
    assert [(part.start, part.end, part.text) for part in body.segments] == [(p.start, p.end, p.text) for p in parts]
    assert (body.duration, body.language, body.text) == (
        pytest.approx(SECONDS),
        "en",
        text_of(parts),
    ) and not body.words


def test_prompt(client, sound, segments):
    given = create(client, sound, prompt="The sum of the values").text
    assert given == text_of(segments(prompt="The sum of the values")) != text_of(segments())


def test_words(client, sound, segments):
    words = [word for part in segments(words=True) for word in part.words]
    for granularities in (["word"], ["word", "segment"]):
        body = create(client, sound, response_format="verbose_json", timestamp_granularities=granularities)
        assert [(w.word, w.start, w.end) for w in body.words] == [(w.text.strip(), w.start, w.end) for w in words] != []
        assert bool(body.segments) == ("segment" in granularities)


def test_stream(client, sound, segments):
    events = list(create(client, sound, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert len(events) > 2 and events[-1].text == text_of(segments())
    assert "".join(event.delta for event in events[:-1]).rstrip() == events[-1].text


@pytest.mark.parametrize(
    "param, fields",
    [
        ("response_format", {"response_format": "xml"}),
        ("timestamp_granularities", {"timestamp_granularities": ["word"]}),
        ("timestamp_granularities", {"timestamp_granularities": ["line"], "response_format": "verbose_json"}),
        ("stream", {"stream": True, "response_format": "srt"}),
        ("stream", {"extra_body": {"stream": "yes"}}),
        ("temperature", {"temperature": 3}),
        ("language", {"language": "xx"}),
        ("language", {"language": "xx", "stream": True}),
        ("prompt", {"prompt": "a", "model": "moonshine"}),
        (
            "timestamp_granularities",
            {"timestamp_granularities": ["word"], "response_format": "verbose_json", "model": "moonshine"},
        ),
        ("beam", {"extra_body": {"beam": "1"}}),
    ],
    ids=json.dumps,
)
def test_errors_name_the_field(client, sound, param, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(**{"model": "whisper", "file": sound} | fields)
    assert caught.value.param == param


def test_a_file_that_is_no_sound(client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="file"):
            client.audio.transcriptions.create(model="whisper", file=("a.wav", b"RIFF"), stream=stream)


def test_requests_at_once_do_not_mix(client, sound, segments):
    """The methods that find the words share state."""

    def ask(seed):
        file = io.BytesIO()
        soundfile.write(file, noise(15_000, seed), 16_000, format="WAV")
        body = create(
            client, ("a.wav", file.getvalue()), response_format="verbose_json", timestamp_granularities=["word"]
        )
        return [(word.word, word.start, word.end) for word in body.words]

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


def test_a_text_that_fills_the_context_has_no_words(programs):
    with SpeechModel(programs / "whisper.pte") as model:
        parts = list(model.transcribe(noise(15_000), language="en", words=True))
    assert any(part.text for part in parts)
