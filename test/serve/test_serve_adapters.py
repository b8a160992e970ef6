"""Adapters in the APIs: as models, and loaded by clients."""

import httpx
import pytest
import served
from executorch_mlx.llm import LLM
from executorch_mlx.serve import Models, Settings, create_app
from served import NAME


@pytest.fixture(scope="module")
def server(adapter_program):
    with served.serve(adapter_program, allow_adapter_updates=True) as running:
        yield running


def post(server, path, **body):
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def text(server, model, **options):
    response = post(server, "completions", model=model, prompt="Return the", max_tokens=12, temperature=0, **options)
    assert response.status_code == 200 and response.json()["model"] == model, response.text
    return response.json()["choices"][0]["text"]


def test_clients_load_use_and_unload_adapters(server, adapter_folders):
    loaded = post(server, "load_lora_adapter", lora_name="poet", lora_path=str(adapter_folders["peft"]))
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'poet' added successfully."
    base, poet = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (base["id"], base["max_adapters"]) == (NAME, 3) and "parent" not in base
    assert (poet["id"], poet["parent"], poet["root"]) == ("poet", NAME, str(adapter_folders["peft"]))
    assert httpx.get(f"{server.url}/v1/models/poet").json()["parent"] == NAME
    answers = [server.llm.generate("Return the", max_new_tokens=12, adapter=a).result().text for a in (None, "poet")]
    assert [text(server, NAME), text(server, "poet")] == answers and answers[0] != answers[1]
    taken = post(server, "load_lora_adapter", lora_name="poet", lora_path=str(adapter_folders["mlx"]))
    assert taken.status_code == 400 and "'poet' is taken already" in taken.json()["error"]["message"]
    replaced = post(
        server, "load_lora_adapter", lora_name="poet", lora_path=str(adapter_folders["mlx"]), load_inplace=True
    )
    assert replaced.status_code == 200 and text(server, "poet") not in answers
    assert post(server, "unload_lora_adapter", lora_name="poet").text.endswith("removed successfully.")
    gone = post(server, "completions", model="poet", prompt="Hi")
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == [NAME]


def test_scores_of_a_prompt_are_those_of_the_adapter(server, adapter_folders):
    post(server, "load_lora_adapter", lora_name="scorer", lora_path=str(adapter_folders["peft"]))
    options = {"echo": True, "logprobs": 1, "prompt": "Return the", "max_tokens": 0}
    bodies = [post(server, "completions", model=model, **options).json() for model in (NAME, "scorer")]
    values = [body["choices"][0]["logprobs"]["token_logprobs"][1:] for body in bodies]
    assert len(values[0]) == len(values[1]) > 0 and values[0] != values[1]
    post(server, "unload_lora_adapter", lora_name="scorer")


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/none"}, 404, "lora_path: "),
        ("load_lora_adapter", {"lora_name": NAME, "lora_path": "/none"}, 400, "lora_name: the name 'small' is taken"),
        ("load_lora_adapter", {"lora_path": "/none"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "", "lora_path": "."}, 400, "lora_name"),
        ("unload_lora_adapter", {"lora_name": "x"}, 404, "lora_name: the adapter 'x' does not exist"),
    ],
)
def test_wrong_requests(server, path, body, status, message):
    response = post(server, path, **body)
    assert response.status_code == status and message in response.json()["error"]["message"], response.text


def test_clients_need_the_permission_of_the_server(adapter_program):
    with served.serve(adapter_program) as server:
        assert post(server, "load_lora_adapter", lora_name="x", lora_path="/none").status_code == 404


def test_an_unloaded_model_gets_its_adapters_back(adapter_program, adapter_folders):
    models = Models()
    models.add("small", lambda: LLM.load(adapter_program), 0)
    models.add_adapter("poet", adapter_folders["peft"], "small")
    models.load_all()
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with served.listening(create_app(models, settings=settings), settings) as url:
        body = {"model": "poet", "prompt": "Return the", "max_tokens": 12, "temperature": 0}
        answers = []
        for _ in range(2):
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
            models._unload_unused(models._entries["small"])
            assert not models.loaded
        assert answers[0] == answers[1] != ""
