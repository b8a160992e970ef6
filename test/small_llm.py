"""A language model that exports in seconds: one layer, random weights, the tokenizer of the demo model."""

import fcntl
from pathlib import Path

import torch

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
VOCABULARY = 1536
CONTEXT = 1024
CHUNK = 16
BOS, EOS = 0, 1

# A chat template: each message is one line, and the answer follows as the next line. `hint` is a template option.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}
{{- raise_exception("no role " + message.role) -}}
{%- endif -%}
{{- message.content + "\n" -}}
{%- endfor -%}
{{- hint -}}"""


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # large enough for distinct logits
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def tokenizer(template: str | None = TEMPLATE):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(DEMO)
    loaded.chat_template = template
    return loaded


def export(path: Path, **options) -> Path:
    """Export the model to `path` with the options of `export_llm`."""
    from executorch_mlx.llm.export import export_llm

    # "verify" is the check of the finished program, which test_check.py tests. "speculation" adds the method `verify`,
    # whose export takes as long as that of all other methods together.
    options = {"tokenizer": tokenizer(), "chunk": CHUNK, "verify": False, "speculation": False} | options
    export_llm(model(), **options).save(path)
    return path


def shared(tmp_path_factory, name: str, **options) -> Path:
    """Like `export`, but to a file that all test processes share. The first process writes the file."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    path = folder / f"{name}.pte"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            export(path.with_suffix(".tmp"), **options).rename(path)
    return path
