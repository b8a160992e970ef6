"""Exported encoders against transformers."""

import numpy as np
import pytest
import small_encoder
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.encoders import Encoder, NotAnEncoder, encode
from executorch_mlx.encoders.batches import batches
from executorch_mlx.encoders.export import export_encoder, find_encoder
from executorch_mlx.encoders.export.judges import _AFTER, _BEFORE, _BETWEEN
from executorch_mlx.llm.errors import FieldError
from small_encoder import LONGEST, PROMPT, TEXTS

# How a family is pooled: the modes, whether a dense layer follows, and whether the vectors are normalized.
POOLING = {
    "bert": (("mean",), False, True),
    "roberta": (("cls",), False, True),
    "xlm_roberta": (("mean",), False, True),
    "mpnet": (("mean",), False, True),
    "modernbert": (("cls", "mean"), False, True),
    "gemma3": (("mean",), True, True),
    "qwen3": (("lasttoken",), False, True),
    "nomic_bert": (("max", "mean_sqrt_len_tokens"), True, False),
    "deberta_v2": (("weightedmean",), False, True),
    "t5": (("mean",), False, False),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder of a small BERT, and its program."""
    folder = small_encoder.save_sentence_transformer(tmp_path_factory.mktemp("bert") / "model")
    export_encoder(folder).save(folder / "bert.pte")
    return folder


@pytest.fixture(scope="module")
def encoder(bert):
    with Encoder(bert / "bert.pte") as loaded:
        yield loaded


@pytest.mark.parametrize("family", POOLING)
def test_embeddings_equal_transformers(family, tmp_path):
    modes, dense, normalize = POOLING[family]
    folder = small_encoder.save_sentence_transformer(tmp_path / "model", family, modes, dense, normalize)
    exported = export_encoder(folder)
    assert not exported.report.refused
    exported.save(tmp_path / "model.pte")
    with Encoder(tmp_path / "model.pte") as encoder:
        found = encoder.encode(TEXTS)
        alone = np.stack([encoder.encode(text) for text in TEXTS])
    expected = small_encoder.expected(folder, TEXTS, modes, dense, normalize).numpy()
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5
    assert (found == alone).all()  # an embedding does not depend on the texts beside it


def test_plain_checkpoint_is_pooled_by_the_mean(tmp_path):
    folder = small_encoder.save(tmp_path / "model")
    export_encoder(folder, max_context_len=12).save(tmp_path / "model.pte")
    found = encode(tmp_path / "model.pte", TEXTS[:2])
    expected = small_encoder.expected(folder, TEXTS[:2], ("mean",), False, False).numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_prompts_sizes_and_token_ids(encoder):
    assert (encoder.encode("cat", prompt_name="query") == encoder.encode(PROMPT + "cat")).all()
    assert (encoder.encode("cat", prompt="the ") == encoder.encode("the cat")).all()
    whole, cut = encoder.encode("the cat"), encoder.encode("the cat", dimensions=8)
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]))
    assert (encoder.encode("the cat", dimensions=8, normalize=False) == whole[:8]).all()
    (ids,) = encoder.tokens(["the cat"])
    assert (encoder.encode([ids, "a"])[0] == whole).all()
    assert len(encoder.tokens(["cat " * 99])[0]) == LONGEST
    assert encoder.encode([]).shape == (0, 32)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"texts": "a", "prompt_name": "passage"}, "prompt_name: got 'passage', expected query"),
        ({"texts": "a", "dimensions": 33}, "dimensions: got 33, expected 1 to 32"),
        ({"texts": [[1] * 41]}, "texts: got 41 token ids, expected 1 to 40"),
        ({"texts": [[1, 99]]}, "texts: got the token id 99, expected ids in"),
        ({"images": "cat.png"}, "images: got pictures, expected texts"),
        ({}, "texts: got both or neither"),
        ({"texts": ["\ud800"]}, "text: character 0 is a lone surrogate"),
    ],
)
def test_wrong_arguments(encoder, arguments, message):
    with pytest.raises(ValueError) as error:
        encoder.encode(**arguments)
    assert str(error.value).startswith(message)


def test_running_needs_no_torch(bert):
    import subprocess
    import sys

    code = f"""import sys
from executorch_mlx import encode
print(encode({str(bert / "bert.pte")!r}, ["the cat"]).shape)
print([name for name in ("torch", "transformers") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["(1, 32)", "[]"], done.stderr


def test_batches_have_little_padding():
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 300, 1000).tolist()
    calls = batches(lengths, max_rows=64, max_tokens=2048)
    assert sorted(index for call in calls for index in call) == list(range(1000))
    sizes = [(len(call), max(lengths[index] for index in call)) for call in calls]
    assert all(rows <= 64 and (rows == 1 or rows * longest <= 2048) for rows, longest in sizes)
    assert sum(rows * longest for rows, longest in sizes) < 1.1 * sum(lengths)
    assert batches([], 4) == [] and batches([5, 500], 4) == [[1], [0]]


def test_other_programs_are_refused(chat_program):
    with pytest.raises(NotAnEncoder, match="expected an encoder"):
        Encoder(chat_program)
    with pytest.raises(FileNotFoundError):
        Encoder("missing.pte")


def test_reranker_and_classifier(tmp_path):
    import transformers

    pairs = [("cat", "the cat sat on the mat"), ("cat", "dog"), ("the mat " * 30, "cat " * 30)]
    for family, labels in (("bert", 1), ("xlm_roberta", 3)):
        folder = small_encoder.save(tmp_path / family, family, labels)
        export_encoder(folder).save(tmp_path / f"{family}.pte")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()

        def logits(*texts):
            with torch.no_grad():
                return model(**tokenizer(*texts, truncation=True, max_length=LONGEST, return_tensors="pt")).logits[0]

        with Encoder(tmp_path / f"{family}.pte") as encoder:
            if labels == 1:
                expected = torch.stack([logits(*pair) for pair in pairs])[:, 0]
                assert np.abs(encoder.scores(pairs, raw=True) - expected.numpy()).max() < 1e-5
                assert np.abs(encoder.scores(pairs) - expected.sigmoid().numpy()).max() < 1e-5
                ranked = encoder.rerank("cat", ["dog", "the cat sat on the mat"], top_n=1)
                assert len(ranked) == 1 and ranked[0].score == encoder.scores(pairs[:2]).max()
                with pytest.raises(FieldError, match="expected an encoder"):
                    encoder.encode("cat")
            else:
                (found,) = encoder.classify(["the cat"])
                expected = logits("the cat").softmax(-1)
                assert [*found.values()] == sorted(found.values(), reverse=True)
                assert all(abs(found[f"LABEL_{i}"] - float(expected[i])) < 1e-6 for i in range(3))


PAIR_TEMPLATE = """\
{% for m in messages if m.role in ('query', 'document') %}{{ '[CLS]' + m.role + ': ' + m.content }}{% endfor %}[SEP]"""


@pytest.mark.parametrize("form", ["yes and no", "a token", "a head"])
def test_language_models_rerank(form, tmp_path):
    """Qwen3-Reranker itself, and forms of sentence-transformers with a chat template for pairs."""
    import transformers

    torch.manual_seed(0)
    settings = small_encoder.config("qwen3")
    settings.num_labels, settings.max_position_embeddings = 1, 1024
    kinds = {"a head": transformers.AutoModelForSequenceClassification}
    kinds.get(form, transformers.AutoModelForCausalLM).from_config(settings).save_pretrained(tmp_path)
    small_encoder.save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    yes, no = map(tokenizer.convert_tokens_to_ids, ["yes", "no"])
    if form != "yes and no":
        (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
        parts = [("", "Transformer"), *[("1_LogitScore", "LogitScore")] * (form == "a token")]
        entries = [{"path": path, "type": f"sentence_transformers.base.modules.{kind}"} for path, kind in parts]
        small_encoder.write(tmp_path / "modules.json", entries)
        small_encoder.write(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": yes, "false_token_id": None})
    model = kinds.get(form, transformers.AutoModelForCausalLM).from_pretrained(tmp_path).eval()

    def score(query: str, document: str) -> float:
        text = f"[CLS]query: {query}[CLS]document: {document}[SEP]"
        if form == "yes and no":
            text = f"{_BEFORE}{query}{_BETWEEN}{document}{_AFTER}"
        with torch.no_grad():
            logits = model(input_ids=tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids).logits
        if form == "a head":
            return float(logits[0, 0])
        return float(logits[0, -1, yes] - (logits[0, -1, no] if form == "yes and no" else 0))

    if form == "yes and no":
        with pytest.raises(ValueError, match="expected an encoder"):
            export_encoder(tmp_path)
        arguments = ["--rerank", "--max-context-len", "1024", "-o", str(tmp_path / "a.pte")]
        assert main(["export", str(tmp_path), *arguments]) == 0
    else:
        export_encoder(tmp_path, max_context_len=1024).save(tmp_path / "a.pte")
    pairs = [("cat", "the cat sat on the mat"), ("cat", "dog"), ("a b", "the mat")]
    with Encoder(tmp_path / "a.pte") as encoder:
        expected = np.array([score(*pair) for pair in pairs])
        assert np.abs(encoder.scores(pairs, raw=True) - expected).max() < 1e-4
        assert np.abs(encoder.scores(pairs) - 1 / (1 + np.exp(-expected))).max() < 1e-4
        ids, _ = encoder.pair_ids([("cat", "dog " * 600), ("cat", "[SEP]")])
        assert len(ids[0]) == encoder.config.max_length
        assert ids[0][-1] == encoder.pair_ids(pairs)[0][0][-1]  # the end of the text stays
        assert ids[1].count(small_encoder.SEP) == ids[0].count(small_encoder.SEP)


def test_kinds_of_checkpoints(tmp_path):
    for name, architectures, model_type, task in (
        ("mlm", ["BertForMaskedLM"], "bert", "embed"),
        ("ranker", ["XLMRobertaForSequenceClassification"], "xlm-roberta", "rerank"),
        ("causal", ["Qwen3ForCausalLM"], "qwen3", None),
        ("bare", ["Qwen3Model"], "qwen3", None),
        ("speech", ["WhisperForConditionalGeneration"], "whisper", None),
        ("clip", ["CLIPModel"], "clip", "embed"),
    ):
        config = {"architectures": architectures, "model_type": model_type, "id2label": {"0": "x"}}
        small_encoder.write(tmp_path / name / "config.json", config)
        found = find_encoder(tmp_path / name)
        assert (found.task if found else None) == task, name


def test_unknown_parts_are_refused(tmp_path):
    folder = small_encoder.save_sentence_transformer(tmp_path / "model")
    entries = [{"path": "", "type": "x.Transformer"}, {"path": "1", "type": "x.LSTM"}]
    small_encoder.write(folder / "modules.json", entries)
    with pytest.raises(ValueError, match="got the part LSTM, expected one of Pooling"):
        export_encoder(folder)
