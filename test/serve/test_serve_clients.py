"""The scripts in examples/clients, run as users run them. A script whose library is missing is skipped."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from json_schemas import ENDING
from served import NAME

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
LIBRARIES = {
    "openai_client": "openai",
    "langchain_client": "langchain_openai",
    "litellm_client": "litellm",
    "pydantic_ai_client": "pydantic_ai",
    "instructor_client": "instructor",
    "anthropic_client": "anthropic",
    "ollama_client": "ollama",
}
AI_SDK = CLIENTS / "ai_sdk_client.mjs"


def test_every_script_is_tested():
    assert {file.stem for file in CLIENTS.glob("*.py")} == LIBRARIES.keys()


@pytest.fixture
def ends(server, monkeypatch):
    """The model of random weights is made to end JSON, as a trained model does."""
    pytest.importorskip("llguidance")
    generate = server.llm.generate
    monkeypatch.setattr(server.llm, "generate", lambda ids, **fields: generate(ids, **fields | {"logit_bias": ENDING}))


@pytest.mark.parametrize("script, library", LIBRARIES.items())
def test_script(server, ends, script, library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    run(server, sys.executable, CLIENTS / f"{script}.py")


def test_ai_sdk(server, ends):
    if shutil.which("node") is None or not (CLIENTS / "node_modules" / "ai").is_dir():
        pytest.skip("the AI SDK is not installed")
    run(server, "node", AI_SDK)


def run(server, *command):
    done = subprocess.run(
        [*command, f"{server.url}/v1", NAME], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= 2
