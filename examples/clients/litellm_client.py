"""`litellm`: answers, streaming and tools, through its OpenAI provider."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import downloads a table of prices
import litellm

litellm.suppress_debug_info = True
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


def main(url: str, model: str) -> None:
    options = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": 80, "seed": 1}
    options["messages"] = [{"role": "user", "content": "Hello"}]
    answer = litellm.completion(**options)
    print("answer:", answer.choices[0].message.content, answer.usage.total_tokens)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True))
    assert text == answer.choices[0].message.content
    options |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**options).choices[0].message.tool_calls
    print("call:", call.function.name, json.loads(call.function.arguments))
    chunks = list(litellm.completion(**options, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function == call.function


if __name__ == "__main__":
    main(*sys.argv[1:3])
