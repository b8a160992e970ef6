"""Multi-token prediction: the head guesses the same tokens as in transformers, and its guesses change no answer."""

import mtp_checkpoints
import pytest
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.checkpoints.head import load_mtp
from executorch_mlx.llm.export.weights import load_causal_lm
from row_programs import RowProgram
from safetensors.torch import load_file, save_file

CONTEXT = 96
PROMPT = torch.randint(mtp_checkpoints.VOCABULARY, (12,), generator=torch.Generator().manual_seed(2)).tolist()
SETTINGS = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.5, "seed": 6, "top_k": 20, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def random_head(tmp_path_factory):
    """A folder with a checkpoint and the program exported from it. The model has latent attention and a random head.
    The program has one row."""
    folder = mtp_checkpoints.make("deepseek_v3", tmp_path_factory.mktemp("deepseek_v3"))
    head = HeadConfig(penalties=16)
    export_llm(folder, max_context_len=CONTEXT, chunk=8, head=head, verify=False).save(folder / "model.pte")
    return folder


@pytest.fixture(scope="module")
def right_head(tmp_path_factory):
    """The path of an int4 program with two rows. All guesses of its head are right."""
    folder = mtp_checkpoints.make("glm4_moe", tmp_path_factory.mktemp("glm4_moe"), guesses_right=True)
    exported = export_llm(folder, max_context_len=CONTEXT, quantize="int4", batch=2, head=HeadConfig(logprobs=1))
    assert exported.report.refused == () and exported.unquantized == ()
    exported.save(folder / "model.pte")
    return folder / "model.pte"


def test_guesses_are_those_of_transformers(random_head):
    model = load_causal_lm(random_head, dtype=torch.float32)
    head = load_mtp(model, random_head)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(PROMPT))[None]
        states = head.forward_layer(0, states[:, :-1], positions, None, input_ids=tokens[:, 1:])
        expected = head._project_to_logits(states).argmax(-1)[0].tolist()
    program = RowProgram(random_head / "model.pte", HeadConfig(penalties=16), mtp_checkpoints.VOCABULARY)
    for begin in range(0, len(PROMPT), 8):
        program.prefill(PROMPT[begin : begin + 8], begin)
    calls = [(PROMPT[1:4], 0), (PROMPT[4:9], 3), *(([PROMPT[i + 1]], i) for i in range(8, len(PROMPT) - 1))]
    guesses = [program.draft(part, position, len(PROMPT))[0].item() for part, position in calls]
    assert guesses == [expected[position + len(part) - 1] for part, position in calls]


def answers(path, draft: int, **load) -> tuple[list, int, int]:
    """Return answers to prompts that share a beginning, and the numbers of drafted and of accepted tokens."""
    with LLM.load(path, **load) as llm:
        prompts = [PROMPT, PROMPT[:9] + [3, 4], [7], PROMPT + [8]]
        started = [
            llm.generate(prompt, max_new_tokens=25, ignore_eos=True, draft=draft, **options)
            for prompt in prompts
            for options in SETTINGS
            if "repetition_penalty" not in options or llm.program.takes("repetition_penalty")
        ]
        results = [generation.result() for generation in started]
        stats = llm.stats
    return [result.tokens for result in results], stats.drafted_tokens, stats.accepted_tokens


@pytest.mark.parametrize("reuse", [False, True])
def test_wrong_guesses_are_rejected(random_head, reuse):
    expected, drafted_without, _ = answers(random_head / "model.pte", draft=0, reuse_prompts=False)
    tokens, drafted, accepted = answers(random_head / "model.pte", draft=3, reuse_prompts=reuse)
    assert tokens == expected and drafted_without == 0 and drafted > accepted


def test_right_guesses_are_accepted(right_head):
    expected, _, _ = answers(right_head, draft=0, reuse_prompts=False)
    tokens, drafted, accepted = answers(right_head, draft=4, reuse_prompts=True)
    assert tokens == expected and drafted > 100 and accepted > 0.9 * drafted
    with LLM.load(right_head) as llm:
        kept = llm.generate(PROMPT, max_new_tokens=25, ignore_eos=True, logprobs=1, draft=4).result()
        plain = llm.generate(PROMPT, max_new_tokens=25, ignore_eos=True, logprobs=1, draft=0).result()
    assert (kept.tokens, kept.logprobs) == (plain.tokens, plain.logprobs) and kept.metrics.accepted_tokens > 10


def test_checkpoints_with_an_incomplete_head_and_without_a_head(random_head, tmp_path):
    tensors = load_file(random_head / "model.safetensors")
    for file in random_head.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    missing = f"model.layers.{mtp_checkpoints.LAYERS}.eh_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(tmp_path)
    with pytest.raises(ValueError, match="missing tensors for the multi-token prediction: layers.0.eh_proj.weight"):
        load_mtp(model, tmp_path)
    kept = {k: v for k, v in tensors.items() if f".layers.{mtp_checkpoints.LAYERS}." not in k}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_mtp(model, tmp_path) is None
