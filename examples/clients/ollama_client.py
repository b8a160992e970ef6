"""`ollama`: chats, streams, tools, schemas, log probabilities and penalties, through `/api`."""

import sys

import ollama
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    has_harbour: bool


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: the name of the city
    """
    return f"Rain in {city}"


def main(url: str, model: str) -> None:
    client = ollama.Client(host=url.removesuffix("/v1"))  # the package adds /api
    print("models:", [entry.model for entry in client.list().models], client.show(model).capabilities)
    options = {"seed": 1, "num_predict": 80, "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    request = {"model": model, "messages": [{"role": "user", "content": "Describe Oslo."}], "options": options}

    answer = client.chat(**request, logprobs=True, top_logprobs=2)
    print("answer:", answer.message.content, answer.eval_count, "tokens")
    print("log probabilities:", [top.token for top in answer.logprobs[0].top_logprobs])
    assert "".join(part.message.content for part in client.chat(**request, stream=True)) == answer.message.content

    city = client.chat(**request, format=City.model_json_schema()).message.content
    print("structured:", City.model_validate_json(city))

    message = client.chat(**request, tools=[get_weather]).message  # the model calls the function, or answers with text
    for call in message.tool_calls or []:
        print("call:", call.function.name, call.function.arguments)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}]
    request["messages"] += turns
    print("after the call:", client.chat(**request, tools=[get_weather]).message.content)

    text = client.generate(model=model, prompt="Hello", system="Be brief.", options=options).response
    print("generate:", text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
