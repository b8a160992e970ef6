"""Which replica holds the beginning of a prompt: `prefix_digests` and `PrefixTable`. Needs no Ray."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile

BLOCK = 64  # characters
FIELDS = ("tools", "instructions", "prompt", "input", "messages")  # in the order in which a prompt contains them
MIN_SHARE = 0.25  # a replica is preferred only if it holds more than this share of the blocks of the prompt

Digests = Sequence[bytes]


def prefix_digests(body: bytes) -> list[bytes]:
    """Return a digest for each block of 64 characters of the prompt in the body of a request.

    A digest also covers all earlier blocks. If exactly the first n blocks of two prompts are equal, exactly their first
    n digests are equal. Returns an empty list if the body is not a JSON object.
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
    """The last `capacity` prompts of each replica: an estimate of what its KV cache holds.

    `capacity` should be the number of rows of a replica.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._prompts: dict[Hashable, deque[Digests]] = {}

    def add(self, replica: Hashable, digests: Digests) -> None:
        """Record that `replica` got the prompt with these digests.

        If the prompt continues a recorded prompt, it replaces that one.
        """
        prompts = self._prompts.setdefault(replica, deque(maxlen=self._capacity))
        continued = next((held for held in prompts if list(held) == list(digests[: len(held)])), None)
        if continued is not None:
            prompts.remove(continued)
        prompts.append(digests)

    def rank(self, digests: Digests, loads: dict[Hashable, int], max_imbalance: int) -> list[Hashable]:
        """Return the replicas in the order in which a request should try them.

        `digests` are those of the prompt. The first replica is the one that holds the longest beginning of the prompt.
        A replica counts as one without the prompt if it holds at most MIN_SHARE of the blocks, or if it has over
        `max_imbalance` requests more than the replica with the fewest. The replicas without the prompt come last: those
        with fewer requests first, and with equally many requests, those with fewer recorded prompts first.

        - `loads`: the number of requests of each replica.
        """
        lowest = min(loads.values(), default=0)

        def key(replica: Hashable) -> tuple[int, int, int]:
            prompts = self._prompts.get(replica, ())
            matching = max((_common_length(digests, held) for held in prompts), default=0)
            counts = matching > MIN_SHARE * len(digests) and loads[replica] <= lowest + max_imbalance
            return -matching if counts else 0, loads[replica], len(prompts)

        return sorted(loads, key=key)

    def keep(self, replicas: Iterable[Hashable]) -> None:
        """Forget the prompts of all other replicas."""
        kept = set(replicas)
        self._prompts = {replica: prompts for replica, prompts in self._prompts.items() if replica in kept}


def _common_length(left: Digests, right: Digests) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right)))
