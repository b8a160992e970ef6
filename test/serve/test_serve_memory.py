"""A server whose model has a memory limit."""

import openai
import pytest
from executorch_mlx import memory
from served import NAME

PROMPT = list(range(100, 400))


@pytest.fixture
def limited(server, client):
    """Set a memory limit that admits no call of the model. A test can remove the limit before it ends."""
    memory.set_memory_limit(memory.get_active_memory() + 100)
    yield
    memory.set_memory_limit(None)


def complete(client, **options):
    return client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, seed=1, **options)


def test_request_beyond_the_limit_returns_503_and_the_server_goes_on(client, limited):
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="memory limit: .* asked for .* the limit is") as caught:
            complete(client)
        assert caught.value.status_code == 503 and caught.value.code == "out_of_memory"
    memory.set_memory_limit(None)
    assert complete(client).usage.completion_tokens == 5


def test_stream_beyond_the_limit_ends_with_an_error(client, limited):
    with pytest.raises(openai.APIError, match="memory limit: .* asked for") as caught:
        list(complete(client, stream=True))
    assert caught.value.code == "out_of_memory"
    memory.set_memory_limit(None)
    assert "".join(chunk.choices[0].text for chunk in complete(client, stream=True)) == complete(client).choices[0].text
