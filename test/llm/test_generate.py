"""One answer: where its tokens come from, what it keeps in the cache, and when it ends."""

import threading

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM, SettingError

PROMPT = "Return the value"
LONG = list(range(100, 100 + 3 * small_llm.CHUNK + 5))  # four pieces


@pytest.fixture(scope="module")
def llm(chat_program) -> LLM:
    return LLM.load(chat_program)


def ids(generation) -> list[int]:
    return generation.result().tokens


def greedy(prompt: list[int], count: int) -> list[int]:
    """What transformers goes on with."""
    model = small_llm.model()
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def test_tokens_are_those_of_transformers(llm):
    assert ids(llm.generate(LONG, max_new_tokens=24, ignore_eos=True)) == greedy(LONG, 24)


def test_tokens_come_one_by_one_with_their_text(llm):
    generation = llm.generate(PROMPT, max_new_tokens=30)
    tokens = list(generation)
    assert [token.id for token in tokens] == generation.tokens
    assert "".join(token.text for token in tokens) == generation.text == llm.text(generation.tokens)
    assert [token.finish for token in tokens] == [None] * 29 + ["length"] and generation.finish == "length"


def test_a_text_is_a_prompt_of_its_ids(llm):
    by_ids = llm.generate(llm.encode(PROMPT), max_new_tokens=8)
    assert ids(by_ids) == ids(llm.generate(PROMPT, max_new_tokens=8))


# The cache -----------------------------------------------------------------------------


def test_what_prompts_share_is_not_read_again(llm):
    first = llm.generate(LONG, max_new_tokens=4).result()
    grown = [*LONG, *first.tokens, 7, 8]
    again = llm.generate(grown, max_new_tokens=4)
    assert ids(again) == greedy(grown, 4)
    # The last token drawn was never fed.
    assert again.metrics.cached_tokens == len(LONG) + 3
    shorter = llm.generate(LONG[:20], max_new_tokens=4)
    assert ids(shorter) == greedy(LONG[:20], 4)
    assert shorter.metrics.cached_tokens == 19  # one has to be fed to be drawn from
    other = llm.generate([9, *LONG], max_new_tokens=4)
    assert ids(other) == greedy([9, *LONG], 4)
    assert other.metrics.cached_tokens == 0


def test_answers_may_take_turns(llm):
    alone = [ids(llm.generate(prompt, max_new_tokens=10)) for prompt in (PROMPT, LONG)]
    one, other = llm.generate(PROMPT, max_new_tokens=10), llm.generate(LONG, max_new_tokens=10)
    for _ in zip(one, other):
        pass
    assert [ids(one), ids(other)] == alone


def test_threads_may_take_turns(llm):
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


def test_a_stop_id_is_no_part_of_the_answer(llm):
    whole = ids(llm.generate(PROMPT, max_new_tokens=20))
    generation = llm.generate(PROMPT, max_new_tokens=20, stop_ids=[whole[7]])
    tokens = list(generation)
    first = whole.index(whole[7])
    assert generation.tokens == whole[:first] and generation.finish == "stop"
    assert tokens[-1].id == whole[7] and tokens[-1].finish == "stop"
    assert generation.text == llm.text(whole[:first])


def test_the_models_own_end_counts_unless_it_is_ignored(llm):
    assert llm.eos_ids == {small_llm.EOS}
    bias = {small_llm.EOS: 1000.0}
    assert list(llm.generate(PROMPT, logit_bias=bias))[-1].finish == "stop"
    ignored = llm.generate(PROMPT, logit_bias=bias, ignore_eos=True, max_new_tokens=3)
    assert ids(ignored) == [small_llm.EOS] * 3


def test_a_stop_string_is_cut_off(llm):
    text = llm.generate(PROMPT, max_new_tokens=30).result().text
    stop = text[11:17]
    generation = llm.generate(PROMPT, max_new_tokens=30, stop=["never comes", stop])
    assert "".join(token.text for token in generation) == text[: text.index(stop)]
    assert generation.finish == "stop"
    assert ids(llm.generate(PROMPT, max_new_tokens=30, stop=stop)) == generation.tokens


def test_the_context_ends_an_answer(llm):
    generation = llm.generate([5] * (small_llm.CONTEXT - 3), ignore_eos=True)
    assert len(ids(generation)) == 4  # the last one needs no room
    assert generation.finish == "context"


def test_cancelled_from_another_thread(llm):
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


def test_cancelled_before_it_began(llm):
    generation = llm.generate(LONG)
    generation.cancel()
    assert list(generation) == [] and generation.finish == "cancelled"


def test_closed_halfway(llm):
    with llm.generate(PROMPT) as generation:
        next(generation)
    assert generation.finish == "cancelled" and list(generation) == []
    assert ids(llm.generate(LONG, max_new_tokens=4)) == greedy(LONG, 4)


@pytest.mark.parametrize("count", [0, small_llm.CONTEXT + 1])
def test_the_length_of_a_prompt_is_checked(llm, count):
    with pytest.raises(ValueError, match=f"the prompt has {count} tokens, expected 1 to {small_llm.CONTEXT}"):
        llm.generate([5] * count)


@pytest.mark.parametrize("token", [-1, small_llm.VOCABULARY])
def test_the_ids_of_a_prompt_are_checked(llm, token):
    with pytest.raises(ValueError, match=f"the id {token}, outside the vocabulary"):
        llm.generate([5, token])


def test_metrics(llm):
    result = llm.generate(LONG, max_new_tokens=5, ignore_eos=True).result()
    metrics = result.metrics
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (len(LONG), 5)
    told = metrics.as_dict()
    assert told["time_to_first_token"] > 0 and told["generation_tokens_per_second"] > 0
    assert told["peak_resident_bytes"] > told["peak_mlx_bytes"] > 0


# The file ------------------------------------------------------------------------------


def test_without_a_tokenizer(logits_program):
    llm = LLM.load(logits_program)
    assert llm.generate([5, 6], max_new_tokens=3).result().text == ""
    assert not llm.chats
    with pytest.raises(ValueError, match="logits.pte has no tokenizer"):
        llm.generate("text")
    with pytest.raises(ValueError, match="logits.pte has no tokenizer"):
        llm.chat([{"role": "user", "content": "text"}])
    with pytest.raises(ValueError, match="no text to stop at"):
        llm.generate([5], stop="x")


def test_a_tokenizer_from_a_folder(logits_program):
    llm = LLM.load(logits_program, small_llm.DEMO)
    generation = llm.generate(PROMPT, max_new_tokens=10)
    assert ids(generation) == greedy(llm.encode(PROMPT), 10)
    assert generation.text == llm.tokenizer.decode(generation.tokens)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "text"}])


def test_no_language_model(tmp_path, logits_program):
    with pytest.raises(FileNotFoundError):
        LLM.load(tmp_path / "none.pte")
    with pytest.raises(ValueError, match="has no tokenizer"):
        LLM.load(logits_program, tmp_path)
    torch_module = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
    from executorch.exir import to_edge_transform_and_lower

    path = tmp_path / "other.pte"
    path.write_bytes(to_edge_transform_and_lower(torch_module).to_executorch().buffer)
    with pytest.raises(ValueError, match="is no language model: its methods are forward"):
        LLM.load(path)


# Chats ---------------------------------------------------------------------------------


def test_a_chat_grows_in_the_cache(llm):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Return"}]
    # Forced to be text that is tokenized as it was drawn, which random weights would not give.
    answer = llm.chat(messages, allowed_tokens=only(llm, " the"), max_new_tokens=6)
    assert answer.prompt == llm.encode("Be brief.\nReturn\n", special=False)
    assert ids(answer) == llm.encode(" the" * 6, special=False)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "More"}]
    more = llm.chat(messages, max_new_tokens=6)
    assert ids(more) == greedy(more.prompt, 6)
    assert more.metrics.cached_tokens == len(answer.prompt) + 5


def only(llm: LLM, text: str):
    from executorch_mlx.llm.classify import mask_of

    (token,) = llm.encode(text, special=False)
    return lambda answer: mask_of(llm.program, [token])[0]


def test_the_template_may_refuse(llm):
    with pytest.raises(ValueError, match="the chat template refuses them: no role robot"):
        llm.chat([{"role": "robot", "content": "text"}])


def test_variables_of_the_template(llm):
    messages = [{"role": "user", "content": "Return"}]
    hinted = llm.chat(messages, template_options={"hint": "now"})
    assert hinted.prompt == llm.encode("Return\nnow", special=False)
    with pytest.raises(ValueError, match="tokenize is no variable of a template"):
        llm.chat(messages, template_options={"tokenize": True})


def test_an_unknown_setting_is_no_setting(llm):
    with pytest.raises(TypeError, match="temprature is no setting; there are temperature"):
        llm.generate(PROMPT, temprature=1.0)
    with pytest.raises(SettingError, match="max_new_tokens is 0, expected at least 1"):
        llm.generate(PROMPT, max_new_tokens=0)
