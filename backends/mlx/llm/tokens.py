"""The bytes of every token, for runners that have no tokenizer."""

from __future__ import annotations

import re
from typing import Any

import torch


def token_table(tokenizer: Any, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens' bytes in a row, uint8 `[N]`, and where each begins, int64 `[vocab_size + 1]`.

    Special tokens and ids without a token have no bytes. A token may hold part of a UTF-8
    character: only the concatenation is text.
    """
    special = set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(range(min(len(tokenizer), vocab_size)))
    decode = _decoder(tokenizer)
    table = [
        b"" if piece is None or i in special else decode(piece) for i, piece in enumerate(pieces)
    ]
    table += [b""] * (vocab_size - len(table))
    ends = torch.tensor([0] + [len(piece) for piece in table], dtype=torch.int64).cumsum(0)
    return torch.frombuffer(bytearray(b"".join(table)), dtype=torch.uint8), ends


def _decoder(tokenizer: Any):
    """Token string → bytes: byte-level BPE, or SentencePiece with its byte fallback."""
    kind = str(getattr(tokenizer.backend_tokenizer, "decoder", None))
    if "ByteLevel" in kind:
        bytes_of = _byte_level_alphabet()
        return lambda piece: b"".join(bytes_of.get(c, c.encode()) for c in piece)
    return _sentencepiece


def _sentencepiece(piece: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): itself
    where it is printable, else the next one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): bytes([b]) for b in printable}
    return alphabet | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}
