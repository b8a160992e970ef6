"""The `openai` package: answers, streams, log probabilities, penalties, tools, and structured outputs with pydantic."""

import asyncio
import json
import sys

import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_000_000)
    has_harbour: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    messages = [{"role": "user", "content": "Tell me about Oslo."}]
    options = {"model": model, "messages": messages, "max_tokens": 80, "seed": 1}

    answer = client.chat.completions.create(**options)
    print("answer:", answer.choices[0].message.content)

    stream = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content  # the same seed

    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": -100}}
    answer = client.chat.completions.create(**options, **penalties, logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    print("log probabilities:", [(top.token, round(top.logprob, 2)) for top in tokens[0].top_logprobs])

    city = client.chat.completions.parse(**options, response_format=City).choices[0].message.parsed
    assert isinstance(city, City)
    print("structured:", city)

    message = client.chat.completions.create(**options, tools=[WEATHER], tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    print("call:", call.function.name, json.loads(call.function.arguments))
    with client.chat.completions.stream(**options, tools=[WEATHER], tool_choice="required") as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    print("call in pieces:", pieces)
    assert streamed.function.parsed_arguments == json.loads(call.function.arguments)
    assert "".join(pieces) == streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees, rain"}
    options["messages"] = [*messages, message, result]
    print("after the call:", client.chat.completions.create(**options, tools=[WEATHER]).choices[0].message.content)

    response = client.responses.create(model=model, input="Hello", max_output_tokens=20)
    print("response:", response.output_text)
    tool = {"type": "function", **WEATHER["function"]}
    one_call = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model=model, input="Hello", **one_call) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        item = stream.get_final_response().output[0]
    assert "".join(pieces) == item.arguments and json.loads(item.arguments).keys() == {"city"}
    asyncio.run(several(url, model, messages))


async def several(url: str, model: str, messages: list) -> None:
    """Two requests at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        requests = (
            client.chat.completions.create(model=model, messages=messages, max_tokens=20, seed=seed) for seed in (1, 2)
        )
        answers = await asyncio.gather(*requests)
        print("asynchronous:", [answer.choices[0].message.content for answer in answers])
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, seed=1, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answers[0].choices[0].message.content


if __name__ == "__main__":
    main(*sys.argv[1:3])
