"""`save` checks the exported program: a right program is written, a wrong one leaves no file."""

import copy
import os
import re

import pytest
import small_llm
import torch
from broken_lowering import scaled_constant
from executorch_mlx.cli.main import main
from executorch_mlx.llm.export import HeadConfig, VerificationError, export_llm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("delegate")
# The number of tokens that the check compares in each of its runs.
LONG_RUN = 5  # two chunks and three decode steps
SHORT_RUN = 2 + 4  # two chunks, and a call of `verify` with four tokens
# With three rows: three chunks in two rows, a call of `decode_2`, three calls of `decode`, and a call of `verify`.
SHORT_RUN_OF_ROWS = 3 + 2 + 3 * 3 + 4

# Name → arguments of export_llm, number of tokens that the check compares
OPTIONS = {
    "tokens": (dict(head=HeadConfig(penalties=8, logit_bias=2, allowed_tokens=True, logprobs=2)), LONG_RUN + SHORT_RUN),
    "both": (dict(outputs="both", allow_extensions=True), LONG_RUN + SHORT_RUN),
    "logits": (dict(outputs="logits"), LONG_RUN),
    "no speculation": (dict(speculation=False), LONG_RUN + 2),
    "rows and window": (dict(batch=3, sliding_window=8), LONG_RUN + SHORT_RUN_OF_ROWS),
    "rows and logits": (dict(batch=3, outputs="logits"), LONG_RUN + SHORT_RUN_OF_ROWS - 4),
    "int4 and bfloat16": (dict(quantize="int4", group_size=32, dtype=torch.bfloat16), LONG_RUN + SHORT_RUN),
}


@pytest.mark.parametrize("options, tokens", OPTIONS.values(), ids=OPTIONS)
def test_right_program_is_written(options, tokens, tmp_path):
    exported = export_llm(small_llm.model(), chunk=16, **options)
    size = exported.save(tmp_path / "model.pte")
    check = exported.check
    assert check.ok and check.agreeing == check.tokens == tokens
    assert 0 < check.difference <= check.tolerance
    assert [p.name for p in tmp_path.iterdir()] == ["model.pte"] and (tmp_path / "model.pte").stat().st_size == size


@pytest.mark.parametrize("length, tokens", [(2, 2), (4, 4), (16, 5)])
def test_context_of_one_chunk(length, tokens, tmp_path):
    exported = export_llm(small_llm.model(), max_context_len=length, outputs="logits")
    exported.save(tmp_path / "model.pte")
    assert exported.check.ok and exported.check.tokens == tokens


@pytest.mark.parametrize("chunk", [2, 7])
def test_chunks_that_are_shorter_than_the_second_call_of_the_check(chunk, tmp_path):
    exported = export_llm(small_llm.model(), chunk=chunk, outputs="logits")
    exported.save(tmp_path / "model.pte")
    assert exported.check.ok and exported.check.tokens == LONG_RUN


WEIGHT = "decoder.model.model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("outputs", ["tokens", "logits"])
def test_broken_lowering_is_refused(outputs, tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(b"older")
    with scaled_constant(WEIGHT):
        exported = export_llm(small_llm.model(), chunk=16, outputs=outputs, speculation=False)
    with pytest.raises(VerificationError, match="differs from the eager model beyond rounding") as raised:
        exported.save(path)
    check = raised.value.check
    assert not check.ok and check.difference > check.tolerance
    assert "AddmmNode" in check.departure and "self.down_proj(" in check.departure
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"older"


def test_wrong_token_is_refused(tmp_path):
    """The weights of the model change after its export, so that the program draws other tokens than the model."""
    model = small_llm.model()
    exported = export_llm(model, chunk=16, head=HeadConfig.minimal(), speculation=False)
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0).clone()
    with pytest.raises(VerificationError):
        exported.save(tmp_path / "model.pte")
    assert exported.check.agreeing < exported.check.tokens
    assert list(tmp_path.iterdir()) == []


def test_verify_false_writes_unchecked(tmp_path):
    with scaled_constant(WEIGHT):
        exported = export_llm(
            copy.deepcopy(small_llm.model()), chunk=16, head=HeadConfig.minimal(), speculation=False, verify=False
        )
    exported.save(tmp_path / "model.pte")
    assert exported.check is None and (tmp_path / "model.pte").exists()


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operator returns, in bytes."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.bytes = max(self.bytes, *sizes, 0)
        return result


@pytest.mark.parametrize("outputs", ["tokens", "logits"])
def test_no_tensor_of_the_check_is_as_large_as_a_cache(outputs, tmp_path):
    exported = export_llm(small_llm.model(), chunk=16, batch=32, outputs=outputs, head=HeadConfig.minimal())
    with LargestTensor() as largest:
        exported.save(tmp_path / "model.pte")
    assert exported.check.ok and 0 < largest.bytes < exported.cache_bytes / 2  # the keys and values of one layer


def test_missing_folder_and_special_file_are_named(tmp_path):
    """The file would replace a special file, such as /dev/null."""
    exported = export_llm(small_llm.model(), chunk=16, head=HeadConfig.minimal(), speculation=False, verify=False)
    with pytest.raises(FileNotFoundError, match="nowhere/model.pte"):
        exported.save(tmp_path / "nowhere" / "model.pte")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="expected a file, or a path where nothing is: .*pipe"):
        exported.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_command_exits_with_an_error_and_leaves_no_file(tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    small_llm.model().save_pretrained(folder)
    output = tmp_path / "out" / "model.pte"
    output.parent.mkdir()
    command = ["export", str(folder), "-o", str(output), "--chunk", "16"]
    with scaled_constant(WEIGHT):
        assert main(command) == 1
    printed = capsys.readouterr()
    assert "the program differs from the eager model beyond rounding" in printed.err and not printed.out
    assert list(output.parent.iterdir()) == []
    assert main(command) == 0
    printed = capsys.readouterr()
    assert re.search(r"(\d+) of \1 greedy tokens agree; largest difference of the logits", printed.out)
    assert "verify: " in printed.err and "GB, the check added " in printed.err
