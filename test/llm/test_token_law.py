"""A short run of test/token_law.py: tokens do not depend on other requests, chunks, the cache or draft tokens."""

import token_law


def test_tokens_of_mixed_requests_alone_and_side_by_side(tmp_path):
    assert token_law.check(tmp_path, "small", "int4", rows=[3], tokens=60, seed=1) == 0
