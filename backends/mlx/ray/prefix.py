"""Which replica holds the beginning of a prompt: `prefix_blocks` and `PrefixTable`. Needs no Ray."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile

BLOCK = 64  # characters
FIELDS = ("tools", "instructions", "prompt", "input", "messages")  # those at the beginning of the prompt first
MIN_SHARE = 0.25  # of the blocks of a prompt: a shorter common beginning does not outweigh an even load

Blocks = Sequence[bytes]


def prefix_blocks(body: bytes) -> list[bytes]:
    """Return a digest for each block of 64 characters of the prompt in the body of a request.

    Each digest includes the blocks before it, so that two prompts have as many first digests in common as they have
    blocks in common. A body that is not a JSON object has none.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    text = json.dumps([fields[name] for name in FIELDS if name in fields])
    digest, digests = hashlib.blake2b(digest_size=8), []
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK].encode())
        digests.append(digest.digest())
    return digests


class PrefixTable:
    """The last prompts of each replica. A replica with `capacity` rows holds about as many prompts in its KV cache."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._prompts: dict[Hashable, deque[Blocks]] = {}

    def add(self, replica: Hashable, blocks: Blocks) -> None:
        """Note that `replica` got a prompt. It takes the place of a prompt that it continues."""
        prompts = self._prompts.setdefault(replica, deque(maxlen=self._capacity))
        continued = next((held for held in prompts if list(held) == list(blocks[: len(held)])), None)
        if continued is not None:
            prompts.remove(continued)
        prompts.append(blocks)

    def rank(self, blocks: Blocks, loads: dict[Hashable, int], max_imbalance: int) -> list[Hashable]:
        """Return the replicas in the order in which a request should try them.

        First is the one that holds most of the prompt, unless it has more than `max_imbalance` requests more than the
        replica with the fewest. Replicas without the prompt are ordered by the numbers of their requests, then of the
        prompts that they hold.

        - `loads`: the number of requests of each replica.
        """
        lowest = min(loads.values(), default=0)

        def key(replica: Hashable) -> tuple[int, int, int]:
            prompts = self._prompts.get(replica, ())
            matching = max((_common(blocks, held) for held in prompts), default=0)
            counts = matching > MIN_SHARE * len(blocks) and loads[replica] <= lowest + max_imbalance
            return -matching if counts else 0, loads[replica], len(prompts)

        return sorted(loads, key=key)

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget the prompts of all other replicas."""
        kept = set(replicas)
        self._prompts = {replica: prompts for replica, prompts in self._prompts.items() if replica in kept}


def _common(left: Blocks, right: Blocks) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right)))

