"""`pydantic-ai`: an agent with text, and one whose output is a pydantic model."""

import asyncio
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    name: str = Field(max_length=20)
    has_harbour: bool


def main(url: str, model: str) -> None:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings = {"max_tokens": 80, "seed": 1}
    answer = Agent(chat, system_prompt="Be brief.", model_settings=settings).run_sync("Hello")
    print("answer:", answer.output, answer.usage)
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "openai_logprobs": True, "openai_top_logprobs": 2}
    run = Agent(chat, model_settings=settings | penalties).run_sync("Hello")
    print("log probabilities:", len(run.response.provider_details["logprobs"]), "tokens")
    for output in (NativeOutput(City), ToolOutput(City)):
        city = Agent(chat, output_type=output, model_settings=settings).run_sync("Describe Oslo.").output
        assert isinstance(city, City)
        print("structured:", city)
    assert asyncio.run(streamed(Agent(chat, output_type=ToolOutput(City), model_settings=settings))) == city


async def streamed(agent: Agent) -> City:
    """The output of an agent that reads the call while it arrives."""
    async with agent.run_stream("Describe Oslo.") as run:
        async for city in run.stream_output(debounce_by=None):
            print("so far:", city)
    return city


if __name__ == "__main__":
    main(*sys.argv[1:3])
