"""Several models in one server."""

import asyncio
import shutil
import time
from functools import partial

import httpx
import pytest
import served
import small_llm
from executorch_mlx.llm import LLM
from executorch_mlx.serve import Models, Settings, create_app


@pytest.fixture
def paths(chat_program, tmp_path):
    """Two files, so that their weights are not shared."""
    return {name: shutil.copy(chat_program, tmp_path / f"{name}.pte") for name in ("first", "second")}


def models_of(paths, budget=None, idle_seconds=0.0) -> Models:
    models = Models(budget, idle_seconds)
    for name, path in paths.items():
        models.add(name, partial(LLM.load, path), path.stat().st_size)
    models.load_all()
    return models


def complete(url: str, model: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "Return", "seed": 1}, timeout=60)


def test_models_are_loaded_on_demand_within_the_budget(paths):
    unlimited = models_of(paths)
    model_bytes = max(entry.size for entry in unlimited._entries.values())
    unlimited.close()
    models = models_of(paths, budget=int(1.5 * model_bytes))
    assert [*models.loaded] == ["second"]
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with served.listening(create_app(models, settings=settings), settings) as url:
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [(m["id"], m["loaded"], m["context_length"]) for m in listed] == [
            ("first", False, small_llm.CONTEXT),
            ("second", True, small_llm.CONTEXT),
        ]
        assert all(0 <= time.time() - m["created"] < 600 for m in listed)
        texts = [complete(url, name).json()["choices"][0]["text"] for name in ("first", "second", "first")]
        assert texts[0] == texts[1] == texts[2] and [*models.loaded] == ["first"]
        error = complete(url, "third").json()["error"]
        assert error["message"] == "model: got 'third', which does not exist; this server has 'first', 'second'"
        error = httpx.post(f"{url}/tokenize", json={"prompt": "Return"}).json()["error"]
        assert (error["message"], error["param"]) == ("model: got none, expected one of 'first', 'second'", "model")
        # What other models allocated during a load makes a size too large, until the model is loaded alone.
        models._entries["second"].size = 9 * model_bytes
        assert complete(url, "second").status_code == 200 and models._entries["second"].size <= model_bytes
        assert complete(url, "first").status_code == 200
        # A model is not unloaded while a request uses it, so the other model has no room.
        models._entries["first"].users += 1
        response = complete(url, "second")
        assert response.status_code == 503 and "does not fit into memory while others run" in response.text
    models.close()


def test_idle_models_are_unloaded_and_come_back(paths):
    models = models_of(paths, idle_seconds=0.2)
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with served.listening(create_app(models, settings=settings), settings) as url:
        deadline = time.monotonic() + 60
        while models.loaded:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        assert complete(url, "first").status_code == 200
    models.close()


def test_wrong_models_are_errors_at_the_start(paths):
    with pytest.raises(ValueError, match="first: takes .* bytes, the budget is 1000"):
        models_of(paths, budget=1000)
    models = Models()
    models.add("a", lambda: None, 0)
    with pytest.raises(ValueError, match="got 'a' twice"):
        models.add("a", lambda: None, 0)


def test_a_model_that_a_request_got_in_the_meantime_stays_loaded(paths):
    models = models_of(paths)
    model = asyncio.run(models.acquire("second"))
    entry = models._entries["second"]
    models._unload_unused(entry)
    assert entry.model is model
    models.release(model)
    models._unload_unused(entry)
    assert entry.model is None
    models.close()
