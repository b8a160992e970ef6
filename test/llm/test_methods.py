"""A program with every option: two sequences, two methods over one state, all sampling parameters."""

import pytest
import torch
from executorch_mlx import Runtime
from executorch_mlx.llm.export import HeadConfig, export_llm
from transformers import Gemma2Config, Gemma2ForCausalLM

VOCABULARY, WINDOW, CHUNK, STEPS = 200, 20, 16, 24
PROMPT_LENGTHS = (30, 21)
HEAD = HeadConfig(penalties=WINDOW, logit_bias=3, allowed_tokens=True)


def random_model():
    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        sliding_window=12,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    exported = export_llm(
        random_model(),
        chunk=CHUNK,
        batch=2,
        outputs="both",
        head=HEAD,
    )
    assert exported.report.refused == ()
    path = tmp_path_factory.mktemp("methods") / "model.pte"
    exported.save(path)
    return Runtime.get().load_program(path)


@pytest.fixture(scope="module")
def methods(program):
    return program.load_method("forward"), program.load_method("sample")


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(1)
    return [torch.randint(1, VOCABULARY, (1, length)) for length in PROMPT_LENGTHS]


def head_inputs(**changes):
    """The inputs of the head. A parameter that is not given has its off value."""
    return list((HEAD.inputs(2, VOCABULARY) | changes).values())


def answer(methods, prompts, steps=STEPS, **changes):
    """Greedy tokens [2, steps]. The first chunk goes through `forward`, all other calls through `sample`."""
    forward, sample = methods
    longest = max(PROMPT_LENGTHS)
    tokens = torch.stack([torch.nn.functional.pad(p[0], (longest - p.shape[1], 0)) for p in prompts])
    start, given = torch.tensor([longest - length for length in PROMPT_LENGTHS]), head_inputs(**changes)
    forward.execute([tokens[:, :CHUNK].contiguous(), torch.tensor([0]), start])
    token = sample.execute([tokens[:, CHUNK:].contiguous(), torch.tensor([CHUNK]), start, *given])[0].clone()
    drawn = [token]
    for position in range(longest, longest + steps - 1):
        token = sample.execute([token.reshape(2, 1), torch.tensor([position]), start, *given])[0].clone()
        drawn.append(token)
    return torch.stack(drawn, 1)


def expected(prompt):
    generated = random_model().generate(
        prompt, do_sample=False, max_new_tokens=STEPS, pad_token_id=0
    )
    return generated[0, prompt.shape[1] :].tolist()


def test_padding_does_not_change_a_sequence(methods, prompts):
    assert answer(methods, prompts).tolist() == [expected(p) for p in prompts]


def test_repetition_penalty_looks_only_at_the_window(methods, prompts):
    drawn = answer(methods, prompts, repetition_penalty=torch.tensor(1.7))
    reference = random_model()
    for answer_tokens, prompt in zip(drawn.tolist(), prompts):
        tokens = prompt[0].tolist()
        for token in answer_tokens:
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[0, -1]
            for seen in set(tokens[-WINDOW:]):
                logits[seen] = logits[seen] / 1.7 if logits[seen] > 0 else logits[seen] * 1.7
            assert token == logits.argmax()
            tokens.append(token)


def test_bias_and_mask_determine_the_token(methods, prompts):
    bias = {"bias_tokens": torch.tensor([7, 150, 7]), "bias_values": torch.tensor([500.0, 0, 500])}
    assert answer(methods, prompts, steps=2, **bias).eq(7).all()
    mask = torch.zeros(2, 7, dtype=torch.int32)
    mask[0, 1], mask[1, 6] = 1 << 5, 1 << 2
    assert answer(methods, prompts, steps=2, allowed_tokens=mask).tolist() == [[37, 37], [194, 194]]


def test_both_methods_share_one_state(methods, prompts):
    answer(methods, prompts)
    forward, sample = methods
    start, token = torch.tensor([0, PROMPT_LENGTHS[0] - PROMPT_LENGTHS[1]]), torch.tensor([[5], [9]])
    (logits,) = forward.execute([token, torch.tensor([40]), start])
    (drawn,) = sample.execute([token, torch.tensor([40]), start, *head_inputs()])
    assert logits.shape == (2, 1, VOCABULARY)
    assert drawn.tolist() == logits[:, 0].argmax(-1).tolist()


def test_penalties_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="head.penalties: got 65, expected at most 64"):
        export_llm(random_model(), head=HeadConfig(penalties=65))
