"""Sounds in the chat API of the server."""

import base64
import io
import re

import httpx
import pytest
import small_vlm
import soundfile
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.serve import Settings, create_app
from served import listening


@pytest.fixture
def llm(tmp_path):
    small_vlm.save("qwen2_audio", tmp_path)
    exported = export_llm(tmp_path, pictures=True, max_context_len=256, chunk=32, speculation=False, verify=False)
    exported.save(tmp_path / "model.pte")
    with LLM.load(tmp_path / "model.pte") as llm:
        yield llm


def test_the_server_takes_sounds(llm):
    (sound,) = small_vlm.sounds(1)
    file = io.BytesIO()
    soundfile.write(file, sound, 16000, format="WAV", subtype="FLOAT")
    data = base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": "def g("}
    expected = llm.chat([{"role": "user", "content": "def g("}], audio=[sound], max_new_tokens=8).result().text
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with listening(create_app(llm, name="model", settings=settings), settings) as address:

        def chat(part):
            message = {"role": "user", "content": [part, text]}
            fields = {"model": "model", "temperature": 0, "max_tokens": 8, "messages": [message]}
            response = httpx.post(f"{address}/v1/chat/completions", json=fields)
            return response.status_code, response.json()

        good = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        assert chat(good)[1]["choices"][0]["message"]["content"] == expected
        for part, problem in (
            ({"type": "input_audio", "input_audio": {"data": data[:20], "format": "wav"}}, "damaged"),
            ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "invalid base64"),
            ({"type": "input_audio", "input_audio": {"format": "wav"}}, "got format, expected data and format"),
            ({"type": "input_audio"}, "got a part of type 'input_audio'"),
            ({"type": "image_url", "image_url": {"url": f"data:audio/wav;base64,{data}"}}, "takes sounds only|tokens"),
        ):
            status, body = chat(part)
            assert status in (400, 422) and re.search(problem, body["error"]["message"]), body
