"""The bytes of every token, so that the engine, which has no tokenizer, can return text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers
    import torch

    from .tokenizer import Tokenizer

_NEIGHBOR = "\0"  # a token that decoders write as it is


def token_table(
    tokenizer: Tokenizer, vocab_size: int, silent: Collection[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of all tokens, concatenated, uint8 `[N]`, and their offsets, int64 `[vocab_size + 1]`.

    The bytes of token `i` are those from `offsets[i]` to `offsets[i + 1]`. The tokens in `silent` have no bytes, like
    special tokens.
    """
    import torch

    table = token_bytes(tokenizer.backend, {*tokenizer.special_ids, *silent}, vocab_size)
    offsets = torch.tensor([0] + [len(entry) for entry in table], dtype=torch.int64).cumsum(0)
    return torch.frombuffer(bytearray(b"".join(table)), dtype=torch.uint8), offsets


class TokenTable:
    """Maps each token to its bytes: `table[i]` is the part of `data` from `offsets[i]` to `offsets[i + 1]`."""

    def __init__(self, data: bytes, offsets: Sequence[int]):
        self._data, self._offsets = data, offsets

    def __getitem__(self, token: int) -> bytes:
        return self._data[self._offsets[token] : self._offsets[token + 1]]

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self[token] for token in tokens).decode(errors="replace")


def token_bytes(backend: tokenizers.Tokenizer, special: Collection[int], vocab_size: int) -> list[bytes]:
    """Return the bytes of each token of the vocabulary.

    The ids in `special` and ids without a token have no bytes. The bytes of a token may be only a part of a UTF-8
    character.
    """
    bytes_of = _decoder(backend)
    texts = (None if id in special else backend.id_to_token(id) for id in range(vocab_size))
    return [b"" if text is None else bytes_of(text) for text in texts]


def _decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function that maps a token's string to the token's bytes."""
    if "ByteLevel" in str(backend.decoder):
        return _byte_level(_byte_level_alphabet())
    return _within_a_text(" ".join if backend.decoder is None else backend.decoder.decode)


def _byte_level(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    """Return a function that decodes a token as `tokenizers` does.

    A token with a character outside the alphabet, such as a space, was added to the vocabulary as text.
    """
    return lambda token: bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode()


def _within_a_text(decode: Callable[[list[str]], str]) -> Callable[[str], bytes]:
    """Return a function that decodes a token between two other tokens. `decode` returns the text of a list of tokens.

    Decoders write the first or the last token of a text differently, for instance without a space.
    """
    after = decode([_NEIGHBOR, _NEIGHBOR]).removeprefix(_NEIGHBOR)

    def bytes_of(token: str) -> bytes:
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):  # a part of a character
            return bytes.fromhex(byte[1])
        return decode([_NEIGHBOR, token, _NEIGHBOR]).removeprefix(_NEIGHBOR).removesuffix(after).encode()

    return bytes_of


def _byte_level_alphabet() -> dict[str, int]:
    """Return a mapping from each character of byte-level BPE (GPT-2) to the byte that it represents.

    The character of a printable byte is the byte itself, in Latin-1. The other bytes have the characters
    from U+0100 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
