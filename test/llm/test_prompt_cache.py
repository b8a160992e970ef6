"""The KV cache of a prompt in a file: `LLM.save_prefix`, `LLM.load_prefix`, and `run --prompt-cache`."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import small_llm
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM

PROMPT = list(range(100, 100 + 2 * small_llm.CHUNK + 5))
SAMPLED = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(chat_program) -> LLM:
    return LLM.load(chat_program)


@pytest.fixture
def saved(llm, tmp_path):
    llm.save_prefix(PROMPT, tmp_path / "cache")
    return tmp_path / "cache"


def test_loaded_prefix_is_not_computed_again(chat_program, llm, saved):
    longer = [*PROMPT, 7, 8, 9]
    expected = llm.generate(longer, **SAMPLED).result().tokens
    with LLM.load(chat_program) as other:
        assert other.load_prefix(saved) == len(PROMPT)
        answer = other.generate(longer, **SAMPLED).result()
    assert answer.tokens == expected and answer.metrics.cached_tokens == len(PROMPT)


def test_text_as_prefix(chat_program, llm, tmp_path):
    llm.save_prefix("Return the value", tmp_path / "cache")
    with LLM.load(chat_program) as other:
        assert other.load_prefix(tmp_path / "cache") == len(llm.encode("Return the value"))


def test_damaged_and_foreign_files_are_refused(llm, logits_program, saved):
    content = saved.read_bytes()
    foreign = LLM.load(logits_program)
    with pytest.raises(ValueError):
        foreign.load_prefix(saved)
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    for damaged in (changed, content[:-5], content[:20], b"", b"no cache"):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError):
            llm.load_prefix(saved)
    saved.write_bytes(content)
    assert llm.load_prefix(saved) == len(PROMPT)


def test_file_errors(llm, tmp_path):
    with pytest.raises(FileNotFoundError):
        llm.load_prefix(tmp_path / "none")
    with pytest.raises(RuntimeError, match="cannot write the file"):
        llm.save_prefix(PROMPT, tmp_path / "no" / "cache")
    with pytest.raises(ValueError, match="prompt: got 0 tokens"):
        llm.save_prefix([], tmp_path / "cache")


def test_engines_may_save_to_the_same_path(chat_program, llm, tmp_path):
    """The file is that of one of the engines. They write at the same time, because they have their own threads."""

    def save(engine: LLM, prompt: list[int]) -> None:
        for _ in range(150):
            engine.save_prefix(prompt, tmp_path / "cache")

    with LLM.load(chat_program) as other, ThreadPoolExecutor() as threads:
        saves = [threads.submit(save, llm, PROMPT), threads.submit(save, other, PROMPT[:40])]
        for saved in saves:
            saved.result()
    assert llm.load_prefix(tmp_path / "cache") in (len(PROMPT), 40)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_run_with_a_prompt_cache(chat_program, llm, tmp_path, capfd):
    def run(prompt: str) -> dict:
        arguments = ["--no-chat", "--prompt", prompt, "--max-new-tokens", "5", "--json"]
        assert main(["run", str(chat_program), *arguments, "--prompt-cache", str(tmp_path / "cache")]) == 0
        return json.loads(capfd.readouterr().out)

    text = "Return the value of the first"
    first = run(text)
    assert first["metrics"]["cached_tokens"] == 0
    size = len(llm.encode(text))
    second = run(text + " item in the list")
    assert second["metrics"]["cached_tokens"] >= size - 1  # the added text may change the last token of `text`
    assert second["tokens"] == llm.generate(text + " item in the list", max_new_tokens=5).result().tokens
    (tmp_path / "cache").write_bytes(b"damaged")
    assert main(["run", str(chat_program), "--prompt", "x", "--prompt-cache", str(tmp_path / "cache")]) == 1
    assert capfd.readouterr().err.startswith("executorch-mlx: ")
