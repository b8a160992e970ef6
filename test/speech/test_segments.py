"""Segments at timestamps equal those of transformers, and windows end at quiet places."""

import numpy
import torch
from executorch_mlx.llm.speech.segments import TimestampSplitter, quiet_window_length
from transformers import WhisperForConditionalGeneration

BEGIN = 100  # the id of the first timestamp token
WINDOW = 50  # the length of a window, counted in timestamps
SECONDS_PER_TIMESTAMP = 0.02


def ours(tokens):
    """Return the segments of an answer that arrives token by token, and the begin of the next window.

    A segment is (tokens, begin, end). Times are counted in timestamps from the begin of this window.
    """
    splitter = TimestampSplitter(BEGIN)
    pieces = [piece for count in range(1, len(tokens) + 1) if (piece := splitter.take(tokens[:count]))]
    rest, seek = splitter.finish(tokens)
    pieces += [] if rest is None else [rest]
    spans = [(tokens[p.begin : p.end], p.begin_time, WINDOW if p.end_time is None else p.end_time) for p in pieces]
    return spans, WINDOW if seek is None else seek


def theirs(tokens):
    """Return what `ours` returns, computed by transformers.

    There, the last segment of an answer includes the timestamp token that follows it.
    """
    segments, offset = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[{}],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=BEGIN,
        seek_num_frames=torch.tensor([2 * WINDOW]),
        time_precision=SECONDS_PER_TIMESTAMP,
        time_precision_features=SECONDS_PER_TIMESTAMP / 2,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    spans = [
        (s["tokens"].tolist(), *(round(float(s[name]) / SECONDS_PER_TIMESTAMP) for name in ("start", "end")))
        for s in segments
    ]
    return spans, int(offset) // 2


def answer(random, cut):
    """Return a random answer with timestamps as Whisper writes them. With `cut`, only its first tokens."""
    tokens, time = [], int(random.integers(0, 5))
    for _ in range(random.integers(1, 5)):
        end = time + int(random.integers(1, 12))
        tokens += [BEGIN + time, *random.integers(0, BEGIN, random.integers(1, 4)).tolist(), BEGIN + end]
        time = end + int(random.integers(0, 3))
    return tokens[: random.integers(1, len(tokens) + 1)] if cut else tokens


def test_segments_equal_those_of_transformers():
    random = numpy.random.default_rng(0)
    kinds = set()
    for index in range(400):
        tokens = answer(random, cut=index % 2 == 0)
        (mine, seek), (expected, offset) = ours(tokens), theirs(tokens)
        assert seek == offset, tokens
        assert [span[1:] for span in mine] == [span[1:] for span in expected], tokens
        assert all(a == b[: len(a)] for (a, _, _), (b, _, _) in zip(mine, expected)), tokens
        kinds.add((len(mine) > 1, seek == WINDOW))
    assert len(kinds) == 4  # one segment or several, and a next window that begins at the end of this one or before it


def test_an_answer_without_tokens_has_no_segment():
    assert ours([]) == ([], WINDOW)


def test_a_window_ends_at_the_quietest_place_near_its_end():
    samples = numpy.full(40_000, 0.2, "float32")
    samples[13_000:13_400] = 0  # within the last quarter of 16,000
    samples[2_000:4_000] = 0
    assert 13_000 <= quiet_window_length(samples, 16_000) <= 13_400
    assert quiet_window_length(samples[:16_000], 16_000) == 16_000
    assert 0 < quiet_window_length(samples, 100) <= 100
