"""The bytes of every token, so that a runner without a tokenizer can print text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def token_table(tokenizer: Any, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of all tokens, concatenated, uint8 `[N]`, and their offsets, int64 `[vocab_size + 1]`.

    The bytes of token `i` are those from `offsets[i]` to `offsets[i + 1]`. Special tokens and ids
    without a token have no bytes. The bytes of a token may be only a part of a UTF-8 character.
    """
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), vocab_size)))
    bytes_of = _decoder(tokenizer)
    table = [b"" if token is None or i in special else bytes_of(token) for i, token in enumerate(tokens)]
    table += [b""] * (vocab_size - len(table))
    offsets = torch.tensor([0] + [len(entry) for entry in table], dtype=torch.int64).cumsum(0)
    return torch.frombuffer(bytearray(b"".join(table)), dtype=torch.uint8), offsets


def _decoder(tokenizer: Any) -> Callable[[str], bytes]:
    """Return a function that maps a token's string to the token's bytes.

    Supports byte-level BPE, and SentencePiece with byte fallback.
    """
    if "ByteLevel" in str(getattr(tokenizer.backend_tokenizer, "decoder", None)):
        alphabet = _byte_level_alphabet()
        return lambda token: b"".join(alphabet.get(c, c.encode()) for c in token)
    return _sentencepiece


def _sentencepiece(token: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """Return the byte that each character of byte-level BPE (GPT-2) represents.

    The character of a printable byte is the byte itself, in Latin-1. The other bytes have the characters
    from U+0100 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): bytes([b]) for b in printable}
    return alphabet | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}
