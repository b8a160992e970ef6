"""`instructor`: pydantic models from tool calls and from JSON schemas."""

import sys

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    has_harbour: bool


def main(url: str, model: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        options = {"model": model, "response_model": City, "max_tokens": 80, "seed": 1}
        options["messages"] = [{"role": "user", "content": "Describe Oslo."}]
        city = client.chat.completions.create(**options)
        assert isinstance(city, City)
        print(f"{mode.value}:", city)
        *_, last = client.chat.completions.create_partial(**options)
        assert None not in last.model_dump().values()  # another city: the model sees the name PartialCity


if __name__ == "__main__":
    main(*sys.argv[1:3])
