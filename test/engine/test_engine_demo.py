"""The demo model on MLX: mlx_llm_runner and the Python API generate the same tokens."""

from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model"
PROMPT = [0, 354, 264]
OPTIONS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 2**40 + 5}


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    from executorch_mlx.llm.export import export_llm

    path = tmp_path_factory.mktemp("demo") / "demo.pte"
    export_llm(MODEL, speculation=False, verify=False).save(path)
    return path


def _arguments(demo: Path, options: dict, *more: str) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [str(demo), "--prompt-ids", ",".join(map(str, PROMPT)), *flags, *more]


@pytest.mark.parametrize("options", [{}, OPTIONS, {"temperature": 1.5, "seed": 3}], ids=str)
def test_tokens_match_python(run, demo, options):
    from executorch_mlx.llm import LLM

    llm = LLM.load(demo)
    # The default of the runner and of Python is greedy decoding, which ignores the seed.
    expected = llm.generate(PROMPT, max_new_tokens=60, **options).result().tokens
    arguments = _arguments(demo, options, "--max-new-tokens", "60")
    assert run(*arguments, "--ids").ids == expected
    assert run(*arguments).text == llm.text(expected)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=str)
def test_tokens_are_the_same_with_public_operations_of_mlx_only(run, demo, options, monkeypatch):
    arguments = _arguments(demo, options, "--max-new-tokens", "60", "--ids")
    expected = run(*arguments)
    monkeypatch.setenv("EXECUTORCH_MLX_INTERNALS", "0")
    done = run(*arguments)
    assert done.ids == expected.ids
    message = "programs run with MLX's public operations only, which is slower: EXECUTORCH_MLX_INTERNALS is 0"
    assert done.stderr.count(message) == 1 and message not in expected.stderr


def test_text_is_the_same_for_equal_seeds_only(run, demo):
    first = run(*_arguments(demo, OPTIONS))
    assert first.text == run(*_arguments(demo, OPTIONS)).text
    assert first.text != run(*_arguments(demo, OPTIONS | {"seed": 1})).text


def test_repeat_gives_the_same_tokens_after_a_full_context(run, demo):
    """Earlier contents of the KV cache do not affect an answer."""
    done = run(*_arguments(demo, OPTIONS, "--max-new-tokens=600", "--ignore-eos", "--ids", "--repeat=2"))
    half = len(done.ids) // 2
    assert half == 512 - len(PROMPT) + 1
    assert done.ids[:half] == done.ids[half:]


def test_profile_has_every_step(run, demo, tmp_path):
    from executorch.devtools import Inspector

    arguments = [*_arguments(demo, OPTIONS), "--ids", "--max-new-tokens", "5"]
    profiled = run(*arguments, "--profile", str(tmp_path / "answer.etdp"))
    assert profiled.ids == run(*arguments).ids
    blocks = Inspector(etdump_path=str(tmp_path / "answer.etdp")).event_blocks
    norms = [e for b in blocks for e in b.events if e.is_delegated_op and "RMSNormNode" in e.name]
    # 4 layers with 2 norms each, and the final norm. 1 prefill and 4 decode calls.
    assert sum(len(e.perf_data.raw) for e in norms) == 5 * (4 * 2 + 1)
