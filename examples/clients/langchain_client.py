"""`langchain-openai`: messages, streaming, log probabilities, penalties, tools and structured output."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    has_harbour: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=80, temperature=0, seed=1)
    answer = chat.invoke([("system", "Be brief."), ("human", "Hello")])
    print("answer:", answer.content, answer.usage_metadata["total_tokens"])
    streamed = "".join(chunk.content for chunk in chat.stream([("system", "Be brief."), ("human", "Hello")]))
    assert streamed == answer.content
    with_scores = chat.bind(logprobs=True, top_logprobs=2, frequency_penalty=0.5, presence_penalty=0.5)
    metadata = with_scores.invoke("Hello").response_metadata
    print("log probabilities:", [top["token"] for top in metadata["logprobs"]["content"][0]["top_logprobs"]])

    city = chat.with_structured_output(City, method="json_schema").invoke("Describe Oslo.")
    assert isinstance(city, City)
    print("structured:", city)
    city = chat.with_structured_output(City, method="function_calling").invoke("Describe Oslo.")
    assert isinstance(city, City)

    calling = chat.bind_tools([add], tool_choice="add")
    call = calling.invoke("What is 2 + 3?").tool_calls[0]
    assert call["name"] == "add"
    print("call:", call["args"])
    first, *others = calling.stream("What is 2 + 3?")
    streamed = sum(others, first)  # chunks of a message add up
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("add", call["args"])]


if __name__ == "__main__":
    main(*sys.argv[1:3])
