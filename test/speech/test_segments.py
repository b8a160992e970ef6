"""Segments at timestamps equal those of transformers, and windows end at quiet places."""

import itertools

import numpy
import torch
from executorch_mlx.llm.speech.segments import TimestampSplitter, quiet_window_length, voiced_spans
from executorch_mlx.llm.speech.words import path_of, split_words
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


def test_voiced_spans_leave_out_pauses_of_more_than_a_second():
    random = numpy.random.default_rng(0)
    seconds = {"quiet": 3, "word": 0.5, "pause": 0.7, "words": 2, "long pause": 4, "end": 1}
    for background, voice in ((0, 0.1), (1e-4, 0.01), (0.01, 0.5)):
        parts = [
            random.standard_normal(int(16_000 * length)) * (voice if name in ("word", "words", "end") else background)
            for name, length in seconds.items()
        ]
        spans = [(a / 16_000, b / 16_000) for a, b in voiced_spans(numpy.concatenate(parts).astype("float32"))]
        assert numpy.allclose(spans, [(2.5, 6.7), (9.7, 11.2)], atol=0.05), spans
    assert voiced_spans(numpy.zeros(0, "float32")) == []
    assert voiced_spans(numpy.zeros(50_000, "float32")) == []
    assert voiced_spans(0.1 * numpy.ones(50_000, "float32")) == [(0, 50_000)]


def test_the_path_is_the_cheapest():
    random = numpy.random.default_rng(3)
    for rows, columns in ((1, 4), (3, 3), (3, 7), (4, 9)):
        cost = random.standard_normal((rows, columns))
        begins = path_of(cost)
        assert begins[0] == 0 and all(a < b for a, b in itertools.pairwise(begins))

        def total(begins):
            ends = [*begins[1:], columns]
            return sum(cost[row, a:b].sum() for row, (a, b) in enumerate(zip(begins, ends)))

        all_begins = itertools.combinations(range(1, columns), rows - 1)
        assert numpy.isclose(total(begins), min(total((0, *rest)) for rest in all_begins))
    assert path_of(numpy.zeros((4, 3))) == []


def test_words_are_split_at_spaces_and_have_whole_characters():
    texts = [" Hello", ",", " wor", "ld", " (", "see", ")", " \u00fc".encode()[:2], b"\xbc", "."]
    table = [text if isinstance(text, bytes) else text.encode() for text in texts]
    words = split_words(range(len(table)), table.__getitem__, None)
    assert words == [(2, " Hello,"), (2, " world"), (3, " (see)"), (3, " \u00fc.")]
    chinese = ["你", "好", "。"]
    table = [text.encode() for text in chinese]
    assert split_words(range(3), table.__getitem__, "zh") == [(1, "你"), (2, "好。")]
