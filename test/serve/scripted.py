"""A server whose model writes a given text, because a token mask makes it."""

import json
from contextlib import contextmanager

import numpy
import pytest
import served
import small_llm
from executorch_mlx.llm import LLM
from executorch_mlx.llm.tokenizer import Tokenizer
from executorch_mlx.serve import Settings, create_app
from served import NAME

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
# A template like those of Qwen: it supports tools and reasoning.
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}[assistant]
{%- if think %}<think>{% if false %}</think>{% endif %}{% endif %}"""


class Scripted:
    """A server whose model writes `text`, at most `limit` tokens of it."""

    def __init__(self, llm: LLM, url: str):
        self.llm, self.url, self.text, self.limit, self.prompts = llm, url, None, None, []
        self._generate = llm.generate
        llm.generate = self.generate

    def generate(self, ids, **options):
        self.prompts.append(self.llm.tokenizer.decode(ids))
        if self.text is not None:
            script = [*self.llm.encode(self.text, special=False), small_llm.EOS]
            options |= {"allowed_tokens": lambda answer: one_bit(script[len(answer)])}
            options["max_new_tokens"] = self.limit
        return self._generate(ids, **options)


def one_bit(token: int) -> numpy.ndarray:
    mask = numpy.zeros(small_llm.VOCABULARY // 32, numpy.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.view(numpy.int32)


@contextmanager
def scripted(program, template: str, special: tuple[str, ...] = (), tool_template: str | None = None):
    llm = LLM.load(program)
    config = {"eos_token": "</s>", "additional_special_tokens": list(special)}
    llm.tokenizer = Tokenizer(with_tokens(llm, special), config, template, tool_template)
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with served.listening(create_app(llm, name=NAME, settings=settings), settings) as url:
        yield Scripted(llm, url)


@pytest.fixture(scope="module", name="server")
def scripted_server(chat_program):
    """For modules that import it: their server, in place of the one of conftest.py."""
    with scripted(chat_program, TEMPLATE) as server:
        yield server


@pytest.fixture(autouse=True)
def unscripted(server):
    """For modules that import it: at the beginning of each test, the model writes what it draws."""
    server.text = server.limit = None


def with_tokens(llm, names: tuple[str, ...]) -> str:
    """The tokenizer of the model, as JSON, in which the tokens from 500 on have other names."""
    vocabulary = json.loads(llm.tokenizer.backend.to_str())
    for id, name in enumerate(names, 500):
        old = llm.tokenizer.backend.id_to_token(id)
        vocabulary["model"]["vocab"][name] = vocabulary["model"]["vocab"].pop(old)
        merges = vocabulary["model"]["merges"]
        vocabulary["model"]["merges"] = [pair for pair in merges if old not in (*pair, "".join(pair))]
    return json.dumps(vocabulary)


def chat(client, **fields):
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "tools": TOOLS, "seed": 1} | fields)
