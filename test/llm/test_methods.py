"""A program with everything: two rows, two methods over one state, and every parameter."""

import copy

import pytest
import torch
from executorch.runtime import Runtime
from executorch_mlx import load_delegate
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.parameters import Sampling
from transformers import Gemma2Config, Gemma2ForCausalLM

VOCABULARY, WINDOW, CHUNK, STEPS = 200, 20, 16, 24
PROMPTS = (30, 21)


def model():
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
    made = Gemma2ForCausalLM(config).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    exported = export_llm(
        model(),
        chunk=CHUNK,
        batch=2,
        outputs="both",
        sampling=Sampling(penalties=WINDOW, logit_bias=3, allowed_tokens=True),
    )
    assert exported.report.refused == ()
    path = tmp_path_factory.mktemp("methods") / "model.pte"
    exported.save(path)
    load_delegate()
    return Runtime.get().load_program(path)


@pytest.fixture(scope="module")
def methods(program):
    return program.load_method("forward"), program.load_method("sample")


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(1)
    return [torch.randint(1, VOCABULARY, (1, length)) for length in PROMPTS]


def parameters(**changes):
    values = {
        "temperature": torch.tensor(0.0),
        "top_p": torch.tensor(1.0),
        "seed": torch.tensor(0),
        "top_k": torch.tensor(0),
        "min_p": torch.tensor(0.0),
        "repetition_penalty": torch.tensor(1.0),
        "presence_penalty": torch.tensor(0.0),
        "frequency_penalty": torch.tensor(0.0),
        "bias_tokens": torch.zeros(3, dtype=torch.int64),
        "bias_values": torch.zeros(3),
        "allowed_tokens": torch.full((2, -(-VOCABULARY // 32)), -1, dtype=torch.int32),
    }
    return list((values | changes).values())


def answer(methods, prompts, steps=STEPS, **changes):
    """Greedy tokens [2, steps]. The first piece goes through `forward`, all else through `sample`."""
    forward, sample = methods
    longest = max(PROMPTS)
    tokens = torch.stack([torch.nn.functional.pad(p[0], (longest - p.shape[1], 0)) for p in prompts])
    start, given = torch.tensor([longest - length for length in PROMPTS]), parameters(**changes)
    forward.execute([tokens[:, :CHUNK].contiguous(), torch.tensor([0]), start])
    token = sample.execute([tokens[:, CHUNK:].contiguous(), torch.tensor([CHUNK]), start, *given])[0].clone()
    drawn = [token]
    for position in range(longest, longest + steps - 1):
        token = sample.execute([token.reshape(2, 1), torch.tensor([position]), start, *given])[0].clone()
        drawn.append(token)
    return torch.stack(drawn, 1)


def expected(prompt, **options):
    generated = model().generate(
        prompt, do_sample=False, max_new_tokens=STEPS, pad_token_id=0, **options
    )
    return generated[0, prompt.shape[1] :].tolist()


def test_padded_rows_are_each_what_they_are_alone(methods, prompts):
    assert answer(methods, prompts).tolist() == [expected(p) for p in prompts]


def test_repetition_penalty_looks_at_the_window_only(methods, prompts):
    drawn = answer(methods, prompts, repetition_penalty=torch.tensor(1.7))
    reference = model()
    for row, prompt in zip(drawn.tolist(), prompts):
        tokens = prompt[0].tolist()
        for token in row:
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[0, -1]
            for seen in set(tokens[-WINDOW:]):
                logits[seen] = logits[seen] / 1.7 if logits[seen] > 0 else logits[seen] * 1.7
            assert token == logits.argmax()
            tokens.append(token)


def test_a_biased_token_wins_and_a_mask_holds(methods, prompts):
    biased = answer(methods, prompts, steps=2, bias_tokens=torch.tensor([7, 150, 7]), bias_values=torch.tensor([500.0, 0, 500]))
    assert biased.eq(7).all()
    mask = torch.zeros(2, 7, dtype=torch.int32)
    mask[0, 1], mask[1, 6] = 1 << 5, 1 << 2
    assert answer(methods, prompts, steps=2, allowed_tokens=mask).tolist() == [[37, 37], [194, 194]]


def test_logits_and_tokens_come_from_one_state(methods, prompts):
    answer(methods, prompts)
    forward, sample = methods
    start, token = torch.tensor([0, PROMPTS[0] - PROMPTS[1]]), torch.tensor([[5], [9]])
    (logits,) = forward.execute([token, torch.tensor([40]), start])
    (drawn,) = sample.execute([token, torch.tensor([40]), start, *parameters()])
    assert logits.shape == (2, 1, VOCABULARY)
    assert drawn.tolist() == logits[:, 0].argmax(-1).tolist()


def test_penalties_reach_no_further_than_the_caches():
    with pytest.raises(ValueError, match="sampling.penalties is 65, expected at most 64"):
        export_llm(copy.deepcopy(model()), sampling=Sampling(penalties=65))
