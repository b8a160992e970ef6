"""Messages for templates that take no system message, or only turns that alternate; special tokens in texts."""

import random

import pytest
from executorch_mlx.llm.chat_turns import Turns
from executorch_mlx.llm.special_text import CUT, SpecialText
from executorch_mlx.llm.tokenizer import Tokenizer
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend


def fit(turns: Turns, *roles: str) -> list[str]:
    fitted = turns.fit(
        [{"role": {"s": "system", "u": "user", "a": "assistant", "t": "tool"}[r], "content": r} for r in roles]
    )
    return [message["role"][0] + message["content"].replace("\n\n", "") for message in fitted]


STRICT = Turns(system=False, later_system=False, adjacent=False, assistant_first=False)


@pytest.mark.parametrize(
    "turns, given, expected",
    [
        (Turns(), "ssuuaasa", ["ss", "ss", "uu", "uu", "aa", "aa", "ss", "aa"]),
        (STRICT, "suuaau", ["usuu", "aaa", "uu"]),
        (STRICT, "utta", ["uu", "tt", "tt", "aa"]),
        (STRICT, "au", ["u", "aa", "uu"]),
        (STRICT, "", []),
        (Turns(later_system=False), "ssuusa", ["sss", "uu", "uus", "aa"]),
        (Turns(later_system=False), "usua", ["uusu", "aa"]),
        (Turns(system=False, later_system=False), "suu", ["usu", "uu"]),
    ],
)
def test_fit(turns, given, expected):
    assert fit(turns, *given) == expected


def test_calls_stay_behind_their_text():
    calls = [{"id": "c", "function": {"name": "f", "arguments": {}}}]
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert STRICT.fit(messages)[1:] == [{"role": "assistant", "content": "a", "tool_calls": calls}]
    messages.reverse()
    assert STRICT.fit(messages)[1:] == messages


def test_a_template_that_fails_with_tools_is_tried_without():
    def render(messages, options):
        if options or messages[0]["role"] == "system":
            raise ValueError("no")
        return "".join(message["content"] for message in messages)

    assert Turns.of(render) == Turns(system=False, later_system=False)


def test_no_special_token_stays_in_one_piece():
    names = ["<s>", "</s>", "ab", "bc", "<|a|>", "||"]
    special, draw = SpecialText(names), random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choice([*names, *"<s>/|abc x", CUT]) for _ in range(draw.randrange(12)))
        pieces = special.cut(text).split(CUT)
        assert "".join(pieces) == text.replace(CUT, "")
        assert not any(name in piece for name in names for piece in pieces)
    assert special.cut({"a": ["<s>", 5, {"<s>": None}]}) == {"a": [f"<{CUT}s>", 5, {f"<{CUT}s>": None}]}
    assert special.cut("<s></s>", keep=["<s>"]) == f"<s><{CUT}/s>"
    assert SpecialText([]).cut("<s>") == "<s>"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_cut_tokens_get_no_spaces(scheme):
    """Tokenizers of SentencePiece add a space before a text, but not within it."""
    names = ["<unk>", "\u2581", *"abs<>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend.to_str())
    text = tokenizer.special_text.cut("a<s>b<s>") + "<s>a"  # the template writes the end
    tokens = [backend.id_to_token(id) for id in tokenizer.encode_chat(text)]
    begin = [] if scheme == "never" else ["\u2581"]
    end = ["\u2581"] if scheme == "always" else []
    assert tokens == [*begin, *"a<s>b<s>", "<s>", *end, "a"]
