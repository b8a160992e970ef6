"""Fixtures: a server for each test module, and a client from the `openai` package."""

import openai
import pytest
import served


@pytest.fixture(scope="module")
def server(chat_program):
    with served.serve(chat_program) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def says(server):
    """A function that sets the text that the model writes. The module has a server of `scripted`."""

    def say(text: str | None) -> None:
        server.text = text

    yield say
    server.text = server.limit = None
    server.prompts.clear()


@pytest.fixture(scope="module")
def llm(chat_program):
    """The same model without a server."""
    from executorch_mlx.llm import LLM

    return LLM.load(chat_program)
