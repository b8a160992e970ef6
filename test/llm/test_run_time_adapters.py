"""LoRA adapters that are loaded while a program runs, beside models into which they are merged."""

import subprocess
import sys
import threading

import pytest
import small_llm
import torch
from executorch_mlx import memory
from executorch_mlx.llm import LLM
from executorch_mlx.llm.adapter_files import AdapterError
from executorch_mlx.llm.binding import BusyError
from executorch_mlx.llm.errors import SettingError
from executorch_mlx.llm.export.checkpoints.adapter import merge_adapter
from safetensors.torch import save_file
from small_adapters import weights, write_peft

PROMPT = [0, 5, 9, 300, 22]
LENGTH = 30


@pytest.fixture
def llm(adapter_program):
    with LLM.load(adapter_program) as loaded:
        yield loaded


@pytest.fixture
def folders(adapter_folders):
    return adapter_folders


def tokens(llm, adapter, prompt=PROMPT, **options):
    options = {"max_new_tokens": LENGTH, "ignore_eos": True, "draft": 0} | options
    return llm.generate(prompt, adapter=adapter, **options).result().tokens


def is_greedy(model, answer):
    """Whether each token of `answer` is the one that eager torch finds most likely."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1]
    return logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", ["peft", "pattern", "mlx", "old_mlx"])
def test_an_adapter_gives_the_tokens_of_the_merged_model(llm, folders, name):
    llm.load_adapter("it", folders[name])
    assert llm.adapters == ["it"]
    adapted, plain = tokens(llm, "it"), tokens(llm, None)
    merged = merge_adapter(small_llm.model(), folders[name], torch.float32)
    assert is_greedy(merged, adapted) and is_greedy(small_llm.model(), plain) and adapted != plain


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_k": 50}], ids=["greedy", "sampled"])
def test_requests_with_different_adapters_run_side_by_side(llm, folders, sampling):
    names = [None, "peft", "pattern", "mlx"]
    for name in names[1:]:
        llm.load_adapter(name, folders[name])
    alone = [tokens(llm, name, **sampling) for name in names]
    options = {"max_new_tokens": LENGTH, "ignore_eos": True, **sampling}
    together = [llm.generate(PROMPT, adapter=name, **options) for name in names]
    assert [answer.result().tokens for answer in together] == alone
    assert len({tuple(answer) for answer in alone}) == len(names)


def test_drafts_do_not_change_the_tokens(llm, folders):
    llm.load_adapter("peft", folders["peft"])
    prompt = [*PROMPT, *tokens(llm, "peft")] * 3
    options = {"prompt": prompt, "max_new_tokens": LENGTH, "ignore_eos": True}
    drafted = llm.generate(adapter="peft", draft=4, **options)
    assert drafted.result().tokens == tokens(llm, "peft", prompt)
    assert drafted.metrics.drafted_tokens > 0


def test_scores_are_those_of_the_adapter(llm, folders):
    llm.load_adapter("mlx", folders["mlx"])
    answer = tokens(llm, "mlx")
    assert llm.score(PROMPT, [answer], adapter="mlx")[0].is_greedy
    assert not llm.score(PROMPT, [answer])[0].is_greedy


def test_a_prompt_is_reused_with_the_same_weights_only(llm, folders):
    prompt = PROMPT * 8

    def reused(adapter):
        return llm.generate(prompt, adapter=adapter, max_new_tokens=1).result().metrics.cached_tokens

    llm.load_adapter("a", folders["peft"])
    assert [reused(None), reused("a"), reused("a"), reused(None)] == [0, 0, len(prompt) - 1, len(prompt) - 1]
    llm.load_adapter("a", folders["peft"])
    assert reused("a") == 0


def test_a_saved_prefix_belongs_to_the_weights(llm, folders, tmp_path):
    prompt, file = PROMPT * 8, tmp_path / "prefix"
    llm.load_adapter("a", folders["peft"])
    expected = tokens(llm, "a", prompt)
    llm.save_prefix(prompt, file, adapter="a")
    llm.unload_adapter("a")
    with pytest.raises(ValueError, match="or of an adapter that is not loaded"):
        llm.load_prefix(file)
    llm.load_adapter("b", folders["peft"])
    assert llm.load_prefix(file) == len(prompt)
    answer = llm.generate(prompt, adapter="b", max_new_tokens=LENGTH, ignore_eos=True, draft=0).result()
    assert answer.tokens == expected and answer.metrics.cached_tokens == len(prompt) - 1


def test_a_request_keeps_its_adapter_and_the_slot_until_it_ends(llm, folders):
    for name in ("peft", "mlx", "pattern"):
        llm.load_adapter(name, folders[name])
    expected = tokens(llm, "mlx", max_new_tokens=600)
    running = llm.generate(PROMPT, adapter="mlx", max_new_tokens=600, ignore_eos=True, draft=0)
    llm.unload_adapter("mlx")
    assert llm.adapters == ["pattern", "peft"]
    with pytest.raises(BusyError, match="all 3 slots of the program are in use"):
        llm.load_adapter("another", folders["old_mlx"])
    assert running.result().tokens == expected
    llm.load_adapter("another", folders["old_mlx"])
    llm.load_adapter("another", folders["mlx"])  # takes the slot of the old one
    assert tokens(llm, "another") == expected[:LENGTH]


def test_adapters_come_and_go_under_load(llm, folders):
    names = ["peft", "mlx"]
    for name in names:
        llm.load_adapter(name, folders[name])
    expected = {name: tokens(llm, name) for name in (None, *names)}
    wrong, is_over = [], threading.Event()

    def ask(name):
        while not is_over.is_set():
            if (got := tokens(llm, name)) != expected[name]:
                wrong.append((name, got))

    threads = [threading.Thread(target=ask, args=[name]) for name in expected]
    for thread in threads:
        thread.start()
    for i in range(20):
        llm.load_adapter("other", folders["pattern" if i % 2 else "old_mlx"])
        llm.unload_adapter("other")
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong and llm.stats.failed == 0


def test_adapters_survive_failed_calls(llm, folders):
    """With a memory limit, calls fail at different places. Some leave the buffers undefined, and the engine resets."""
    prompt = PROMPT * 8
    llm.load_adapter("peft", folders["peft"])
    llm.load_adapter("mlx", folders["mlx"])
    expected = {name: tokens(llm, name, prompt) for name in (None, "peft", "mlx")}
    failures = 0
    for i, extra in enumerate([0, 1_000, 5_000, 15_000, 40_000, 100_000]):
        memory.set_memory_limit(memory.get_active_memory() + extra)
        try:
            for work in (lambda: llm.load_adapter("other", folders["pattern"]), lambda: tokens(llm, "mlx", prompt[i:])):
                try:
                    work()
                except memory.OutOfMemoryError:
                    failures += 1
        finally:
            memory.set_memory_limit(None)
        assert {name: tokens(llm, name, prompt) for name in expected} == expected
    assert failures > 1
    llm.load_adapter("other", folders["pattern"])
    assert tokens(llm, "other", prompt) not in expected.values()


def test_an_adapter_over_quantized_weights(tmp_path, folders):
    from executorch_mlx.llm.export.quantization.conversion import convert_weights

    options = {"adapters": 1, "lora_rank": 4, "adapter_targets": ["q_proj", "v_proj", "*.mlp.*"]}
    path = small_llm.export(tmp_path / "int4.pte", quantize="int4", verify=True, **options)
    with LLM.load(path) as llm:
        llm.load_adapter("peft", folders["peft"])
        answers = tokens(llm, None), tokens(llm, "peft")
    model = small_llm.model()
    options = {"tokenizer": small_llm.tokenizer(), "calibrate": None, "progress": lambda step: None}
    convert_weights(model, "int4", None, torch.float32, **options)
    assert is_greedy(model, answers[0])
    for name, (a, b) in weights(1, 4).items():
        change = 2 * b @ a
        model.get_submodule(name).register_forward_hook(lambda _, x, y, change=change: y + x[0] @ change.T)
    assert is_greedy(model, answers[1]) and answers[0] != answers[1]


@pytest.mark.parametrize(
    ("layers", "settings", "error"),
    [
        (weights(1, 9), {}, "proj: got rank 9, expected 1 to 8"),
        (weights(1, 2, {"self_attn.q_proj": (16, 32)}), {}, "q_proj: got 16 inputs and 32 outputs, expected 32 and 32"),
        (weights(1, 2, {"other": (32, 32)}), {}, "layers.0.other: the program has no adapters for this layer"),
        (weights(1, 2), {"use_dora": True}, "got DoRA.*--adapter"),
        (weights(1, 2), {"peft_type": "LOHA"}, "got an adapter of kind LOHA, expected LORA"),
    ],
    ids=["rank", "shape", "layer", "dora", "kind"],
)
def test_an_adapter_that_does_not_fit_is_refused(llm, tmp_path, layers, settings, error):
    folder = write_peft(tmp_path / "adapter", layers, **settings)
    with pytest.raises((SettingError, AdapterError), match=error):
        llm.load_adapter("it", folder)
    assert llm.adapters == []


def test_other_tensors_and_damaged_files_are_refused(llm, tmp_path, folders):
    folder = write_peft(tmp_path / "adapter", weights(1, 2))
    file = folder / "adapter_model.safetensors"
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 8)}, file)
    with pytest.raises(AdapterError, match="got the tensor model.embed_tokens.lora_embedding_A"):
        llm.load_adapter("it", folder)
    file.write_bytes((folders["peft"] / file.name).read_bytes()[:-10])
    with pytest.raises(AdapterError, match="the file is damaged"):
        llm.load_adapter("it", folder)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        llm.load_adapter("it", folder)


def test_unknown_names_are_refused(llm, folders):
    with pytest.raises(SettingError, match="adapter: got 'it', expected none, because no adapter is loaded"):
        llm.generate(PROMPT, adapter="it")
    llm.load_adapter("other", folders["mlx"])
    for use in (lambda: llm.unload_adapter("it"), lambda: llm.score(PROMPT, [[1]], adapter="it")):
        with pytest.raises(SettingError, match="adapter: got 'it', expected other"):
            use()
    for name in ("", "a\0b", 3):
        with pytest.raises(SettingError, match="adapter: "):
            llm.load_adapter(name, folders["mlx"])


def test_adapters_are_read_without_torch(folders):
    code = (
        "import sys; sys.modules['torch'] = None; from executorch_mlx.llm.adapter_files import read_adapter; "
        "print(sorted(layer.a.shape for layer in read_adapter(sys.argv[1]).values()))"
    )
    for name, shapes in (("pattern", [(8, 32), (8, 32), (8, 64)]), ("mlx", [(2, 32), (2, 32), (2, 64)])):
        printed = subprocess.run(
            [sys.executable, "-c", code, folders[name]], check=True, capture_output=True, text=True
        )
        assert printed.stdout.strip() == str(shapes)
