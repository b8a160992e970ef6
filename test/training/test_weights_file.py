"""A program for inference and one for training that share a weights file, beside programs with their own weights."""

import shutil

import pytest
import small_llm
import torch
from executorch_mlx import Runtime, save_program
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM
from executorch_mlx.training import LoRA, TrainingProgram, export_training
from executorch_mlx.training.adapter import write_adapter
from torch.nn import functional as F

WEIGHTS = "shared.ptd"
LENGTH, TARGETS = 12, ("q_proj", "v_proj", "down_proj")
PROMPT = [0, 5, 9, 300, 22]
TOKENS = torch.randint(0, small_llm.VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
BATCH = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous(), torch.ones(1, LENGTH)


def export(path, **options):
    return small_llm.export(path, adapters=1, lora_rank=4, outputs="both", **options)


def export_steps(path, **options):
    lora = LoRA(r=4, alpha=8, targets=TARGETS)
    save_program(export_training(small_llm.model(), lora=lora, length=LENGTH, **options), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model.pte` and `train.pte` with a weights file, and `alone.pte` without one."""
    folder = tmp_path_factory.mktemp("weights")
    export(folder / "alone.pte")
    export(folder / "model.pte", weights_file=WEIGHTS)
    before = (folder / WEIGHTS).stat().st_size
    export_steps(folder / "train.pte", weights_file=WEIGHTS)
    assert (folder / WEIGHTS).stat().st_size < 1.2 * before  # the matrices of the embedding and the head are there
    return folder


@pytest.fixture
def programs(folder, tmp_path):
    """Copies of the programs without the weights file."""
    for name in ("model.pte", "train.pte"):
        shutil.copy(folder / name, tmp_path)
    return tmp_path


def tokens(llm, **options):
    return llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True, **options).result().tokens


def test_programs_with_a_shared_weights_file_give_the_same_results(folder, tmp_path):
    weights = sum(p.nbytes for p in small_llm.model().parameters())
    assert (folder / "alone.pte").stat().st_size - (folder / "model.pte").stat().st_size > 0.9 * weights
    training = TrainingProgram(folder / "train.pte")
    with LLM.load(folder / "alone.pte") as alone, LLM.load(folder / "model.pte") as model:
        assert tokens(model) == tokens(alone)
        losses = [training.train_step(*BATCH, 1e-2, step) for step in range(1, 4)]
        write_adapter(tmp_path / "adapter", training, None)
        for llm in (alone, model):
            llm.load_adapter("trained", tmp_path / "adapter")
        assert tokens(model, adapter="trained") == tokens(alone, adapter="trained") != tokens(model)
    own = TrainingProgram(export_steps(tmp_path / "own.pte"))
    assert [own.train_step(*BATCH, 1e-2, step) for step in range(1, 4)] == losses


def test_a_trained_adapter_has_the_same_logits_in_peft(folder, tmp_path):
    """Compares log probabilities of the training program, of the adapter in peft, and of the adapter in an LLM."""
    from peft import PeftModel

    training = TrainingProgram(folder / "train.pte")
    for step in range(1, 9):
        training.train_step(*BATCH, 1e-2, step)
    write_adapter(tmp_path, training, None)
    inputs, targets, _ = BATCH
    with torch.no_grad():
        logits = PeftModel.from_pretrained(small_llm.model(), tmp_path).eval()(input_ids=inputs).logits
    expected = F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).flatten()
    masks = torch.eye(LENGTH).split(1)
    actual = torch.tensor([-training.eval_loss(inputs, targets, mask.contiguous()) for mask in masks])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    with LLM.load(folder / "model.pte") as llm:
        llm.load_adapter("trained", tmp_path)
        text = TOKENS[0].tolist()
        (score,) = llm.score(text[:1], [text[1:]], adapter="trained")
        assert score.logprob == pytest.approx(expected.sum().item(), abs=1e-4 * LENGTH)
        assert llm.score(text[:1], [text[1:]])[0].logprob != pytest.approx(score.logprob, abs=1e-2)


def test_a_missing_weights_file_is_named(programs):
    with pytest.raises(FileNotFoundError, match=rf"model.pte: its weights file .*{WEIGHTS} is missing"):
        LLM.load(programs / "model.pte")
    with pytest.raises(FileNotFoundError, match=rf"train.pte: its weights file .*{WEIGHTS} is missing"):
        TrainingProgram(programs / "train.pte")
    with pytest.raises(ValueError, match=rf"data_path: the program in memory has its weights in {WEIGHTS}"):
        Runtime.get().load_program((programs / "train.pte").read_bytes())


def test_a_weights_file_of_another_program_is_refused(programs):
    other = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50))
    save_program(export_training(other, lora=None, length=4, weights_file=WEIGHTS), programs / "other.pte")
    with pytest.raises(ValueError, match="model.pte: .*its weights file is of another program"):
        LLM.load(programs / "model.pte")
    with pytest.raises(RuntimeError, match="a data file .*is of another program"):
        TrainingProgram(programs / "train.pte").eval_loss(*BATCH)


def test_a_file_that_is_no_weights_file_is_refused(programs):
    (programs / WEIGHTS).write_bytes(b"no weights" * 1000)
    with pytest.raises(ValueError, match=rf"{WEIGHTS}: not a weights file"):
        LLM.load(programs / "model.pte")
    with pytest.raises(RuntimeError):
        TrainingProgram(programs / "train.pte")
    with pytest.raises(ValueError, match=f"{WEIGHTS}: expected a data file of ExecuTorch"):
        export_steps(programs / "train.pte", weights_file=WEIGHTS)


@pytest.mark.parametrize("name", ["model.bin", "folder/model.ptd", ".ptd", "../model.ptd"])
def test_the_name_of_a_weights_file_is_checked(name, capsys):
    with pytest.raises(ValueError, match="expected the name of a .ptd file, without a folder"):
        export_training(small_llm.model(), weights_file=name)
    assert main(["export", "folder", "-o", "model.pte", "--weights-file", name]) != 0
    assert f"--weights-file: got {name}, expected the name of a .ptd file" in capsys.readouterr().err
