"""Models with states and a head for multi-token prediction: draft tokens change no answer, and are often accepted."""

import pytest
import qwen_mtp_checkpoints as checkpoints
import torch
from executorch_mlx import memory
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.checkpoints.head import UnknownHead, load_mtp
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.recurrent.rewind import LENGTH
from executorch_mlx.llm.export.weights import load_causal_lm
from executorch_mlx.llm.generation import Request
from executorch_mlx.llm.scoring import allow_only
from row_programs import RowProgram
from safetensors.torch import load_file, save_file
from test_state_families import FAMILIES, SMALL, prompt_of, random_model

CONTEXT, CHUNK = 96, 16
PROMPT = prompt_of(5)[0].tolist()  # longer than a chunk
HEAD = HeadConfig(penalties=16, logprobs=1, allowed_tokens=True)
PROMPTS = [PROMPT, PROMPT[:20] + [3, 4], [7], PROMPT + [8]]
SETTINGS = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]
REWINDABLE = {
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "recurrent_gemma",
    "zaya",
}


@pytest.fixture(scope="module")
def random_head(tmp_path_factory):
    """A folder with a Qwen3.5 checkpoint, whose head is random, and the program exported from it, with one row."""
    folder = checkpoints.make("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    exported = export_llm(folder, max_context_len=CONTEXT, chunk=CHUNK, head=HEAD)
    assert exported.report.refused == () and exported.methods == ("forward", "verify", "draft", "rewind")
    assert [note for note in exported.notes if "has no tokenizer" not in note] == []
    exported.save(folder / "model.pte")
    return folder


@pytest.fixture(scope="module")
def good_head(tmp_path_factory):
    """The path of an int4 program of Qwen3-Next, with two rows. Most guesses of its head are right."""
    folder = checkpoints.make("qwen3_next", tmp_path_factory.mktemp("qwen3_next"), layer_scale=0.005)
    exported = export_llm(folder, max_context_len=CONTEXT, chunk=CHUNK, batch=2, quantize="int4")
    assert exported.report.refused == ()
    exported.save(folder / "model.pte")
    return folder / "model.pte"


def answers(path, draft: int, **load):
    """Return answers to prompts that share a beginning, and the statistics."""
    with LLM.load(path, **load) as llm:
        started = [
            llm.generate(prompt, max_new_tokens=30, ignore_eos=True, draft=draft, **options)
            for prompt in PROMPTS
            for options in SETTINGS
        ]
        return [generation.result().tokens for generation in started], llm.stats


@pytest.mark.parametrize("name", checkpoints.MODELS)
def test_guesses_are_those_of_transformers(name, tmp_path):
    """`draft` over the caches of a program guesses what the head of transformers guesses without a cache."""
    folder = checkpoints.make(name, tmp_path)
    tokens = torch.tensor([PROMPT])
    model = load_causal_lm(folder, dtype=torch.float32)
    head = load_mtp(model, folder)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(PROMPT))[None]
        states = head.forward_layer(0, states[:, :-1], positions, None, input_ids=tokens[:, 1:])
        expected = head._project_to_logits(states)[0, -1]
        use_gathered_experts(model)
        use_gathered_experts(head)
        decoder = CachedDecoder(model, rows=2, max_context_len=64, chunk=CHUNK, mtp=head, logs_states=True).eval()
        row, begin = torch.tensor([1]), torch.tensor([0])
        decoder(tokens[:, :CHUNK], begin, row)
        decoder(tokens[:, CHUNK:-2], begin + CHUNK, row)
        # The last tokens in a batch with another row, as in a step.
        last = torch.tensor([len(PROMPT) - 2, 0])
        decoder(torch.tensor([[PROMPT[-2], 3]]), last, torch.tensor([1, 0]), all_positions=True)
        length = torch.tensor([len(PROMPT) - 1])
        decoder.mtp(tokens[:, 1:9], begin, row, length)
        guess = decoder.mtp(tokens[:, 9:], begin + 8, row, length)[0, 0]
    torch.testing.assert_close(guess, expected, atol=1e-4, rtol=1e-4)


def test_stacked_experts(tmp_path):
    """The head is the same if its experts are stored in one tensor."""
    folder = checkpoints.make("qwen3_5_moe", tmp_path)
    model = load_causal_lm(folder, dtype=torch.float32)
    expected = load_mtp(model, folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    prefix = "mtp.layers.0.mlp.experts."
    parts = {
        kind: [tensors.pop(f"{prefix}{i}.{kind}.weight") for i in range(4)]
        for kind in ("gate_proj", "up_proj", "down_proj")
    }
    tensors[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])], 1)
    tensors[f"{prefix}down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    got = load_mtp(model, folder).state_dict()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def test_unknown_layouts(tmp_path):
    folder = checkpoints.make("qwen3_5", tmp_path)
    model = load_causal_lm(folder, dtype=torch.float32)
    model.config.mtp_use_dedicated_embeddings = True
    with pytest.raises(UnknownHead, match="embeddings of its own"):
        load_mtp(model, folder)
    model.config.mtp_use_dedicated_embeddings = False
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.replace("mtp.fc.", "mtp.projection."): value for key, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnknownHead, match="names of its tensors are unknown"):
        load_mtp(model, folder)
    missing = {key: value for key, value in tensors.items() if key != "mtp.layers.0.self_attn.q_proj.weight"}
    save_file(missing, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing tensors for the multi-token prediction: layers.0.*q_proj"):
        load_mtp(model, folder)
    without = {key: value for key, value in tensors.items() if not key.startswith("mtp.")}
    save_file(without, folder / "model.safetensors", {"format": "pt"})
    assert load_mtp(model, folder) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_states_after_rewind(name):
    """After a rewind, the states are those of a row that has read only the kept tokens."""
    model = random_model(name)
    use_gathered_experts(model)
    decoder = CachedDecoder(model, rows=2, max_context_len=64, chunk=CHUNK, logs_states=True).eval()
    assert decoder.can_rewind == (name in REWINDABLE)
    if not decoder.can_rewind:
        return
    tokens, row = prompt_of(1), torch.tensor([1])
    states = [n for n, _ in decoder.named_buffers(recurse=False) if "_state_" in n]
    with torch.no_grad():
        for begin, kept in ((0, 1), (0, LENGTH - 1), (CHUNK, 3)):
            position = torch.tensor([begin])
            if begin:
                decoder(tokens[:, :begin], torch.tensor([0]), row)
            decoder(tokens[:, begin : begin + LENGTH], position, row, all_positions=True, keep_log=True)
            after = {n: getattr(decoder, n).clone() for n in states}
            assert int(decoder.rewind(tokens[:, begin : begin + kept], position, row)) == begin + kept
            got = {n: getattr(decoder, n).clone() for n in states}
            if begin:
                decoder(tokens[:, :begin], torch.tensor([0]), row)
            decoder(tokens[:, begin : begin + kept], position, row)
            for n in states:
                torch.testing.assert_close(got[n], getattr(decoder, n), atol=1e-4, rtol=1e-4)
                assert (got[n] - after[n]).abs().max() > 1e-3


def test_rewind_in_the_program(random_head):
    """Decoding after a rewind draws the same tokens, whatever the rejected tokens were."""
    program = RowProgram(random_head / "model.pte", HEAD, checkpoints.VOCABULARY)
    expected = program.answer(PROMPT, 12)
    for kept in range(1, LENGTH):
        program.answer(PROMPT, 1)
        given = expected[:kept] + [9] * (LENGTH - kept)
        drawn = program.verify(given, len(PROMPT))[0][0].tolist()
        assert drawn[:kept] == expected[1 : kept + 1]
        inputs = [torch.tensor([expected[:kept]]), torch.tensor([len(PROMPT)])]
        assert program.call("rewind", inputs)[0].tolist() == [len(PROMPT) + kept]
        position, token, rest = len(PROMPT) + kept, expected[kept], []
        while len(rest) < 11 - kept:
            token = int(program.prefill([token], position)[0])
            position += 1
            rest.append(token)
        assert rest == expected[kept + 1 :]


@pytest.mark.parametrize("reuse", [False, True])
def test_wrong_guesses_are_rejected(random_head, reuse):
    expected, plain = answers(random_head / "model.pte", draft=0, reuse_prompts=False)
    tokens, stats = answers(random_head / "model.pte", draft=3, reuse_prompts=reuse)
    assert tokens == expected and plain.drafted_tokens == 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens / 2


@pytest.mark.parametrize("draft", [1, 4, 31])
def test_right_guesses_are_accepted(good_head, draft):
    expected, _ = answers(good_head, draft=0, reuse_prompts=False)
    tokens, stats = answers(good_head, draft=draft)
    assert tokens == expected
    assert stats.accepted_tokens < stats.drafted_tokens  # some states were rewound
    assert stats.accepted_tokens > 0.3 * stats.drafted_tokens


def test_log_probabilities_and_scores(random_head):
    with LLM.load(random_head / "model.pte") as llm:
        plain, drafted = (
            llm.generate(PROMPT, max_new_tokens=25, ignore_eos=True, logprobs=1, draft=draft).result()
            for draft in (0, 4)
        )
        assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)
        assert drafted.metrics.drafted_tokens > 0
        # The scored tokens are more than a row can rewind. `verify` takes them in chunks.
        (score,) = llm.score(PROMPT, [plain.tokens])
        assert score.is_greedy and len(plain.tokens) > LENGTH
        assert score.logprobs == pytest.approx(plain.logprobs, abs=1e-3)


def test_answers_that_end_inside_a_draft(good_head):
    """The row of an answer that ended in the middle of a draft holds the states of its tokens, and is reused."""
    options = {"ignore_eos": True, "temperature": 1.5, "seed": 3}
    with LLM.load(good_head) as llm:
        whole = llm.generate(PROMPT, max_new_tokens=30, draft=0, **options).result().tokens
    ends = [i for i, token in enumerate(whole[:-1]) if token not in whole[:i]]
    assert len(ends) > 8
    for end in ends:
        with LLM.load(good_head) as llm:
            first = llm.generate(PROMPT, max_new_tokens=30, draft=6, stop_ids=[whole[end]], **options).result()
            assert first.finish == "stop" and first.tokens == whole[:end]
            prompt, seed = PROMPT + whole[: end + 1], options["seed"] + end + 1
            rest = llm.generate(prompt, max_new_tokens=29 - end, draft=6, **options | {"seed": seed}).result()
            assert rest.tokens == whole[end + 1 :]
            assert rest.metrics.cached_tokens == len(PROMPT) + end


def test_cancelled_answers(good_head):
    with LLM.load(good_head) as llm:
        whole = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True, draft=0).result().tokens
        for count in range(1, 12, 3):
            generation = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True, draft=4)
            first = [next(generation).id for _ in range(count)]
            generation.cancel()
            generation.result()
            rest = llm.generate(PROMPT + first, max_new_tokens=30 - count, ignore_eos=True, draft=4).result()
            assert first + rest.tokens == whole


@pytest.mark.parametrize("chunk", [4, CHUNK])
def test_drafts_and_chunks_beyond_the_memory_limit_end_no_answer(good_head, chunk):
    """After a call that fails, the states may have read its tokens. The row reads prompt and answer again."""
    options = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    for room in (60_000, 90_000):
        with LLM.load(good_head, chunk=chunk) as llm:
            expected = llm.generate(PROMPT, draft=0, **options).result().tokens
            assert llm.generate(PROMPT, draft=6, **options).result().metrics.accepted_tokens > 0
            before = memory.set_memory_limit(memory.get_active_memory() + room)
            try:
                assert llm.generate(PROMPT, draft=6, **options).result().tokens == expected
            finally:
                memory.set_memory_limit(before)


def test_rewind_beyond_the_memory_limit_ends_no_answer(random_head, monkeypatch):
    """The states have read wrong draft tokens. The row reads prompt and answer again."""

    def receive_and_limit(request, event, is_last):  # after the call of `verify`, and before that of `rewind`
        memory.set_memory_limit(memory.get_active_memory())
        receive(request, event, is_last)

    def continue_prompt(answer):  # so that the lookup finds a draft
        memory.set_memory_limit(None)
        return allow_only(SMALL["vocab_size"], [7 + len(answer) % 2]) if len(answer) < 3 else None

    options = {"max_new_tokens": 6, "ignore_eos": True, "allowed_tokens": continue_prompt}
    receive = Request.receive
    with LLM.load(random_head / "model.pte") as llm:
        expected = llm.generate([7, 8] * 3, draft=0, **options).result().tokens
        monkeypatch.setattr(Request, "receive", receive_and_limit)
        try:
            answer = llm.generate([7, 8] * 3, draft=4, **options).result()
        finally:
            memory.set_memory_limit(None)
    assert answer.tokens == expected and answer.metrics.accepted_tokens < answer.metrics.drafted_tokens


def test_methods_of_drafts_that_leave_no_room_are_unloaded(good_head):
    """They have buffers of their own. Drafts are made again when there is room, after 1024 steps."""
    options = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    with LLM.load(good_head) as llm:
        expected = llm.generate(PROMPT, draft=0, **options).result().tokens
        llm.generate(PROMPT, draft=6, **options).result()
        loaded = memory.get_active_memory()
        before = memory.set_memory_limit(loaded + 1000)
        try:
            assert llm.generate(PROMPT, draft=6, **options).result().tokens == expected
            assert memory.get_active_memory() < loaded - 50_000
        finally:
            memory.set_memory_limit(before)
        for _ in range(1024 // 40 + 1):
            answer = llm.generate(PROMPT, draft=6, **options).result()
            assert answer.tokens == expected
        assert answer.metrics.accepted_tokens > 0


def test_scores_beyond_the_memory_limit_take_fewer_tokens_in_a_call(random_head):
    with LLM.load(random_head / "model.pte") as llm:
        (expected,) = llm.score(PROMPT, [PROMPT])
        before = memory.set_memory_limit(memory.get_active_memory() + 60_000)
        try:
            (limited,) = llm.score(PROMPT, [PROMPT])
        finally:
            memory.set_memory_limit(before)
    assert limited == expected


def test_prompt_caches_do_not_depend_on_the_loaded_methods(good_head, tmp_path):
    """Draft tokens load methods that have buffers of their own. The file has none of them."""
    options = {"max_new_tokens": 20, "ignore_eos": True}
    before, after = tmp_path / "before", tmp_path / "after"

    def check(llm: LLM, path) -> None:
        assert llm.load_prefix(path) == len(PROMPT)
        answer = llm.generate(PROMPT + [8], draft=4, **options).result()
        assert answer.tokens == expected and answer.metrics.cached_tokens == len(PROMPT)
        assert answer.metrics.accepted_tokens > 0

    with LLM.load(good_head, reuse_prompts=False) as llm:
        expected = llm.generate(PROMPT + [8], draft=0, **options).result().tokens
    with LLM.load(good_head) as llm:
        llm.save_prefix(PROMPT, before)
        assert llm.generate(PROMPT, draft=4, **options).result().metrics.drafted_tokens > 0
        llm.save_prefix(PROMPT, after)
        check(llm, before)
    with LLM.load(good_head) as llm:
        check(llm, after)


def test_draft_model_with_states_goes_back_behind_wrong_guesses(random_head):
    """The draft model is the same model, but does not know the mask: its guesses are right up to where the mask
    excludes them. It then continues from the states before the guesses: to read the context again would take several
    calls.
    """
    path = random_head / "model.pte"
    vocabulary = LLM.load(path).program.vocab_size
    odd = allow_only(vocabulary, range(1, vocabulary, 2))

    def answer(guesses, **load):
        with LLM.load(path, chunk=8, **load) as llm:
            mask = {"allowed_tokens": lambda answer: odd if len(answer) % 3 == 2 else None}
            return llm.generate(PROMPT, max_new_tokens=40, ignore_eos=True, draft=guesses, **mask).result()

    expected, drafted = answer(0), answer(3, draft=path)
    assert drafted.tokens == expected.tokens
    assert drafted.metrics.accepted_tokens == drafted.metrics.drafted_tokens > 20
