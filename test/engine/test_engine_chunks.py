"""The sizes of the chunks of a prompt, while answers run: each chunk should take the same time."""

import subprocess
from itertools import chain, repeat
from pathlib import Path

import pytest
from compile_cpp import compile_cpp

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "backends/mlx/engine"
LIMIT = 512
TARGET = 0.25


@pytest.fixture(scope="module")
def run_chunk_times(tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks") / "run_chunk_times"
    return compile_cpp(path, f"-I{ENGINE}", HERE / "run_chunk_times.cpp", ENGINE / "chunk_times.cpp")


class Machine:
    """Reads prompts in chunks. A chunk takes overhead + tokens * (base + growth * middle position) * factor seconds."""

    def __init__(self, program, base, growth=0.0, overhead=0.0):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.base, self.growth, self.overhead = base, growth, overhead

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def read(self, length, begin=0, factors=()):
        """Return a list of (tokens, seconds) of the chunks of a prompt whose first `begin` tokens are reused.

        `factors` are those of the first chunks. The factor of all others is 1.
        """
        chunks, position = [], begin
        factor_of_chunk = chain(factors, repeat(1.0))
        while position < length:
            self.tell("size", position, length - position, LIMIT, TARGET)
            tokens = int(self.process.stdout.readline())
            assert 1 <= tokens <= min(LIMIT, length - position)
            token_seconds = self.base + self.growth * (position + tokens / 2)
            seconds = self.overhead + tokens * token_seconds * next(factor_of_chunk)
            self.tell("record", position, tokens, seconds)
            chunks.append((tokens, seconds))
            position += tokens
        return chunks

    def close(self):
        self.process.communicate()


@pytest.fixture
def start_machine(run_chunk_times):
    started = []

    def start(**options):
        started.append(Machine(run_chunk_times, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def times_of(chunks):
    return [seconds for _, seconds in chunks]


def assert_even(chunks, longest, shortest):
    """Check the longest time relative to TARGET, and the shortest one relative to the longest one."""
    times = times_of(chunks)
    assert max(times) <= longest * TARGET
    assert min(times) >= shortest * max(times)


@pytest.mark.parametrize("base, growth", [(1e-3, 0.0), (1e-3, 1e-7), (9e-4, 4e-7), (2e-3, 2e-6)])
def test_chunks_take_the_same_time_wherever_they_begin(start_machine, base, growth):
    machine = start_machine(base=base, growth=growth)
    machine.read(64)
    machine.read(2000)  # learns the growth
    for length in (900, 2000, 5000):
        times = times_of(machine.read(length))
        assert max(times) <= 1.03 * TARGET  # sizes are whole numbers
        assert sum(times) / len(times) >= 0.93 * max(times)


def test_first_long_prompt_comes_close(start_machine):
    machine = start_machine(base=9e-4, growth=3e-7, overhead=5e-3)
    machine.read(64)
    assert_even(machine.read(2000), longest=1.05, shortest=0.7)


def test_no_chunk_is_a_small_remainder(start_machine):
    machine = start_machine(base=1e-3)
    machine.read(64)
    sizes = [tokens for tokens, _ in machine.read(505)]
    assert len(sizes) == 3 and min(sizes) >= 160


def test_unknown_speed_is_measured_by_a_small_chunk(start_machine):
    machine = start_machine(base=1.0)
    assert machine.read(100)[0][0] == 16


def test_far_position_is_measured_by_a_small_chunk(start_machine):
    machine = start_machine(base=1e-3, growth=1e-6)
    machine.read(300)
    assert machine.read(20_000, begin=19_000)[0][0] == 16


def test_slow_machine_still_reads_small_chunks(start_machine):
    machine = start_machine(base=10.0)
    assert {tokens for tokens, _ in machine.read(160)} == {16}


def test_tiny_chunk_says_nothing_about_large_ones(start_machine):
    machine = start_machine(base=1e-3, overhead=0.1)
    for _ in range(3):
        machine.read(3)
    assert machine.read(100)[0][0] == 16  # still unknown


def test_slow_chunks_do_not_count_as_growth(start_machine):
    machine = start_machine(base=1e-3, growth=1e-7)
    machine.read(64)
    machine.read(2000)
    disturbed = machine.read(2000, factors=[1, 1, 1, 1, 1, 1.4])
    assert max(times_of(disturbed[6:])) <= TARGET  # the expected time of a token rises at once ...
    assert len(disturbed) <= 14  # ... and falls step by step
    machine.read(2000)
    assert_even(machine.read(2000), longest=1.03, shortest=0.9)


def test_one_fast_chunk_does_not_make_the_next_one_too_large(start_machine):
    machine = start_machine(base=1e-3)
    machine.read(64)
    times = times_of(machine.read(3000, factors=[1, 1, 1, 0.5]))
    assert max(times) <= 1.35 * TARGET
