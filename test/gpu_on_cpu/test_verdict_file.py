"""The file with the verdicts of earlier processes: what is unexpected in it leads to new trials."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

RESULT = {"sample": "used", "quantized_products": "slow", "attention": "failed"}


@pytest.fixture
def net(hold, tmp_path):
    """A function that holds the trials of the net with a file in `tmp_path / cache`, and returns how many were held."""

    def net(*options):
        trials = hold("net", "--count-waits", "--file", tmp_path / "cache", *options)
        if not options:
            verdicts = {name: line.verdict for name, line in trials.kernels.items()}
            assert verdicts == dict.fromkeys(["products", "norm_rope", "silu_product"], "wrong") | RESULT
        return trials.held

    return net


@pytest.fixture
def file(net, tmp_path):
    """The file, written."""
    net()
    (file,) = (tmp_path / "cache").iterdir()
    return file


def test_verdicts_are_kept_except_failures(net, file):
    assert file.stat().st_mode & 0o777 == 0o600
    assert net() == 1  # attention, which has failed


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "a changed byte": lambda data: data.replace(b"products wrong", b"products used "),
    "no sum": lambda data: data[: data.rfind(b"sum ")],
    "another text": lambda data: b"\0" * len(data),
    "too long": lambda data: data * 1000,
    "not UTF-8": lambda data: b"\xff\xfe" + data,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_leads_to_new_trials(net, file, damage):
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert net() == 6
    assert net() == 1


def with_sum(text):
    """The text of a file with the right sum: FNV-1a."""
    number = 0xCBF29CE484222325
    for byte in text.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return f"{text}sum {number:x}\n"


@pytest.mark.parametrize(
    "old, new",
    [
        ("the key of a test", "another key"),
        ("kernels 1", "kernels 2"),
        ("products wrong 0.005", "products wrong nan"),
        ("products wrong", "products perfect"),
        ("products wrong 0.005", "products wrong 0.005 0.005"),
        ("products wrong", "sample wrong"),
    ],
)
def test_a_valid_sum_does_not_make_contents_valid(net, file, old, new):
    text = file.read_text()
    text = text[: text.rfind("sum ")]
    file.write_text(with_sum(text))
    assert net() == 1
    assert old in text
    file.write_text(with_sum(text.replace(old, new, 1)))
    assert net() == 6


def test_only_a_regular_file_that_nobody_else_can_write_is_read(net, file, tmp_path):
    file.chmod(0o666)
    assert net() == 6
    moved = file.rename(tmp_path / "moved")
    file.symlink_to(moved)
    assert net() == 6
    assert not file.is_symlink()
    file.unlink()
    os.mkfifo(file)
    assert net() == 6
    file.unlink()
    file.mkdir()
    assert net() == 6
    assert net() == 6  # a folder cannot be replaced


def test_without_a_folder_trials_are_held(hold, tmp_path):
    (tmp_path / "a file").touch()
    assert hold("net", "--count-waits", "--file", tmp_path / "a file" / "cache").held == 6


def test_processes_write_at_the_same_time(net, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda _: net(), range(4)))) == 4
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert net() == 1


def test_a_kernel_that_ends_the_process_is_tried_twice(net, hold, tmp_path):
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            net("--crash", "products")
    trials = hold("net", "--count-waits", "--file", tmp_path / "cache", "--crash", "products")
    assert (trials.kernels["products"].verdict, trials.kernels["products"].is_used) == ("crashed", False)
    assert trials.kernels["sample"].is_used
    assert hold("net", "--count-waits", "--file", tmp_path / "cache").kernels["products"].verdict == "crashed"
