"""Language models under a memory limit."""

import gc
import sys

import pytest
import small_llm
import torch
from executorch_mlx import LLM, memory
from executorch_mlx.cli.main import main
from executorch_mlx.llm.export import HeadConfig, export_llm

PROMPT = list(range(100, 100 + 2 * small_llm.CHUNK + 5))  # three chunks
SAMPLED = {"temperature": 0.9, "top_k": 40, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_limit(delegate):
    yield
    memory.set_memory_limit(None)


def tokens(llm: LLM, prompt: list[int] = PROMPT, **options) -> list[int]:
    return llm.generate(prompt, **{**SAMPLED, **options}).result().tokens


@pytest.mark.parametrize("name", ["chat_program", "logits_program"])
def test_failed_step_leaves_the_model_usable(name, request):
    """With a small limit, prefill fails. With a larger limit, a later step fails, or no step. After each attempt, the
    model generates the same tokens without a limit."""
    path = request.getfixturevalue(name)
    llm, fresh = LLM.load(path), LLM.load(path)
    expected, other = tokens(fresh), tokens(fresh, [7, 8, 9])
    failures = 0
    for extra in (1_000, 5_000, 15_000, 30_000, 60_000, 120_000, 250_000):
        memory.set_memory_limit(memory.get_active_memory() + extra)
        try:
            assert tokens(llm) == expected
        except memory.OutOfMemoryError as error:
            failures += 1
            assert "memory limit: " in str(error) and f"the limit is {memory.get_memory_limit()} bytes" in str(error)
        memory.set_memory_limit(None)
        assert tokens(llm) == expected
        assert tokens(llm, [7, 8, 9]) == other
    assert 0 < failures < 7


def test_answer_continues_after_a_failed_step(chat_program):
    llm = LLM.load(chat_program)
    expected = tokens(llm, max_new_tokens=20)

    def limit_memory(answer):
        if len(answer) == 5:
            memory.set_memory_limit(memory.get_active_memory() + 100)

    answer = llm.generate(PROMPT, **{**SAMPLED, "max_new_tokens": 20}, allowed_tokens=limit_memory)
    drawn = [next(answer).id for _ in range(5)]
    with pytest.raises(memory.OutOfMemoryError):
        next(answer)
    assert answer.finish == "error" and drawn == expected[:5]
    memory.set_memory_limit(None)
    rest = llm.generate([*PROMPT, *drawn], **{**SAMPLED, "temperature": 0, "seed": None})
    assert rest.result().tokens == tokens(LLM.load(chat_program), [*PROMPT, *drawn], temperature=0, seed=None)
    assert tokens(llm, max_new_tokens=20) == expected


def test_load_beyond_the_limit_is_an_error(chat_program):
    gc.collect()
    memory.set_memory_limit(memory.get_active_memory() + 100_000)
    with pytest.raises(memory.OutOfMemoryError, match="memory limit: constants and buffers: asked for"):
        LLM.load(chat_program)
    memory.set_memory_limit(None)
    assert len(tokens(LLM.load(chat_program))) == 12


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_take_the_place_of_those_in_the_file(tied, tmp_path):
    """The embedding is read in the file. If it is also the output projection, it counts beside its packed copy."""
    import mlx.core as mx
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=small_llm.VOCABULARY,
        max_position_embeddings=128,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    exported = export_llm(
        LlamaForCausalLM(config).eval(),
        quantize="int4",
        activations="int8",
        allow_extensions=True,
        verify=False,
        head=HeadConfig.minimal(),
        speculation=False,
    )
    size = exported.save(tmp_path / "model.pte") + exported.cache_bytes
    gc.collect()
    before, before_in_mlx = memory.get_active_memory(), mx.get_active_memory()
    with LLM.load(tmp_path / "model.pte") as llm:
        packed = mx.get_active_memory() - before_in_mlx - exported.cache_bytes
        in_place = memory.get_active_memory() - before - packed - exported.cache_bytes
        assert packed > 1_000_000 and small_llm.VOCABULARY * 256 < in_place < 600_000
        expected = llm.generate([7, 8, 9], max_new_tokens=12).result().tokens
    del llm
    gc.collect()
    assert memory.get_active_memory() == before
    # A limit that leaves no room for all weights beside their packed copies.
    limit = before + size + packed * 3 // 4
    memory.set_memory_limit(limit)
    memory.reset_peak_memory()
    with LLM.load(tmp_path / "model.pte") as llm:
        assert mx.get_active_memory() - before_in_mlx == packed + exported.cache_bytes
        assert llm.generate([7, 8, 9], max_new_tokens=12).result().tokens == expected
    assert memory.get_peak_memory() <= limit
    # A limit that leaves the results of a call little room beside the weights. Each begins at a page of the file, so
    # that all pages of a packed one are released: packed or not, the weights take the same memory.
    del llm
    gc.collect()
    memory.set_memory_limit(before + in_place + packed + exported.cache_bytes + 50_000)
    with LLM.load(tmp_path / "model.pte") as llm:
        assert llm.generate([7, 8, 9], max_new_tokens=12).result().tokens == expected


# -- command line ------------------------------------------------------------------


def run(program, *options: str) -> int:
    gc.collect()
    prompt = ["--prompt", "Return the value of", "--max-new-tokens", "5"]
    return main(["run", str(program), *prompt, *options])


SIZES = {
    "1GiB": 2**30,
    "512MiB": 2**29,
    "1.5 gb": 1_500_000_000,
    "900m": 900_000_000,
    "1000000000": 10**9,
    "100000000B": 10**8,
    "0.5GiB": 2**29,
}


@pytest.mark.parametrize("size", SIZES)
def test_memory_limit_option_takes_a_size(size, chat_program, capfd):
    assert run(chat_program, "--memory-limit", size, "--json") == 0
    assert memory.get_memory_limit() == SIZES[size]


@pytest.mark.parametrize("size", ["", "0", "-1", "much", "1.5", "2 GiBs", "GiB", "1e9", "0.1B", "9999999TiB", "nan"])
def test_nonsense_as_memory_limit_is_a_usage_error(size, capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "model.pte", f"--memory-limit={size}"])
    message = f"argument --memory-limit: got {size!r}, expected a size such as 2GiB, 512MiB or 1000000 (bytes)"
    assert message in capfd.readouterr().err


def test_model_beyond_the_limit_is_an_error_of_run_and_serve(chat_program, capfd):
    for command in ("run", "serve"):
        gc.collect()
        assert main([command, str(chat_program), "--memory-limit", "100kB"]) == 1
        (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("executorch-mlx: "))
        assert f"{chat_program}: cannot load the method sample: memory limit: constants and buffers: asked for " in line
        assert line.endswith("the limit is 100000 bytes")


def test_step_beyond_the_limit_is_an_error_of_run(chat_program, capfd):
    gc.collect()
    llm = LLM.load(chat_program)
    size = memory.get_active_memory() + 500
    del llm
    gc.collect()
    assert run(chat_program, "--memory-limit", str(size)) == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("executorch-mlx: "))
    assert "memory limit: " in line and f"the limit is {size} bytes" in line
