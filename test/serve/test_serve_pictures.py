"""Pictures in the APIs of the server."""

import base64
import io

import httpx
import pytest
import small_vlm
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.serve import Settings, create_app
from served import listening


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    small_vlm.save("llava", folder)
    export_llm(folder, max_context_len=small_vlm.CONTEXT, chunk=64, speculation=False, verify=False).save(
        folder / "model.pte"
    )
    with LLM.load(folder / "model.pte") as llm:
        yield llm


def test_the_server_takes_pictures(llm):
    app = create_app(llm, name="model", settings=Settings(host="127.0.0.1", grace_seconds=0))
    (picture,) = small_vlm.pictures(1)
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    url = {"url": "data:image/png;base64," + data}
    text = {"type": "text", "text": "def g("}
    expected = llm.chat([{"role": "user", "content": "def g("}], images=[picture], max_new_tokens=8).result().text
    with listening(app, Settings(host="127.0.0.1", grace_seconds=0)) as address:

        def post(path, **fields):
            response = httpx.post(f"{address}{path}", json={"model": "model", "temperature": 0} | fields)
            return response.status_code, response.json()

        def chat(part, content=None):
            content = [part, text] if content is None else content
            return post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=8)

        part = {"type": "image_url", "image_url": url}
        assert chat(part)[1]["choices"][0]["message"]["content"] == expected
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url["url"]}, text]}
        status, response = post("/v1/responses", input=[item], max_output_tokens=16)
        assert status == 200 and response["output"][-1]["content"][0]["text"].startswith(expected)
        again = {"previous_response_id": response["id"], "input": "and", "max_output_tokens": 16}
        assert post("/v1/responses", **again)[0] == 200
        source = {"type": "base64", "media_type": "image/png", "data": data}
        message = {"role": "user", "content": [{"type": "image", "source": source}, text]}
        assert post("/v1/messages", messages=[message], max_tokens=8)[1]["content"][0]["text"] == expected
        ollama = {"messages": [{"role": "user", "content": text["text"], "images": [data]}], "stream": False}
        options = {"temperature": 0, "num_predict": 8}
        assert post("/api/chat", **ollama, options=options)[1]["message"]["content"] == expected
        for part, message in (
            (
                {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}},
                "image_url: got 'http://127.0.0.1/",
            ),
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}, "image: "),
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image: got a file of another"),
            ({"type": "input_audio"}, "got a part of type 'input_audio'"),
        ):
            status, body = chat(part)
            assert status == 400 and message in body["error"]["message"] and "\n" not in body["error"]["message"]
