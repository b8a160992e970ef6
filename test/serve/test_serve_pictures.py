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
from test_serve_page import BROWSER, DRIVER, ENTER, browser  # noqa: F401  (a fixture)


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


@pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with its chromedriver here")
def test_the_page_takes_pasted_and_dropped_pictures(llm, browser):
    pictures = small_vlm.pictures(2)
    content = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": "def g("}]
    expected = llm.chat([{"role": "user", "content": content}], max_new_tokens=8).result().text
    app = create_app(llm, name="model", settings=Settings(host="127.0.0.1", grace_seconds=0))
    with listening(app, Settings(host="127.0.0.1", grace_seconds=0)) as address:
        browser.open(f"{address}/")
        browser.until("model !== null")
        browser.js(
            "(document.getElementById('temperature').value = 0, document.getElementById('max-tokens').value = 8)"
        )
        for count, (picture, event) in enumerate(zip(pictures, ("ClipboardEvent('paste'", "DragEvent('drop'"))):
            file = io.BytesIO()
            picture.save(file, "PNG")
            levels = f"Uint8Array.from(atob('{base64.b64encode(file.getvalue()).decode()}'), c => c.charCodeAt(0))"
            field = "clipboardData" if count == 0 else "dataTransfer"
            browser.js(
                "(() => { const data = new DataTransfer();"
                f"data.items.add(new File([{levels}], 'a.png', {{type: 'image/png'}}));"
                f"document.getElementById('text').dispatchEvent(new {event}, {{{field}: data, bubbles: true}}));"
                "})()"
            )
            browser.until(f"pictures.length === {count + 1}")
        browser.type("#text", "def g(" + ENTER)
        browser.until("messages.length === 2 && running === null")
        assert browser.js("messages[1].content") == expected
        assert browser.js("document.querySelectorAll('#chat .user .picture').length") == 2
        assert browser.js("pictures.length") == 0
