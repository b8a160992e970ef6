"""lm-eval runs tasks from local files on an exported model."""

import json

import pytest
import small_llm
from executorch_mlx.llm import LLM

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'executorch-mlx[lm-eval]'")
from lm_eval.tasks import TaskManager  # noqa: E402

DOCUMENTS = [
    {"question": "Return the", "choices": ["value", "name of", "number"], "answer": 1},
    {"question": "This class", "choices": ["is", "has a", "None"], "answer": 0},
    {"question": "", "choices": ["Return", "a", "b"], "answer": 0},
]


@pytest.fixture(scope="module")
def model(chat_program):
    from executorch_mlx.llm.lm_eval import LMEvalModel

    return LMEvalModel(chat_program, max_gen_toks=7)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "test.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}


def evaluate(model, task: dict) -> tuple[dict, list]:
    own = TaskManager(include_defaults=False)  # lm-eval's own tasks are thousands of files
    found = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=own, log_samples=True, bootstrap_iters=0)
    (name,) = found["results"]
    return found["results"][name], found["samples"][name]


def test_answer_that_the_chat_begins_is_continued(model):
    chat = [{"role": "user", "content": "Why"}, {"role": "assistant", "content": "Because"}]
    assert model.apply_chat_template(chat, add_generation_prompt=False) == "Why\nBecause"


def test_multiple_choice(model, data):
    task = data | {
        "task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    results, samples = evaluate(model, task)
    correct = 0
    for document, sample in zip(DOCUMENTS, samples):
        prompt = model.llm.encode(document["question"]) if document["question"] else [small_llm.BOS]
        whole = [model.llm.encode(document["question"] + " " + choice) for choice in document["choices"]]
        scores = [model.llm.score(prompt, [ids[len(prompt) :]])[0] for ids in whole]
        found = [response[0] for response in sample["filtered_resps"]]
        assert found == pytest.approx([score.logprob for score in scores], abs=1e-4)
        correct += max(range(3), key=lambda index: scores[index].logprob) == document["answer"]
    assert results["acc,none"] == pytest.approx(correct / len(DOCUMENTS))


@pytest.mark.parametrize(
    "settings, parameters",
    [
        ({}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.8, "seed": 5}, {"temperature": 0}),
        ({"do_sample": True, "seed": 5}, {"temperature": 1.0, "seed": 5}),
    ],
    ids=["default", "greedy", "sampled"],
)
def test_generation(settings, parameters, model, data):
    task = data | {
        "task": "answers", "output_type": "generate_until", "doc_to_text": "Say {{question}}", "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n"], **settings}, "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    _, samples = evaluate(model, task)
    answers = [
        model.llm.generate("Say " + document["question"], max_new_tokens=7, stop="\n", **parameters).result().text
        for document in DOCUMENTS
    ]
    assert [sample["filtered_resps"] for sample in samples] == [[answer] for answer in answers]


def test_rolling_log_likelihood(model, data):
    task = data | {
        "task": "perplexity", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{choices[0]}} " * 1100, "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    _, samples = evaluate(model, task)
    text = "value " * 1100
    ids = model.llm.encode(text, special=False)
    assert len(ids) > small_llm.CONTEXT
    first, rest = ids[: small_llm.CONTEXT], ids[small_llm.CONTEXT :]
    expected = model.llm.score([small_llm.BOS], [first])[0].logprob
    expected += model.llm.score(ids[-small_llm.CONTEXT - 1 : -len(rest)], [rest])[0].logprob
    assert samples[0]["filtered_resps"][0] == pytest.approx(expected, rel=1e-4)


def test_answer_as_long_as_the_context_is_refused(model, data):
    from lm_eval.api.instance import Instance

    request = Instance("generate_until", {}, ("Return the", {"max_gen_toks": small_llm.CONTEXT}), 0)
    with pytest.raises(ValueError, match=r"max_gen_toks: got 1024, expected less than the context of 1024 tokens"):
        model.generate_until([request])


def test_model_without_a_tokenizer_is_refused(logits_program):
    from executorch_mlx.llm.lm_eval import LMEvalModel

    with pytest.raises(ValueError, match="tokenizer: logits.pte has none, expected a Hugging Face folder"):
        LMEvalModel(LLM.load(logits_program))
