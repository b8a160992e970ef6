"""The seed corpus of the fuzz targets is up to date and loads. Damaged programs of the corpus load or are refused."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "libfuzzer"))
import corpus
from fuzz_payloads import damage
from irprograms import Model

PROGRAMS = corpus.programs()


def test_stored_files_are_up_to_date():
    files = corpus.files()
    stored = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in corpus.CORPUS.glob("*/*")}
    assert stored.keys() == files.keys() | {"pte/llm"}  # an exported model, whose bytes are not compared
    different = [name for name in files if files[name] != stored[name]]
    assert not different, f"{different}: run python test/libfuzzer/corpus.py"


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_load(name):
    Model(PROGRAMS[name].pte())


@pytest.mark.parametrize("path", sorted(corpus.CORPUS.glob("pte/*")), ids=lambda path: path.name)
def test_files_load(path):
    Model(path.read_bytes())


@pytest.mark.parametrize("name", PROGRAMS)
def test_damaged_programs_load_or_are_refused(name):
    generator, payload, refused = random.Random(name), PROGRAMS[name].payload(), 0
    for _ in range(20):
        try:
            Model(PROGRAMS[name].pte(damage(payload, generator)))
        except RuntimeError:
            refused += 1
    assert refused > 0
