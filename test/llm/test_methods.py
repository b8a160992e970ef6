"""The methods of a program with rows. A request draws the same tokens alone, beside others, and through `verify`."""

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export import HeadConfig, export_llm
from row_programs import RowProgram
from test_families import FAMILIES, random_model

ROWS, CHUNK, CONTEXT, STEPS = 3, 16, 64, 20
VOCABULARY, WORDS = 256, 8  # a mask of allowed tokens has 8 words of 32 bits
FULL = HeadConfig(penalties=12, logit_bias=3, allowed_tokens=True, logprobs=4)
NEOX = (hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, dict(rotary_pct=0.5, num_key_value_heads=4))
# Name → model, head, outputs. gemma2 has ring buffers and soft-capped scores; the rings wrap around in these tests.
PROGRAMS = {
    "gemma2": (FAMILIES["gemma2"], FULL, "both"),
    "llama3": (FAMILIES["llama3"], HeadConfig(penalties=8), "tokens"),
    "qwen3": (FAMILIES["qwen3"], HeadConfig(), "tokens"),
    "gemma3": (FAMILIES["gemma3"], HeadConfig(), "tokens"),
    "mixtral": (FAMILIES["mixtral"], HeadConfig(), "tokens"),
    "gpt_neox": (NEOX, HeadConfig(), "tokens"),
    "llama, dynamic rope": (FAMILIES["llama, dynamic rope"], HeadConfig(), "tokens"),
}
REQUESTS = [  # the length of the prompt, and parameters that every program has
    (23, dict(temperature=0.0)),
    (5, dict(temperature=0.9, seed=11, top_k=20)),
    (17, dict(temperature=1.2, seed=5, top_p=0.9)),
]


def model_of(name):
    config, model, changes = PROGRAMS[name][0]
    return random_model(config, model, changes | {"max_position_embeddings": CONTEXT})


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request, tmp_path_factory):
    _, head, outputs = PROGRAMS[request.param]
    exported = export_llm(
        model_of(request.param),
        chunk=CHUNK,
        batch=ROWS,
        max_context_len=CONTEXT,
        head=head,
        outputs=outputs,
        verify=False,
    )
    assert exported.report.refused == ()
    path = tmp_path_factory.mktemp("methods") / "model.pte"
    exported.save(path)
    program = RowProgram(path, head, VOCABULARY)
    program.name = request.param
    return program


def requests_of(program):
    """Return a list of (prompt, parameters). If the program takes penalties, bias or masks, the requests have them."""
    generator = torch.Generator().manual_seed(3)
    requests = []
    for number, (length, parameters) in enumerate(REQUESTS):
        parameters = dict(parameters)
        if program.head.penalties:
            parameters |= dict(repetition_penalty=1.0 + number / 4, frequency_penalty=0.3 * number)
        if program.head.logit_bias:
            parameters |= dict(bias_tokens=[number, 7, 300], bias_values=[number - 1.0, 2.0, 9.0])
        if program.head.allowed_tokens:
            words = torch.randint(-(2**31), 2**31, (WORDS,), generator=generator)
            parameters |= dict(allowed_tokens=words if number == 2 else torch.full_like(words, -1))
        requests.append((torch.randint(1, VOCABULARY, (length,), generator=generator).tolist(), parameters))
    return requests


@pytest.fixture(scope="module")
def alone(program):
    """The answers to the requests, each alone in row 0."""
    answers = [program.answer(prompt, STEPS, 0, **parameters) for prompt, parameters in requests_of(program)]
    assert len(set().union(*answers)) > 15  # greedy answers of random models repeat themselves
    return answers


def test_greedy_equals_transformers(program, alone):
    if program.head.penalties:
        pytest.skip("the greedy request has penalties")
    model = model_of(program.name)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([requests_of(program)[0][0]])
    expected = model.generate(prompt, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)
    assert alone[0] == expected[0, prompt.shape[1] :].tolist()


def test_row_and_chunks_do_not_matter(program, alone):
    for (prompt, parameters), expected in zip(requests_of(program), alone):
        assert program.answer(prompt, STEPS, ROWS - 1, chunk=3, **parameters) == expected


def advanced(parameters, step):
    """Return the parameters that draw token `step` of the answer: the seed advances with each token."""
    return parameters | ({"seed": parameters["seed"] + step} if "seed" in parameters else {})


def by_item(program, parameters):
    """Return the parameters of the items of a `decode` call: for each name, a list with a value for each item.

    An item without a parameter gets the off value.
    """
    off = program.head.inputs(1, VOCABULARY)
    names = set().union(*parameters)
    return {name: [p.get(name, off[name]) for p in parameters] for name in names}


@pytest.mark.parametrize("narrow", [False, True], ids=["decode", "narrowest"])
def test_decode_draws_what_each_request_draws_alone(program, alone, narrow):
    """The requests join at the steps 0, 4 and 8. If there are fewer requests than rows, `decode` repeats an item.

    With `narrow`, `decode_2` runs one or two requests.
    """
    requests, joins, row_of = requests_of(program), [0, 4, 8], [2, 0, 1]
    drawn = [[] for _ in requests]
    for now in range(STEPS + joins[-1]):
        for i, (prompt, parameters) in enumerate(requests):
            if now == joins[i]:
                drawn[i] = program.answer(prompt, 1, row_of[i], chunk=4, **parameters)
        active = [i for i, answer in enumerate(drawn) if 0 < len(answer) < STEPS]
        if not active:
            continue
        if now % 2:
            active.reverse()  # the order of the items does not matter
        items = [(drawn[i][-1], len(requests[i][0]) + len(drawn[i]) - 1, row_of[i]) for i in active]
        given = by_item(program, [advanced(requests[i][1], len(drawn[i])) for i in active])
        width = 2 if narrow and len(active) <= 2 else None
        tokens = program.decode(items, width, **given)[0]
        for i, token in zip(active, tokens.tolist()):
            drawn[i].append(token)
    assert drawn == alone


def test_verify_draws_what_decoding_draws(program, alone):
    for row, ((prompt, parameters), expected) in enumerate(zip(requests_of(program), alone)):
        program.answer(prompt, 1, row, **parameters)
        position, count, step = len(prompt), 1, 0
        while count < STEPS:
            length = (5, 1, 3)[step % 3]
            # draft[0] is the last drawn token, and draft[3] the third draft token. If draft[3] is wrong, the tokens
            # drawn before it still agree.
            draft = expected[count - 1 : count - 1 + length]
            length = len(draft)
            if length > 3:
                draft[3] = (draft[3] + 1) % VOCABULARY
            given = advanced(parameters, count)
            if "allowed_tokens" in given:
                given["allowed_tokens"] = given["allowed_tokens"].expand(length, -1)
            tokens = program.verify(draft, position, row, **given)[0]
            assert tokens.shape == (1, length)
            accepted = min(length, 3, STEPS - count)
            assert tokens[0, :accepted].tolist() == expected[count : count + accepted]
            position, count, step = position + accepted, count + accepted, step + 1


def test_verify_equals_one_chunk(program):
    """The last token that `verify` draws is the token that `prefill` draws after the same chunk."""
    for row, (prompt, parameters) in enumerate(requests_of(program)):
        prompt = prompt[:CHUNK]
        given = dict(parameters)
        if "allowed_tokens" in given:
            given["allowed_tokens"] = given["allowed_tokens"].expand(len(prompt), -1)
        tokens = program.verify(prompt, 0, row, **given)[0]
        assert tokens[0, -1] == program.prefill(prompt, 0, row, **advanced(parameters, len(prompt) - 1))[0][0]


# One program with everything -----------------------------------------------------------------


@pytest.fixture(scope="module")
def full(program):
    if program.head != FULL:
        pytest.skip("a program with fewer inputs")
    return program


def reference_logits(program, tokens):
    with torch.no_grad():
        return model_of(program.name)(torch.tensor([tokens])).logits[0]


def test_logprobs_equal_log_softmax(full):
    tokens = requests_of(full)[1][0]
    expected = reference_logits(full, tokens).log_softmax(-1)
    parameters = dict(temperature=0.7, seed=3, presence_penalty=1.0, logprobs=1)
    token, logprob, top, values = full.prefill(tokens, 0, 1, **parameters)
    torch.testing.assert_close(logprob, expected[-1, token], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values[0], expected[-1].topk(4).values, atol=1e-4, rtol=1e-4)
    assert top[0].tolist() == expected[-1].topk(4).indices.tolist()
    # With logprobs=1, `verify` returns the log probabilities of the targets. With logprobs=2, it returns those of the
    # drawn tokens, which equal those that the other methods return.
    drawn, of_targets, *of_drawn = full.verify(tokens, 0, 1, targets=[*tokens[1:], 9], logprobs=1)
    torch.testing.assert_close(
        of_targets[0], expected.gather(1, torch.tensor([[*tokens[1:], 9]]).T)[:, 0], atol=1e-4, rtol=1e-4
    )
    assert all(x.eq(0).all() for x in of_drawn)
    parameters |= dict(seed=3 - len(tokens) + 1, logprobs=2)
    drawn, of_targets, *of_drawn = full.verify(tokens, 0, 1, targets=[*tokens[1:], 9], **parameters)
    assert drawn[0, -1] == token and of_targets.eq(0).all()
    assert all(got[0, -1].equal(x[0]) for got, x in zip(of_drawn, (logprob, top, values), strict=True))
    parameters |= dict(seed=3, logprobs=1)
    # In decode, only the items whose input `logprobs` is 1 get log probabilities.
    full.prefill(tokens, 0, 2)
    items = [(tokens[-1], len(tokens) - 1, row) for row in (1, 2)]
    outputs = full.decode(items, **by_item(full, [parameters, parameters | {"logprobs": 0}]))
    assert outputs[0].tolist() == [token.item()] * 2
    torch.testing.assert_close(outputs[1], torch.tensor([logprob.item(), 0.0]), atol=1e-5, rtol=1e-5)
    assert outputs[2][0].equal(top[0]) and outputs[2][1].eq(0).all() and outputs[3][1].eq(0).all()
    assert all(x.eq(0).all() for x in full.prefill(tokens, 0, 1)[1:])


def test_logits_shares_the_caches(full):
    tokens = requests_of(full)[2][0][:CHUNK]
    full.logits(tokens[:-1], 0, 1)
    logits = full.logits(tokens[-1:], len(tokens) - 1, 1)
    torch.testing.assert_close(logits, reference_logits(full, tokens)[-1], atol=1e-4, rtol=1e-4)
    assert full.prefill(tokens[-1:], len(tokens) - 1, 1)[0] == logits.argmax()


def test_penalties_count_the_window_of_the_row(full):
    reference = model_of(full.name)
    tokens = list(requests_of(full)[0][0])
    drawn = full.answer(tokens, 10, 1, chunk=7, repetition_penalty=1.7)
    for token in drawn:
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0, -1]
        for seen in set(tokens[-FULL.penalties :]):
            logits[seen] = logits[seen] / 1.7 if logits[seen] > 0 else logits[seen] * 1.7
        assert token == logits.argmax()
        tokens.append(token)


def test_each_item_has_its_own_mask_and_bias(full):
    masks = torch.full((2, WORDS), -1)
    masks[0] = 0
    masks[0, 1] = 1 << 5
    given = dict(allowed_tokens=list(masks), bias_tokens=[[0, 0, 0], [7, 1, 1]], bias_values=[[0.0] * 3, [500.0, 0, 0]])
    assert full.decode([(1, 0, 0), (2, 0, 1)], **given)[0].tolist() == [37, 7]


def test_penalties_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="head.penalties: got 65, expected at most 64"):
        export_llm(model_of("gemma2"), max_context_len=CONTEXT, head=HeadConfig(penalties=65))
