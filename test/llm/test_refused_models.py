"""Models and checkpoints that export refuses. Each error names the problem."""

import json
import shutil

import pytest
import small_llm
import torch
import transformers as hf
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.survey import survey
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
)
MODELS = {
    "encoder": (hf.BertLMHeadModel, hf.BertConfig(**SMALL), "BertSelfAttention is not causal"),
    "no attention": (
        hf.RwkvForCausalLM,
        hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
        "RwkvForCausalLM",
    ),
    "other inputs than text": (
        hf.MusicgenForCausalLM,
        hf.MusicgenDecoderConfig(
            vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, num_codebooks=5
        ),
        "MusicgenForCausalLM cannot run over the tokens of a text alone: RuntimeError",
    ),
    "a bias of the scores": (
        hf.InklingForCausalLM,
        hf.InklingTextConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=16,
            d_rel=4,
            rel_extent=8,
            layer_types=["hybrid"],
            mlp_layer_types=["dense"],
            unpadded_vocab_size=64,
        ),
        "InklingAttention: got position_bias for the attention, a tensor, expected a mask that depends on positions",
    ),
    "compressed keys": (
        hf.DeepseekV4ForCausalLM,
        hf.DeepseekV4Config(
            **SMALL,
            num_key_value_heads=1,
            head_dim=16,
            qk_rope_head_dim=8,
            layer_types=["heavily_compressed_attention"],
        ),
        "DeepseekV4ForCausalLM: got layers of kind heavily_compressed_attention",
    ),
    # Its results depend on how a prompt is divided into calls.
    "keys of a call that are not cached": (
        hf.DoryForCausalLM,
        hf.DoryConfig(
            **SMALL | dict(num_hidden_layers=3),
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["full_attention"] * 3,
            n_input_layers=1,
            n_output_layers=1,
            recurrent_kv_cache_mode="last_loop",
        ),
        "DoryAttention of layer 1 attends to keys that it does not write to its cache",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_unsupported_model_is_refused(name):
    model_class, config, message = MODELS[name]
    with pytest.raises(ValueError, match=message):
        export_llm(model_class(config).eval())


class SquaredAttention(GPTNeoSelfAttention):
    def _attn(self, query, key, value, attention_mask=None):
        scores = torch.matmul(query, key.transpose(-1, -2))
        return super()._attn(scores.square() @ query, key, value, attention_mask)


class JoinedAttention(GPTNeoSelfAttention):
    def _attn(self, query, key, value, attention_mask=None):
        return super()._attn(query, torch.cat([key], 2), torch.cat([value], 2), attention_mask)


class ForgetfulAttention(GPTNeoSelfAttention):
    """Divides the result of the n-th call by n."""

    def _attn(self, query, key, value, attention_mask=None):
        out, weights = super()._attn(query, key, value, attention_mask)
        self.calls = getattr(self, "calls", 0) + 1
        return out / self.calls, weights


@pytest.mark.parametrize(
    "attention, message",
    [
        (
            SquaredAttention,
            r"model: GPTNeoAttention of layer 0: got square of the attention scores, expected a scale, a mask",
        ),
        (JoinedAttention, "JoinedAttention cannot run over the KV caches of a program"),
        (ForgetfulAttention, r"GPTNeoForCausalLM \(GPTNeoAttention\) gives other logits over the caches"),
    ],
)
def test_attention_that_a_cache_cannot_do_is_refused(attention, message):
    config = hf.GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = hf.GPTNeoForCausalLM(config).eval()
    model.transformer.h[0].attn.attention.__class__ = attention
    with pytest.raises(ValueError, match=message):
        export_llm(model)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def remove_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(5000)


def break_the_config(folder):
    (folder / "config.json").write_text("{")


def set_a_list_as_quantization(folder):
    set_in_config(folder, quantization=[4, 32])


def set_a_negative_size(folder):
    set_in_config(folder, intermediate_size=-32)


def write_a_number_as_generation_config(folder):
    (folder / "generation_config.json").write_text("1")


def leave_out_a_factor(folder):
    set_in_config(folder, rope_parameters={"rope_type": "linear"})


def set_a_number_as_text(folder):
    set_in_config(folder, hidden_size="32")


def remove_the_weights_of_gptq(folder):
    set_in_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    (folder / "model.safetensors").unlink()


def set_a_padding_id_outside_the_vocabulary(folder):
    set_in_config(folder, pad_token_id=1000)


def set_in_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def set_an_unknown_quantization(folder):
    settings = {"quant_method": "awq", "version": "gemv", "bits": 4, "group_size": 32}
    set_in_config(folder, quantization_config=settings)


def leave_out_the_kind_of_torchao(folder):
    set_in_config(folder, quantization_config={"quant_method": "torchao"})


def store_no_weights_of_torchao(folder):
    kind = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}
    set_in_config(folder, quantization_config={"quant_method": "torchao", "quant_type": kind})


def set_a_version_as_number(folder):
    set_in_config(folder, quantization_config={"quant_method": "awq", "version": 5})


def set_one_size_of_a_block(folder):
    set_in_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128]})


def set_a_list_of_settings(folder):
    set_in_config(folder, quantization_config=["gptq"])


def make_the_config_a_list(folder):
    (folder / "config.json").write_text("[]")


def break_the_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def change_the_tokenizer(folder, **settings):
    shutil.copy(small_llm.DEMO / "tokenizer_config.json", folder)
    tokenizer = json.loads((small_llm.DEMO / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | settings))


def set_a_number_as_truncation(folder):
    change_the_tokenizer(folder, truncation=65)


def set_a_prefix_that_merges_lack(folder):
    model = json.loads((small_llm.DEMO / "tokenizer.json").read_text())["model"]
    change_the_tokenizer(folder, model=model | {"continuing_subword_prefix": "prefix" * 8})


def remove_the_file_of_the_tokens(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))


def name_code_of_the_model(folder):
    set_in_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})


def name_code_of_the_tokenizer(folder):
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# A function that damages the folder of a checkpoint → the error message.
DAMAGES = {
    remove_a_weight: "missing tensors for LlamaForCausalLM: model.layers.0.mlp.up_proj.weight",
    change_a_shape: r"model.layers.0.mlp.up_proj.weight: got \[3, 5\], expected \[32, 32\]",
    truncate: "Error while deserializing header",
    break_the_config: "config.json: invalid JSON: Expecting property name",
    set_a_list_as_quantization: r"config.json: quantization: got \[4, 32\], expected an object",
    set_a_negative_size: "transformers cannot load the checkpoint: .*negative dimension",
    write_a_number_as_generation_config: "transformers cannot load the checkpoint: 'int' object is not a mapping",
    leave_out_a_factor: "model: transformers cannot read config.json: .*Missing required keys",
    set_a_number_as_text: "model: transformers cannot read config.json: .*field 'hidden_size'",
    remove_the_weights_of_gptq: r"model: expected files model\*.safetensors with the tensors",
    set_a_padding_id_outside_the_vocabulary: "transformers cannot load the checkpoint: Padding_idx must be within",
    set_an_unknown_quantization: "got {'quant_method': 'awq', 'version': 'gemv'}, which is not supported; export",
    leave_out_the_kind_of_torchao: "model: config.json: quantization_config.quant_type: got no value, expected {",
    store_no_weights_of_torchao: "model: transformers cannot load the checkpoint: Invalid torchao safetensors metadata",
    set_a_version_as_number: "model: config.json: quantization_config.version: got '5', expected a text",
    set_one_size_of_a_block: r"config.json: quantization_config: got the block size \[128\], expected two integers",
    set_a_list_of_settings: r"config.json: quantization_config: got \['gptq'\], expected an object",
    make_the_config_a_list: r"config.json: got \[\], expected a JSON object",
    break_the_tokenizer: "tokenizer: cannot read the one in .*model",
    set_a_number_as_truncation: "tokenizer: cannot read the one in .*model: Exception.*struct TruncationParams",
    set_a_prefix_that_merges_lack: "tokenizer: cannot read the one in .*model: PanicException",
    remove_the_file_of_the_tokens: "tokenizer: .*model lacks the file of its tokens, such as tokenizer.json",
    name_code_of_the_model: "model: the code of the model is a part of the checkpoint, and is not run; expected",
    name_code_of_the_tokenizer: "tokenizer: cannot read the one in .*model: .*custom code",
    shutil.rmtree: "model: .*model is not a folder or a GGUF file, and the hub did not provide it",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_a_broken_checkpoint_is_refused(folder, damage, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked {question}"))
    damage(folder)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        export_llm(folder)


def test_a_survey_of_a_model_without_a_kv_cache(tmp_path):
    hf.XLNetConfig(d_model=32, n_head=2, n_layer=1, d_inner=32, vocab_size=64).save_pretrained(tmp_path)
    assert "XLNetLMHeadModel" in survey(tmp_path).obstacle


def test_a_survey_names_what_transformers_cannot_read(folder):
    set_a_padding_id_outside_the_vocabulary(folder)
    assert "Padding_idx must be within num_embeddings" in survey(folder).obstacle
    set_a_number_as_text(folder)
    assert "field 'hidden_size'" in survey(folder).obstacle


def test_a_survey_reads_no_weights(folder):
    truncate(folder)
    assert survey(folder).obstacle is None
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="survey: .*config.json"):
        survey(folder)


def test_an_adapter_that_does_not_fit_is_refused(folder, tmp_path):
    wide = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL | {"hidden_size": 64}))
    get_peft_model(wide, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="model: .*wide has an adapter, expected its model, such as .*, with this"):
        export_llm(tmp_path / "wide")
    with pytest.raises(ValueError, match="wide does not fit LlamaForCausalLM: (.|\n)*size mismatch"):
        export_llm(folder, adapter=tmp_path / "wide")
    small = hf.LlamaForCausalLM.from_pretrained(folder)
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(small, prefix).save_pretrained(tmp_path / "prefix")
    with pytest.raises(
        ValueError, match="prefix does not fit LlamaForCausalLM: got kind PREFIX_TUNING, expected one to merge"
    ):
        export_llm(folder, adapter=tmp_path / "prefix")
