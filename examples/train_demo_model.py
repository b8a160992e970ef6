"""Train the demo language model on the docstrings of Python's standard library.

    python examples/train_demo_model.py --output examples/demo_model

The corpus comes from the Python that runs the script, so nothing is downloaded. A Llama of about a
million parameters trains on it on one CPU core and is saved as a Hugging Face folder. The result is
reproducible for the same seed, one thread and the same versions of Python and torch.
"""

import argparse
import ast
import hashlib
import math
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
PROMPTS = ("", "Return the", "This class", "Create a new")  # for the samples in the model card

# Some distributions of Python lack the tests, and site-packages is not part of the standard library.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


# --- The corpus ----------------------------------------------------------------------------------


def docstrings(stdlib: Path) -> Iterator[str]:
    """Yield every docstring below `stdlib`, file by file in sorted order, indentation removed."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted(stdlib.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(stdlib).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old modules
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # lib2to3 ships Python 2 sources as data
            continue
        for node in ast.walk(tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text


def prose(docstring: str) -> str:
    """Return the paragraphs of English text: no doctests, tables, grammars or usage listings."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", docstring.expandtabs()):
        paragraph = "\n".join(line.rstrip() for line in paragraph.splitlines()).strip("\n")
        wordlike = sum(c.isalpha() or c in " \n" for c in paragraph)
        if ">>>" not in paragraph and "---" not in paragraph and wordlike >= 0.85 * len(paragraph):
            kept.append(paragraph)
    return "\n\n".join(kept).strip()


def read_corpus(stdlib: Path) -> list[str]:
    """Return the distinct documents in ASCII with at least three words, in the order of the files."""
    texts = (prose(text) for text in docstrings(stdlib))
    return list(dict.fromkeys(t for t in texts if t.isascii() and len(t.split()) >= 3))


def is_held_out(document: str) -> bool:
    """Whether a document belongs to the validation set: about one in twenty, chosen by a hash of the content."""
    return hashlib.sha256(document.encode()).digest()[0] % 20 == 0


# --- The tokenizer -------------------------------------------------------------------------------


def train_tokenizer(documents: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which can encode any text without loss.

    Encoding adds BOS in front, but no EOS.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[torch.Tensor]:
    """Return one int64 vector per document: BOS, the text, EOS."""
    encoded = tokenizer(documents, verbose=False)["input_ids"]  # no warning about texts longer than the context
    return [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in encoded]


# --- Training ------------------------------------------------------------------------------------


def windows(documents: list[torch.Tensor], length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield `[length]` int64 windows without end. In each epoch, the documents are shuffled and then concatenated."""
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        stream = torch.cat([documents[i] for i in order])
        offset = int(torch.randint(length, (), generator=generator))
        yield from stream[offset:].split(length)[:-1]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """The learning rate of a step: linear warm-up over 5 % of the steps, then cosine decay to zero."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def new_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=args.context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    )


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices, but not for norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(model: LlamaForCausalLM, documents: list[torch.Tensor], args: argparse.Namespace) -> float:
    """Train in place and return the mean loss of the last tenth of the steps, in nats per token."""
    generator = torch.Generator().manual_seed(args.seed)
    batches = windows(documents, args.context, generator)
    optimizer = new_optimizer(model)
    losses: list[float] = []
    model.train()
    progress = tqdm(range(args.steps), desc="train", unit="step")
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        batch = torch.stack([next(batches) for _ in range(args.batch)])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            progress.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}")
    last = losses[-max(1, args.steps // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, documents: list[torch.Tensor]) -> float:
    """Return the mean loss in nats per token, with each document on its own, as in generation."""
    model.eval()
    context = model.config.max_position_embeddings
    total, count = 0.0, 0
    for document in tqdm(documents, desc="validate", unit="doc", leave=False):
        document = document[:context].unsqueeze(0)
        predicted = document.shape[1] - 1
        total += model(input_ids=document, labels=document, use_cache=False).loss.item() * predicted
        count += predicted
    return total / count


# --- The folder ----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Measurements of a run, for the model card."""

    parameters: int
    documents: int
    characters: int
    tokens: int
    corpus_digest: str
    train_loss: float
    validation_loss: float
    samples: str


MODEL_CARD = """\
# Demo model

A Llama of {parameters:,} parameters that imitates docstrings and can do nothing else. `make demo` and
the tests use it as a real language model with a real tokenizer that needs no download.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {layers} layers, hidden {hidden}, FFN {ffn}, {heads} query heads on {kv_heads} key/value heads, head size {head_dim}, tied embeddings |
| positions | RoPE, theta {theta:g}, context {context} |
| tokenizer | byte-level BPE, {vocab:,} tokens; `{bos}` ({bos_id}) begins a document, `{eos}` ({eos_id}) ends it |
| weights | float16 safetensors |
| corpus | {documents:,} docstrings, {characters:,} characters, {tokens:,} tokens for training (sha256 `{corpus_digest}`) |
| training | {steps:,} steps of {batch} × {context} tokens, AdamW, peak learning rate {learning_rate:g}, seed {seed} |
| loss | {train_loss:.3f} training, {validation_loss:.3f} held-out, in nats per token |

This command made it with Python {python} and torch {torch_version}, and prints the losses. One document in
twenty is held out; the held-out loss is that of the saved float16 weights:

    python examples/train_demo_model.py {flags} --output examples/demo_model

Its answers at temperature 0.8, top-k 40, top-p 0.9, at most 160 new tokens (`>` marks the prompt):

```
{samples}
```

## Licence

Trained on the docstrings of CPython's standard library, which are licensed under the
[PSF License Agreement](https://docs.python.org/3/license.html), © Python Software Foundation.
"""  # noqa: E501


def write_model_card(folder: Path, model: LlamaForCausalLM, outcome: Outcome, args: argparse.Namespace) -> None:
    config = model.config
    flags = ("steps", "seed", "batch", "context", "vocab_size", "learning_rate")
    card = MODEL_CARD.format(
        **outcome._asdict(),
        **{name: getattr(args, name) for name in ("steps", "seed", "batch", "context", "learning_rate")},
        flags=" ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in flags),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        vocab=config.vocab_size,
        bos=BOS,
        bos_id=config.bos_token_id,
        eos=EOS,
        eos_id=config.eos_token_id,
        python=platform.python_version(),
        torch_version=torch.__version__,
    )
    (folder / "README.md").write_text(card)


def generate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """Generate one document with temperature 0.8, top-k 40 and top-p 0.9."""
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, do_sample=True, temperature=0.8, top_k=40, top_p=0.9, max_new_tokens=160)
    return tokenizer.decode(out[0], skip_special_tokens=True)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--steps", type=int, default=2600, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the documents")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more than one may change the result slightly"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--context", type=int, default=512, help="tokens per window, and the context of the model")
    parser.add_argument("--vocab-size", type=int, default=1536, help="size of the vocabulary")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak learning rate")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise the tokenizer uses more threads than --threads
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)

    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    training = [d for d in corpus if not is_held_out(d)]
    held_out = [d for d in corpus if is_held_out(d)]
    tokenizer = train_tokenizer(training, args.vocab_size, args.context)
    training_ids, held_out_ids = encode(tokenizer, training), encode(tokenizer, held_out)
    tokens = sum(map(len, training_ids))
    model = new_model(args, tokenizer)
    print(
        f"corpus: {len(corpus):,} documents, {tokens:,} training tokens; model: {model.num_parameters():,} parameters"
    )

    train_loss = train(model, training_ids, args)

    args.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.float16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    # Evaluate the saved model: saving rounds the weights to float16.
    model = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(args.output, local_files_only=True)
    validation_loss = evaluate(model, held_out_ids)
    samples = "\n\n".join(f"> {prompt}\n{generate(model, tokenizer, prompt, args.seed)}" for prompt in PROMPTS)
    outcome = Outcome(
        parameters=model.num_parameters(),
        documents=len(corpus),
        characters=sum(map(len, corpus)),
        tokens=tokens,
        corpus_digest=hashlib.sha256("\0".join(corpus).encode()).hexdigest()[:16],
        train_loss=train_loss,
        validation_loss=validation_loss,
        samples=samples,
    )
    write_model_card(args.output, model, outcome, args)
    print(samples)
    print(f"loss: {train_loss:.3f} training, {validation_loss:.3f} held-out, in nats per token")
    print(f"wrote {args.output}: {folder_size(args.output):,} bytes")


if __name__ == "__main__":
    main()
