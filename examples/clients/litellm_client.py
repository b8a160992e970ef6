"""`litellm`: answers, streams, scores, tools and schemas through its providers for OpenAI and Anthropic."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import downloads a table of prices
import litellm
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    has_harbour: bool


def main(url: str, model: str) -> None:
    options = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": 80, "seed": 1}
    options["messages"] = [{"role": "user", "content": "Hello"}]
    answer = litellm.completion(**options)
    print("answer:", answer.choices[0].message.content, answer.usage.total_tokens)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True))
    assert text == answer.choices[0].message.content
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.5}
    scores = litellm.completion(**options, **penalties, logprobs=True, top_logprobs=2).choices[0].logprobs
    print("log probabilities:", [top.token for top in scores.content[0].top_logprobs])
    city = litellm.completion(**options, response_format=City).choices[0].message.content
    print("structured:", City.model_validate_json(city))

    by_anthropic = options | {"model": f"anthropic/{model}", "api_base": url.removesuffix("/v1")}
    del by_anthropic["seed"]  # this provider does not know it
    print("through /v1/messages:", litellm.completion(**by_anthropic).choices[0].message.content)
    chunks = litellm.completion(**by_anthropic, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    options |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**options).choices[0].message.tool_calls
    print("call:", call.function.name, json.loads(call.function.arguments))
    chunks = list(litellm.completion(**options, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function == call.function


if __name__ == "__main__":
    main(*sys.argv[1:3])
