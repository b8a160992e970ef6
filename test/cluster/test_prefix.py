"""Routing by prefix, without Ray."""

import json

from executorch_mlx.ray.prefix import BLOCK, PrefixTable, prefix_digests


def chat(*texts) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}).encode()


def common_length(left: list, right: list) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def test_prompts_have_as_many_digests_in_common_as_blocks():
    one, two = prefix_digests(chat("a" * 1000, "b" * 500)), prefix_digests(chat("a" * 1000, "c" * 500))
    assert 900 // BLOCK <= common_length(one, two) <= 1100 // BLOCK < len(one)
    # Only the middle of these prompts differs. Their last blocks are equal, but a digest also covers all blocks before.
    one_end, two_end = (prefix_digests(chat("a" * 1000, text * 500, "e" * 1000)) for text in "bc")
    assert len(one_end) == len(two_end) and one_end[-1] != two_end[-1]
    continued = prefix_digests(chat("a" * 1000, "b" * 500, "d" * 500))
    assert common_length(one, continued) >= len(one) - 1
    assert prefix_digests(json.dumps({"temperature": 1, "prompt": list(range(500))}).encode()) == prefix_digests(
        json.dumps({"prompt": list(range(500)), "seed": 3}).encode()
    )
    for body in (b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b"{}"):
        assert prefix_digests(body) == []


def test_request_goes_to_the_replica_with_the_longest_prefix_unless_it_is_busy():
    table, long, short = PrefixTable(capacity=3), list("abcdefgh"), list("abcd")
    assert table.rank(long, {}, max_imbalance=2) == []
    assert table.rank(long, {1: 1, 2: 0}, max_imbalance=2) == [2, 1]
    table.add(1, long)
    table.add(2, short)
    assert table.rank(long, {1: 0, 2: 0, 3: 0}, max_imbalance=2) == [1, 2, 3]
    assert table.rank(long, {1: 2, 2: 2, 3: 0}, max_imbalance=2) == [1, 2, 3]
    assert table.rank(long, {1: 3, 2: 2, 3: 0}, max_imbalance=2) == [2, 3, 1]
    assert table.rank(list("axxxxxxx"), {1: 1, 2: 0, 3: 0}, max_imbalance=2) == [3, 2, 1]  # too little in common
    table.keep([2, 3])
    assert table.rank(long, {1: 0, 2: 0}, max_imbalance=2) == [2, 1]


def test_table_keeps_the_last_prompts_and_a_continued_prompt_counts_once():
    table = PrefixTable(capacity=2)
    for prompt in ("aaaa", "bbbb", "bbbbcc"):  # the third continues the second
        table.add(1, list(prompt))
    assert table.rank(list("aaaa"), {1: 1, 2: 0}, max_imbalance=2) == [1, 2]
    table.add(1, list("dddd"))
    assert table.rank(list("aaaa"), {1: 1, 2: 0}, max_imbalance=2) == [2, 1]
    assert table.rank(list("bbbbcc"), {1: 1, 2: 0}, max_imbalance=2) == [1, 2]
