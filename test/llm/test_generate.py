"""`LLM.generate` and `LLM.chat`: tokens, KV cache, end of the answer, tokenizer."""

import gc
import threading
import weakref

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM, SettingError
from executorch_mlx.llm.scoring import allow_only

PROMPT = "Return the value"
LONG = list(range(100, 100 + 3 * small_llm.CHUNK + 5))  # four chunks


@pytest.fixture(scope="module")
def llm(chat_program) -> LLM:
    return LLM.load(chat_program)


def ids(generation) -> list[int]:
    return generation.result().tokens


def greedy(prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    model = small_llm.model()
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def test_tokens_match_transformers(llm):
    assert ids(llm.generate(LONG, max_new_tokens=24, ignore_eos=True)) == greedy(LONG, 24)


def test_each_token_has_its_text(llm):
    generation = llm.generate(PROMPT, max_new_tokens=30)
    tokens = list(generation)
    assert [token.id for token in tokens] == generation.tokens
    assert "".join(token.text for token in tokens) == generation.text == llm.text(generation.tokens)
    assert [token.finish for token in tokens] == [None] * 29 + ["length"] and generation.finish == "length"


def test_text_prompt_equals_its_ids(llm):
    prompt = llm.encode(PROMPT)
    tokens = ids(llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True))
    assert tokens == ids(llm.generate(prompt, max_new_tokens=8, ignore_eos=True)) == greedy(prompt, 8)


# The cache -----------------------------------------------------------------------------


def test_shared_prefix_is_reused(llm):
    first = llm.generate(LONG, max_new_tokens=4).result()
    grown = [*LONG, *first.tokens, 7, 8]
    again = llm.generate(grown, max_new_tokens=4)
    assert ids(again) == greedy(grown, 4)
    # The last token drawn is not in the cache.
    assert again.metrics.cached_tokens == len(LONG) + 3
    shorter = llm.generate(LONG[:20], max_new_tokens=4)
    assert ids(shorter) == greedy(LONG[:20], 4)
    assert shorter.metrics.cached_tokens == 19  # the last token of a prompt is always fed
    other = llm.generate([9, *LONG], max_new_tokens=4)
    assert ids(other) == greedy([9, *LONG], 4)
    assert other.metrics.cached_tokens == 0


def test_answers_may_alternate(llm):
    alone = [ids(llm.generate(prompt, max_new_tokens=10)) for prompt in (PROMPT, LONG)]
    one, other = llm.generate(PROMPT, max_new_tokens=10), llm.generate(LONG, max_new_tokens=10)
    for _ in zip(one, other):
        pass
    assert [ids(one), ids(other)] == alone


def test_threads_may_share_a_model(llm):
    prompts = [[n, *LONG] for n in range(2, 6)]
    alone = [ids(llm.generate(prompt, max_new_tokens=10)) for prompt in prompts]
    generations = [llm.generate(prompt, max_new_tokens=10) for prompt in prompts]
    threads = [threading.Thread(target=generation.result) for generation in generations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [generation.tokens for generation in generations] == alone


# The end -------------------------------------------------------------------------------


def test_stop_id_is_not_part_of_the_answer(llm):
    whole = ids(llm.generate(PROMPT, max_new_tokens=20))
    generation = llm.generate(PROMPT, max_new_tokens=20, stop_ids=[whole[7]])
    tokens = list(generation)
    first = whole.index(whole[7])
    assert generation.tokens == whole[:first] and generation.finish == "stop"
    assert tokens[-1].id == whole[7] and tokens[-1].finish == "stop"
    assert generation.text == llm.text(whole[:first])


def test_eos_ends_the_answer_unless_ignored(llm):
    assert llm.eos_ids == {small_llm.EOS}
    bias = {small_llm.EOS: 1000.0}
    (token,) = llm.generate(PROMPT, logit_bias=bias)
    assert (token.id, token.text, token.finish) == (small_llm.EOS, "", "stop")
    ignored = llm.generate(PROMPT, logit_bias=bias, ignore_eos=True, max_new_tokens=3)
    assert ids(ignored) == [small_llm.EOS] * 3


def test_stop_string_is_not_part_of_the_answer(llm):
    text = llm.generate(PROMPT, max_new_tokens=30).result().text
    stop = text[11:17]
    generation = llm.generate(PROMPT, max_new_tokens=30, stop=["never comes", stop])
    assert "".join(token.text for token in generation) == text[: text.index(stop)]
    assert generation.finish == "stop"
    assert ids(llm.generate(PROMPT, max_new_tokens=30, stop=stop)) == generation.tokens


def test_full_context_ends_the_answer(llm):
    generation = llm.generate([5] * (small_llm.CONTEXT - 3), ignore_eos=True)
    assert len(ids(generation)) == 4  # the last token needs no position
    assert generation.finish == "context"


def test_cancel_from_another_thread(llm):
    generation, seen = llm.generate(PROMPT, ignore_eos=True), threading.Event()

    def cancel():
        seen.wait()
        generation.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    for _ in generation:
        seen.set()
    thread.join()
    assert generation.finish == "cancelled"
    assert 1 <= len(generation.tokens) < small_llm.CONTEXT - 10
    assert generation.text == llm.text(generation.tokens)
    assert list(generation) == []


def test_cancel_before_the_first_token(llm):
    generation = llm.generate(LONG)
    generation.cancel()
    assert list(generation) == [] and generation.finish == "cancelled"


def test_callbacks_of_an_engine_share_a_thread_state(llm):
    """Python keeps its state of the engine's thread between callbacks: creating it takes system calls."""
    local, seen = threading.local(), []

    def count(answer):
        local.calls = getattr(local, "calls", 0) + 1
        seen.append(local.calls)

    llm.generate(PROMPT, allowed_tokens=count, max_new_tokens=3, ignore_eos=True).result()
    assert seen == [1, 2, 3]


def test_the_function_for_masks_is_forgotten_at_the_end_of_the_answer(llm):
    """It may hold the states of a grammar, and the answers of a request are kept until the last one ends."""

    class Masks:
        def __call__(self, answer):
            return None

    masks = Masks()
    reference = weakref.ref(masks)
    generation = llm.generate(PROMPT, allowed_tokens=masks, max_new_tokens=2, ignore_eos=True)
    del masks
    assert len(generation.result().tokens) == 2
    assert reference() is None


def test_failed_step_ends_the_answer(llm):
    generation = llm.generate(PROMPT, allowed_tokens=lambda answer: [1.5] if answer else None)
    token = next(generation)
    with pytest.raises(
        SettingError, match=r"allowed_tokens: got float64 of shape \[1\], expected int32 of shape \[48\]"
    ):
        next(generation)
    assert generation.finish == "error" and generation.tokens == [token.id] and list(generation) == []


def test_generation_whose_step_failed_is_collected(llm):
    """The traceback of the exception refers to the generation."""
    generation = llm.generate(PROMPT, allowed_tokens=lambda answer: [1.5])
    reference = weakref.ref(generation)
    with pytest.raises(SettingError):
        generation.result()
    del generation
    gc.collect()
    assert reference() is None


def test_close_ends_the_answer(llm):
    with llm.generate(PROMPT) as generation:
        token = next(generation)
    assert generation.finish == "cancelled" and generation.tokens == [token.id] and list(generation) == []
    assert ids(llm.generate(LONG, max_new_tokens=4)) == greedy(LONG, 4)


@pytest.mark.parametrize("count", [0, small_llm.CONTEXT + 1])
def test_prompt_length_is_checked(llm, count):
    with pytest.raises(ValueError, match=f"prompt: got {count} tokens, expected 1 to {small_llm.CONTEXT}"):
        llm.generate([5] * count)


@pytest.mark.parametrize("token", [-1, small_llm.VOCABULARY])
def test_prompt_ids_are_checked(llm, token):
    with pytest.raises(ValueError, match=f"prompt: id {token} is outside the vocabulary"):
        llm.generate([5, token])


def test_metrics(llm):
    result = llm.generate(LONG, max_new_tokens=5, ignore_eos=True).result()
    metrics = result.metrics
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (len(LONG), 5)
    values = metrics.as_dict()
    queue, prompt = values["queue_seconds"], values["prompt_seconds"]
    assert values["time_to_first_token"] == queue + prompt > prompt > 0
    assert values["generation_tokens_per_second"] == 4 / values["generation_seconds"] > 0
    assert values["peak_resident_bytes"] > values["peak_mlx_bytes"] > 0


# The file ------------------------------------------------------------------------------


def test_without_a_tokenizer(logits_program):
    llm = LLM.load(logits_program)
    result = llm.generate([5, 6], max_new_tokens=3).result()
    assert (result.text, result.tokens) == ("", greedy([5, 6], 3))
    assert not llm.chats
    with pytest.raises(ValueError, match="logits.pte has no tokenizer"):
        llm.generate("text")
    with pytest.raises(ValueError, match="logits.pte has no tokenizer"):
        llm.chat([{"role": "user", "content": "text"}])
    with pytest.raises(ValueError, match="stop: the program has no token bytes"):
        llm.generate([5], stop="x")


def test_tokenizer_from_a_folder(logits_program):
    llm = LLM.load(logits_program, small_llm.DEMO)
    generation = llm.generate(PROMPT, max_new_tokens=10)
    assert ids(generation) == greedy(llm.encode(PROMPT), 10)
    assert generation.text == llm.tokenizer.decode(generation.tokens)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "text"}])


def test_load_errors(tmp_path, logits_program):
    with pytest.raises(FileNotFoundError):
        LLM.load(tmp_path / "none.pte")
    with pytest.raises(ValueError, match="has no tokenizer"):
        LLM.load(logits_program, tmp_path)
    exported = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    from executorch.exir import to_edge_transform_and_lower

    path = tmp_path / "other.pte"
    path.write_bytes(to_edge_transform_and_lower(exported).to_executorch().buffer)
    with pytest.raises(
        ValueError, match="other.pte: got a program with the methods forward, expected a language or speech model"
    ):
        LLM.load(path)


def test_a_damaged_tokenizer_in_the_program_is_an_error(chat_program, tmp_path):
    data = chat_program.read_bytes()
    assert data.count(b'"BPE"') == 1
    path = tmp_path / "damaged.pte"
    path.write_bytes(data.replace(b'"BPE"', b'"XYZ"'))
    with pytest.raises(ValueError, match="tokenizer: cannot read tokenizer.json: Exception"):
        next(LLM.load(path).generate("text"))


# Chats ---------------------------------------------------------------------------------


def test_chat_reuses_the_cache(llm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return"}]
    # The next turn of a chat encodes the text of the answer. Only " the" is allowed, because its text is always encoded
    # as the same id. The text of other tokens may be encoded as other ids.
    answer = llm.chat(messages, allowed_tokens=allow_text(llm, " the"), max_new_tokens=6)
    assert answer.prompt == llm.encode("Be brief.\nReturn\n", special=False)
    assert ids(answer) == llm.encode(" the" * 6, special=False)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "More"}]
    more = llm.chat(messages, max_new_tokens=6)
    assert ids(more) == greedy(more.prompt, 6)
    assert more.metrics.cached_tokens == len(answer.prompt) + 5


def allow_text(llm: LLM, text: str):
    """Return a callback for `allowed_tokens` that allows only the token `text`."""
    (token,) = llm.encode(text, special=False)
    return lambda answer: allow_only(llm.program.vocab_size, [token])


def test_template_may_reject_messages(llm):
    with pytest.raises(ValueError, match="messages: the chat template rejected them: no role robot"):
        llm.chat([{"role": "robot", "content": "text"}])


def test_template_options(llm):
    messages = [{"role": "user", "content": "Return"}]
    hinted = llm.chat(messages, template_options={"hint": "now"})
    assert hinted.prompt == llm.encode("Return\nnow", special=False)
    with pytest.raises(ValueError, match="template_options: messages is reserved"):
        llm.chat(messages, template_options={"messages": []})


def test_chat_continues_its_last_message(llm):
    messages = [{"role": "user", "content": "Why"}, {"role": "assistant", "content": "Return"}]
    answer = llm.chat(messages, continue_final_message=True, max_new_tokens=1)
    assert answer.prompt == llm.encode("Why\nReturn", special=False)
    for content in (None, [{"type": "text", "text": "Return"}]):
        with pytest.raises(ValueError, match="only a last message with text and without tool_calls can be continued"):
            llm.chat([messages[0], messages[1] | {"content": content}], continue_final_message=True)


def test_unknown_and_invalid_arguments(llm):
    with pytest.raises(TypeError, match="temprature: unknown parameter, expected one of temperature, top_p"):
        llm.generate(PROMPT, temprature=1.0)
    with pytest.raises(SettingError, match="max_new_tokens: got 0, expected an integer of at least 1"):
        llm.generate(PROMPT, max_new_tokens=0)
    for prompt in (b"text", 7, None, ["a"], [1.5]):
        with pytest.raises(TypeError, match="^prompt: got .*, expected text or token ids"):
            llm.generate(prompt)
    for messages in ("text", {"role": "user", "content": "text"}):
        with pytest.raises(TypeError, match="^messages: got .*, expected a list"):
            llm.chat(messages)
