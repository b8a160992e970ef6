"""Batches and serving on a Ray cluster of several nodes on this machine. `make test-ray` runs it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray", reason="the extra ray is not installed: make test-ray installs it")

from executorch_mlx.batch import Request, RequestLines, answer_all  # noqa: E402
from executorch_mlx.batch.request_file import request_id  # noqa: E402
from executorch_mlx.cli.main import main  # noqa: E402
from executorch_mlx.llm import LLM  # noqa: E402
from executorch_mlx.ray import serve_app  # noqa: E402
from executorch_mlx.ray.engine import Engine, ModelOptions  # noqa: E402
from executorch_mlx.ray.engines import RayEngines, ray_engines  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))
import killed  # noqa: E402

SMALL_NODE = {"object_store_memory": 80 * 2**20}
REQUEST_COUNT = 240
# Workers cannot import this module. Its classes, such as `Fragile`, are sent to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster():
    head = {"num_cpus": 0, "include_dashboard": False, **SMALL_NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(3):
        cluster.add_node(num_cpus=1, **SMALL_NODE)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def engine_processes(node) -> list[int]:
    """Return the ids of the engine processes on a node of the cluster."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and (folder / "cmdline").read_bytes().startswith(b"ray::Engine"):
                found.append(int(folder.name))
        except OSError:  # the process has ended
            pass
    return found


def wait_until(condition, process=None, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.01)


def test_batch_survives_the_loss_of_a_worker_and_of_a_machine(cluster, batch_program, tmp_path):
    requests, alone, output = (tmp_path / f"{name}.jsonl" for name in ("requests", "alone", "answers"))
    killed.write_requests(requests, REQUEST_COUNT, "batch")
    assert main(["batch", str(batch_program), str(requests), "-o", str(alone), "--name", "batch"]) == 0
    nodes = list(cluster.worker_nodes)
    command = [*killed.COMMAND, batch_program, requests, "-o", output, "--name", "batch", "--ray", cluster.address]
    process = subprocess.Popen(command)
    wait_until(lambda: killed.lines_in(output) > REQUEST_COUNT // 6, process)
    wait_until(lambda: engine_processes(nodes[0]), process)
    os.kill(engine_processes(nodes[0])[0], signal.SIGKILL)
    wait_until(lambda: killed.lines_in(output) > REQUEST_COUNT // 3, process)
    cluster.remove_node(nodes[1], allow_graceful=False)
    assert process.wait(timeout=300) == 0
    cluster.add_node(num_cpus=1, **SMALL_NODE)
    assert killed.texts_in(output) == killed.texts_in(alone)


class Fragile(Engine):
    """An engine whose process ends when it gets a request with the word poison."""

    async def answer(self, url, body):
        if b"poison" in body:
            os._exit(1)
        return await super().answer(url, body)


def test_request_that_kills_engines_harms_no_other(cluster, batch_program, tmp_path):
    path, answers = tmp_path / "requests.jsonl", []
    killed.write_requests(path, 20, "batch")
    poison = Request(request_id(99, b""), "poison", "/v1/completions", b"poison")
    requests = list(RequestLines(path))

    async def work():
        ray.init(cluster.address, log_to_driver=False, ignore_reinit_error=True)
        engines = RayEngines(ModelOptions(batch_program, "batch"), Fragile)
        watching = asyncio.create_task(engines.watch())
        await answer_all([*requests[:10], poison, *requests[10:]], engines, answers.append)
        watching.cancel()
        engines.close()

    asyncio.run(work())
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers) == 21
    assert by_id.pop("poison")["error"]["code"] == "engine_died"
    assert all(answer["response"]["status_code"] == 200 for answer in by_id.values())


def test_model_that_no_machine_can_load_is_an_error(cluster, tmp_path):
    (tmp_path / "bad.pte").write_bytes(b"no program")

    async def work():
        async with ray_engines(ModelOptions(tmp_path / "bad.pte", "bad"), cluster.address) as engines:
            await engines.answer(Request("", "", "/v1/completions", b"{}"))

    with pytest.raises(RuntimeError, match="no engine can run in the Ray cluster: .*bad.pte"):
        asyncio.run(work())


# Serve ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(cluster, batch_program):
    from ray import serve

    ray.init(cluster.address, log_to_driver=False, ignore_reinit_error=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port})
    autoscaling = {"upscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 1, "downscale_delay_s": 600}
    sizes = {"rows": 2, "min_replicas": 2, "max_replicas": 3, "autoscaling": autoscaling}
    serve.run(serve_app(batch_program, name="small", api_key="secret", **sizes))
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: httpx.get(f"{address}/health").status_code == 200)  # the proxy learns of the route with a delay
    yield address
    serve.shutdown()


KEY = {"Authorization": "Bearer secret"}


def post(url, path="/v1/completions", **body):
    body = {"model": "small", "temperature": 0, "max_tokens": 4} | body
    return httpx.post(f"{url}{path}", json=body, headers=KEY, timeout=120)


def test_serve_app_answers_like_the_server(url, batch_program):
    with LLM.load(batch_program) as llm:
        expected = llm.generate("Return the", max_new_tokens=4).result().text
        chat = llm.chat([{"role": "user", "content": "Hello"}], max_new_tokens=4).result().text
    assert post(url, prompt="Return the").json()["choices"][0]["text"] == expected
    messages = [{"role": "user", "content": "Hello"}]
    answer = post(url, "/v1/chat/completions", messages=messages)
    assert answer.json()["choices"][0]["message"]["content"] == chat
    assert answer.headers["content-type"] == "application/json"
    assert httpx.get(f"{url}/v1/models", headers=KEY).json()["data"][0]["id"] == "small"
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert post(url, prompt="x" * 17 * 2**20).status_code == 413
    refused = post(url, prompt="x", model="other")
    assert refused.status_code == 404 and refused.json()["error"]["param"] == "model"
    assert httpx.post(f"{url}/v1/completions", content=b"{", headers=KEY).status_code == 400
    body = {"model": "small", "prompt": "Return the", "temperature": 0, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=KEY) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected


def test_requests_go_to_the_replica_that_holds_their_prefix(url):
    prompts = [f"{letter} is the beginning of a long prompt. " * 8 for letter in "AB"]
    for turn in range(4):
        for prompt in prompts:
            usage = post(url, prompt=prompt + " And more." * turn).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or cached > 0.8 * usage["prompt_tokens"], (turn, prompt)


def test_client_that_leaves_ends_its_request_and_load_adds_replicas(url):
    body = {"model": "small", "prompt": "Return the", "max_tokens": 1000, "stream": True, "ignore_eos": True}

    def running() -> int:
        return max(httpx.get(f"{url}/health").json()["running"] for _ in range(6))

    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"temperature": 0}, headers=KEY) as response:
        next(response.iter_lines())
    wait_until(lambda: running() == 0)

    from ray import serve

    def replicas() -> int:
        return serve.status().applications["default"].deployments["small-engine"].replica_states.get("RUNNING", 0)

    assert replicas() == 2
    stopped = threading.Event()

    def load():
        while not stopped.is_set():
            post(url, prompt="Return the", max_tokens=400, ignore_eos=True)

    threads = [threading.Thread(target=load) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: replicas() == 3)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
