"""`Tokenizer`: text to token ids and back, and chats to text, from the files of a Hugging Face tokenizer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_turns import Turns
from .errors import FieldError
from .special_text import CUT, SpecialText

if TYPE_CHECKING:
    import tokenizers

# The keys of special tokens in a tokenizer_config.json, whose values are lists, or maps from a name to a token.
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"  # names of chat templates
NAMED_TEMPLATES = "additional_chat_templates"  # the folder of templates with other names than the default
# The files of tokenizers. Those of older formats, such as that of GPT-2, may have no file with settings.
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model")
LONG_TOKEN = 16  # characters; the tokens of a text are hardly ever longer than this on average
LONG_TEXT = 4096  # characters; encoding a shorter text takes a few milliseconds at most
PIECE = 2**16  # characters that `has_more_tokens` encodes at once
MARK = "\ufdd1"  # a code point that is never a character of a text, before texts that are encoded as parts of others


class Tokenizer:
    """A tokenizer. Its files are parsed when it is first used.

    - `data`: the contents of `tokenizer.json`.
    - `config`: the contents of `tokenizer_config.json`.
    - `template`: a chat template, in place of the one in `config`.
    - `tool_template`: the same for chats with tools.

    Attributes: `chat_template`, the Jinja source or None; `tool_template`, that for chats with tools, or None if they
    have no template of their own; `special_tokens`, which maps a name such as `bos_token` to a token, and whose names
    are variables of chat templates; `backend`, the `tokenizers.Tokenizer`.
    """

    def __init__(
        self, data: str, config: Mapping[str, Any] = {}, template: str | None = None, tool_template: str | None = None
    ):
        self._data, self._config = data, config
        self._turns_of: dict[str, Turns] = {}  # by chat template
        self.chat_template = template if template is not None else _template_of(config)
        self.tool_template = tool_template if tool_template is not None else _template_of(config, TOOL_TEMPLATE)
        self.special_tokens = _named_tokens(config)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder.

        A folder that has only the tokenizer of an older format, such as `tokenizer.model`, is converted by
        transformers. Raises ValueError if the folder has no tokenizer, or if transformers is needed and not installed.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            return _convert(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(
            (folder / "tokenizer.json").read_text(encoding="utf-8"),
            config,
            template_in(folder, config),
            template_in(folder, config, TOOL_TEMPLATE),
        )

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        import tokenizers

        with reading_tokenizer("tokenizer: cannot read tokenizer.json"):
            backend = tokenizers.Tokenizer.from_str(self._data)
        backend.no_truncation()  # the caller checks the length
        backend.no_padding()
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([added.get(text, text) for text in self._special_texts()])
        return backend

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or None."""
        return (
            self.backend.token_to_id(self.special_tokens["eos_token"]) if "eos_token" in self.special_tokens else None
        )

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of the special tokens, which have no text."""
        added = self.backend.get_added_tokens_decoder().items()
        named = map(self.backend.token_to_id, self._special_texts())
        return {id for id, token in added if token.special} | {id for id in named if id is not None}

    @cached_property
    def special_text(self) -> SpecialText:
        """Finds the special tokens in texts of a user."""
        return SpecialText(filter(None, map(self.backend.id_to_token, self.special_ids)))

    def encode_chat(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of the text of a chat, in which `special_text` may have cut what users wrote.

        The template has written the special tokens. With `special`, those around a text are added, unless the text
        begins with the first of them: processors of pictures do so. Raises ValueError if `text` has lone surrogates.
        """
        first, *others = text.split(CUT)
        bos = self.special_tokens.get("bos_token")
        special = special and not (bos and first.startswith(bos))
        return self.encode(first, special) + [id for piece in others for id in self._encode_inside(piece)]

    def _encode_inside(self, text: str) -> list[int]:
        """Return the token ids of `text` within a longer text: without a space before it, which some tokenizers add."""
        self.check_unicode(text)
        encoding = self.backend.encode(MARK + text, add_special_tokens=False)
        return [id for id, (_, end) in zip(encoding.ids, encoding.offsets) if end > len(MARK)]

    def check_unicode(self, text: str) -> None:
        """Raise ValueError if `text` has lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is a lone surrogate, expected Unicode text"
            raise FieldError("text", problem=problem) from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of `text`. `special` adds the special tokens that the model expects around a text.

        Raises ValueError if `text` has lone surrogates.
        """
        self.check_unicode(text)
        if len(text) < LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=special).ids
        # The method for one text holds Python's lock, so that no other thread runs meanwhile.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def has_more_tokens(self, text: str, limit: int) -> bool:
        """Return whether a long text certainly has more than `limit` tokens. Takes time for about twice as many only.

        False also stands for "perhaps": only `encode` tells the number.
        """
        count = 0
        if len(text) > LONG_TOKEN * limit:
            for begin in range(0, len(text), PIECE):
                count += len(self.encode(text[begin : begin + PIECE], special=False))
                # A cut may change the tokens beside it. This factor leaves room for that.
                if count > 2 * limit:
                    return True
        return False

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `tokens`."""
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] = {},
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of a chat, up to the beginning of the answer if `add_generation_prompt`.

        `options` are variables of the template. If `tools` is among them, the template is the one for chats with tools,
        if there is one. With `continue_final_message`, the text ends with the content of the last message instead, so
        that the answer continues it. `template` takes the place of the templates of the tokenizer. Messages in an order
        that the template does not take are changed as `Turns` says.

        Raises ValueError if there is no chat template, if the template rejects the messages, or if a name in `options`
        is reserved.
        """
        from . import chat_template

        template = self.template_for(bool(options.get("tools"))) if template is None else template
        if not template:
            raise FieldError("messages", problem="the tokenizer has no chat template; pass the prompt as text")
        if reserved := sorted(options.keys() & chat_template.VARIABLES - {"tools", "documents"}):
            problem = f"{reserved[0]} is reserved, expected variables of the template"
            raise FieldError("template_options", problem=problem)
        variables = {**self.special_tokens, **options}
        if all(isinstance(message, Mapping) and "role" in message for message in messages):
            messages = self._turns(template).fit(messages)
        if continue_final_message:
            return chat_template.render_unfinished(template, messages, variables)
        return chat_template.render(template, messages, variables, add_generation_prompt)

    def replace_templates(self, template: str) -> None:
        """Use this chat template for all chats. Raises ValueError if it is no valid Jinja template."""
        from . import chat_template

        chat_template.check(template)
        self.chat_template, self.tool_template = template, None

    def _turns(self, template: str) -> Turns:
        if template not in self._turns_of:
            from . import chat_template

            def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
                return chat_template.render(template, messages, {**self.special_tokens, **options})

            self._turns_of[template] = Turns.of(render)
        return self._turns_of[template]

    def template_for(self, has_tools: bool) -> str | None:
        """Return the chat template for chats with tools or without, or None."""
        return self.tool_template if has_tools and self.tool_template is not None else self.chat_template

    def _special_texts(self) -> list[str]:
        lists = [tokens for key in EXTRA_TOKENS if isinstance(tokens := self._config.get(key), list)]
        return [*self.special_tokens.values(), *filter(None, map(_content, itertools.chain(*lists)))]


def template_in(folder: Path, config: Mapping[str, Any] = {}, name: str = DEFAULT_TEMPLATE) -> str | None:
    """Return the chat template in `folder` with this name, or None.

    It is that of a file, or that of `config`, the config of the tokenizer. Older models for text and other media have
    it in `chat_template.json`, which transformers gives to processors only.
    """
    file = "chat_template.jinja" if name == DEFAULT_TEMPLATE else f"{NAMED_TEMPLATES}/{name}.jinja"
    if (path := folder / file).is_file():
        return path.read_text(encoding="utf-8")
    template = _template_of(config, name)
    if template is None and (path := folder / "chat_template.json").is_file():
        template = _template_of(json.loads(path.read_text(encoding="utf-8")), name)
    return template


def _template_of(config: Mapping[str, Any], name: str = DEFAULT_TEMPLATE) -> str | None:
    """Return the chat template of a config with this name, or None.

    A config has one template, the default, or a list of named templates.
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get(name)
    return template if name == DEFAULT_TEMPLATE else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a config names: name → token."""
    named = {key: token for key, token in config.items() if key.endswith("_token")}
    for key in EXTRA_TOKENS:
        if isinstance(tokens := config.get(key), dict):
            named |= tokens
    # Some settings have such names too: add_bos_token is true or false.
    return {name: text for name, token in named.items() if isinstance(text := _content(token), str)}


def _content(token: Any) -> str | None:
    """Return the text of a token in a config. The token is the text, or a mapping with the text as `content`."""
    return token.get("content") if isinstance(token, dict) else token


@contextmanager
def reading_tokenizer(where: str) -> Iterator[None]:
    """Within the context, the errors of a damaged tokenizer are ValueErrors, whose texts begin with `where`.

    The package tokenizers raises the class Exception itself. If its code in Rust fails, it raises a PanicException,
    which is not an Exception and cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{where}: {error!r}") from error
        raise


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has a file of a tokenizer, of any format."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def has_words(backend: tokenizers.Tokenizer, special: Collection[int]) -> bool:
    """Whether a tokenizer has other tokens than the special ones in `special` and a space.

    transformers makes a tokenizer without them from a folder that lacks the file of the tokens.
    """
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return any(id not in special and token != "\u2581" for token, id in vocabulary.items())


def _convert(folder: Path) -> Tokenizer:
    """Load a tokenizer of an older format with transformers."""
    if not has_tokenizer(folder):
        raise ValueError(f"tokenizer: {folder} has no tokenizer.json")
    import tempfile

    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tokenizer: {folder} has no tokenizer.json, and transformers, which can convert its files, is not "
            "installed"
        ) from error
    with tempfile.TemporaryDirectory() as converted:
        older = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        older.save_pretrained(converted, save_jinja_files=False)
        if not (Path(converted) / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer: transformers cannot convert the files of {folder} to a tokenizer.json")
        tokenizer = Tokenizer.from_folder(converted)
    if not has_words(tokenizer.backend, tokenizer.special_ids):
        raise ValueError(f"tokenizer: {folder} lacks the file of its tokens, such as tokenizer.json")
    tokenizer.chat_template = tokenizer.chat_template or template_in(folder)
    return tokenizer
