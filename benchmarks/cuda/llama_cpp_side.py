"""Measures llama.cpp on a shape. run.py runs this file in a process of its own. Prints JSON: measurement → tokens/s.

    python llama_cpp_side.py SHAPE [ROWS]

The folder of the bundle has the sources in llama.cpp, which this file compiles first: about four minutes with 16 cores.
The weights are random: in BF16, in Q4_0 for a shape with the suffix -int4, whose embedding and output projection are in
Q8_0, or in Q8_0 for -int8. llama-bench decodes without a sampler. With ROWS, llama-batched-bench runs as many requests
at once, each with a prompt of 128 tokens and 128 new tokens. All runs use "flash attention".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from shapes import SHAPES, bits_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES, BUILD = ROOT / "llama.cpp", ROOT / "llama.cpp/build"
TOOLS = ("llama-bench", "llama-batched-bench")
CONTEXTS, PREFILLS, STEPS, REPEATS = (128, 2048), (512, 2048), 100, 6
PROMPT, ANSWER = 128, 128  # of each of several requests
OPTIONS = ("-fa", "on", "-ngl", "99", "-b", "2048", "-ub", "2048")
sys.path.insert(0, str(SOURCES / "gguf-py"))


def build(*options: str) -> None:
    """Compile the two benchmarks of llama.cpp, for the GPU of this machine."""
    if all((BUILD / "bin" / tool).exists() for tool in TOOLS):
        return
    settings = ("GGML_CUDA=ON", "GGML_NATIVE=ON", "CMAKE_CUDA_ARCHITECTURES=native", "CMAKE_BUILD_TYPE=Release")
    settings += (
        "LLAMA_OPENSSL=OFF",
        "LLAMA_BUILD_TESTS=OFF",
        "LLAMA_BUILD_EXAMPLES=OFF",
        "LLAMA_BUILD_SERVER=OFF",
        "LLAMA_BUILD_APP=OFF",
    )
    configure = ["cmake", "-S", SOURCES, "-B", BUILD, "-G", "Ninja", *(f"-D{s}" for s in (*settings, *options))]
    for command in (configure, ["cmake", "--build", BUILD, "--target", *TOOLS]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"llama.cpp: {' '.join(map(str, command))} failed\n{done.stdout[-3000:]}{done.stderr[-1500:]}"
            )


def write_model(shape: str) -> Path:
    """Write a GGUF file with random weights, unless it is there. Return its path."""
    from gguf import GGMLQuantizationType as Type
    from gguf import GGUFWriter, quants

    path = SOURCES / f"{shape}.gguf"
    if path.exists():
        return path
    config = SHAPES[shape]
    architecture = config["model_type"]
    writer = GGUFWriter(path, architecture)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(vocabulary)])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([1] * vocabulary)
    matrices = {4: Type.Q4_0, 8: Type.Q8_0, 16: Type.BF16}[bits_of(shape)]
    ends = Type.BF16 if bits_of(shape) == 16 else Type.Q8_0
    columns_of = {}  # rows of random numbers, by type and number of columns
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, type: Type) -> None:
        if (type, columns) not in columns_of:
            block = 0.02 * rng.standard_normal((256, columns), dtype=np.float32)
            columns_of[type, columns] = quants.quantize(block, type)
        block = columns_of[type, columns]
        data = np.tile(block, (-(-rows // len(block)), 1))[:rows]
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocabulary, hidden, ends)
    norm("output_norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("output", vocabulary, hidden, ends)
    for layer in (f"blk.{i}" for i in range(layers)):
        norm(f"{layer}.attn_norm", hidden)
        norm(f"{layer}.ffn_norm", hidden)
        if architecture == "qwen3":
            norm(f"{layer}.attn_q_norm", head)
            norm(f"{layer}.attn_k_norm", head)
        matrix(f"{layer}.attn_q", heads * head, hidden, matrices)
        matrix(f"{layer}.attn_k", key_heads * head, hidden, matrices)
        matrix(f"{layer}.attn_v", key_heads * head, hidden, matrices)
        matrix(f"{layer}.attn_output", hidden, heads * head, matrices)
        matrix(f"{layer}.ffn_gate", inner, hidden, matrices)
        matrix(f"{layer}.ffn_up", inner, hidden, matrices)
        matrix(f"{layer}.ffn_down", hidden, inner, matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(tool: str, model: Path, *arguments: object) -> list[dict]:
    """Return the lines of JSON that the tool prints."""
    command = [BUILD / "bin" / tool, "-m", model, *OPTIONS, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool} failed\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def one_request(model: Path) -> dict[str, float]:
    """Return the best of six runs, as the other sides do."""
    prefills = ("-p", ",".join(map(str, PREFILLS)), "-n", 0)
    decodes = ("-p", 0, "-n", STEPS, "-d", ",".join(map(str, CONTEXTS)))
    result = {}
    for arguments in (prefills, decodes):
        for line in run("llama-bench", model, "-r", REPEATS, "-o", "jsonl", *arguments):
            name = f"prefill {line['n_prompt']}" if line["n_prompt"] else f"decode at {line['n_depth']}, greedy"
            result[name] = max(line["samples_ts"])
    return result


def several_requests(model: Path, rows: int) -> dict[str, float]:
    """Return the tokens per second from the beginning of the prompts, the best of three runs."""
    context = 2 * rows * (PROMPT + ANSWER)
    arguments = ("-c", context, "-npp", PROMPT, "-ntg", ANSWER, "-npl", rows, "--output-format", "jsonl")
    times = [line["t"] for _ in range(3) for line in run("llama-batched-bench", model, *arguments)]
    return {"greedy": rows * ANSWER / min(times)}


def main() -> None:
    build()
    model = write_model(sys.argv[1])
    print(json.dumps(several_requests(model, int(sys.argv[2])) if sys.argv[2:] else one_request(model)))


if __name__ == "__main__":
    main()
