"""`anthropic`: text, a stream, tool calls, JSON schemas and the number of tokens, through `/v1/messages`."""

import sys
from typing import Literal

import anthropic
from pydantic import BaseModel


class City(BaseModel):
    has_harbour: bool
    name: Literal["Oslo", "Bergen"]  # the package leaves out the largest length of a text


TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none")  # the package adds /v1
    question = {"role": "user", "content": "Describe Oslo."}
    options = {"model": model, "messages": [question], "max_tokens": 80, "extra_body": {"seed": 1}}
    print(client.messages.count_tokens(model=model, messages=[question]).input_tokens, "tokens")
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
    assert stream.get_final_message().stop_reason in ("end_turn", "max_tokens")
    print("stream:", text)
    print("schema:", client.messages.parse(**options, output_format=City).parsed_output)
    answer = client.messages.create(**options, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    call = next(block for block in answer.content if block.type == "tool_use")
    print("call:", call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    turns = [question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    print("answer:", client.messages.create(**options | {"messages": turns}, tools=[TOOL]).content[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
