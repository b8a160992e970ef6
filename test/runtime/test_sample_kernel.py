"""The source code of the GPU sampler, compiled as C++ and run on the CPU, against mlx::sample in eager torch."""

import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from compile_cpp import compile_cpp
from executorch_mlx.custom_kernel_ops.sample import sample
from sampling_logits import logits_of

RUNTIME = Path(__file__).parents[2] / "backends/mlx/runtime"
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ALL_PER_ROW = 31  # the bits of all five parameters: see Header in run_sampling_kernel.cpp
# temperature, top_p, top_k, min_p
SETTINGS = {
    "greedy": (0.0, 0.5, 3, 0.1),
    "temperature": (0.8, 1.0, 0, 0.0),
    "top_p": (0.9, 0.9, 0, 0.0),
    "top_k": (1.3, 1.0, 40, 0.0),
    "min_p": (1.0, 1.0, 0, 0.05),
    "top_k, top_p": (1.0, 0.95, 300, 0.0),
    "top_p, min_p": (0.7, 0.8, 0, 0.1),
    "all": (1.0, 0.9, 40, 0.05),
}


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """A function that draws the tokens of requests with the source code of the GPU kernels.

    A request is (logits, parameters, is_shared). With `is_shared`, all rows use the first element of each parameter.
    """
    program = tmp_path_factory.mktemp("sample") / "run_sampling_kernel"
    source = Path(__file__).with_name("run_sampling_kernel.cpp")
    compile_cpp(program, "-O1", "-ffp-contract=off", "-pthread", f"-I{RUNTIME}", source)

    def run(requests, threads=4, shared_keys=64):
        stream = b""
        for logits, parameters, is_shared in requests:
            header = [TYPES[logits.dtype], *logits.shape, 0 if is_shared else ALL_PER_ROW, threads, shared_keys]
            stream += torch.tensor(header, dtype=torch.int32).numpy().tobytes()
            stream += logits.contiguous().view(torch.uint8).numpy().tobytes()
            for name in ("temperature", "top_p", "min_p", "seed", "top_k"):
                stream += parameters[name].expand(len(logits)).contiguous().numpy().tobytes()
        drawn = subprocess.run([program], input=stream, stdout=subprocess.PIPE, check=True).stdout
        return torch.frombuffer(bytearray(drawn), dtype=torch.int64).split([len(r[0]) for r in requests])

    return run


def parameters_of(setting, seed):
    temperature, top_p, top_k, min_p = SETTINGS[setting]
    values = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    return {n: torch.tensor(v) for n, v in values.items()} | {"seed": torch.tensor(seed), "top_k": torch.tensor(top_k)}


def check(draw, requests, **options):
    for (logits, parameters, _), tokens in zip(requests, draw(requests, **options), strict=True):
        assert tokens.equal(sample(logits, **parameters)), (logits.shape, logits.dtype, parameters)


@pytest.mark.parametrize("shape", [(1, 1000), (2, 777), (1, 9000)])
def test_kernel_draws_the_tokens_of_eager_torch(draw, shape):
    cases = itertools.product(SETTINGS, TYPES, ("text", "flat", "ties"))
    check(
        draw,
        [
            (logits_of(kind, *shape, seed).to(dtype), parameters_of(setting, seed), True)
            for seed, (setting, dtype, kind) in enumerate(cases)
        ],
    )


def test_kernel_draws_each_row_with_its_own_parameters(draw):
    rows = [parameters_of(setting, seed) for seed, setting in enumerate(SETTINGS)]
    parameters = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    check(draw, [(logits_of(kind, len(rows), 3000), parameters, False) for kind in ("text", "flat", "ties")])


def test_kernel_with_special_logits(draw):
    special = []
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = logits_of("text", 1, 1000)
        logits[0, [3, 300, 700]] = value
        special += [logits, torch.full((1, 600), value), torch.tensor([[value]])]
    mixed = logits_of("text", 1, 1000)
    mixed[0, 5], mixed[0, 4], mixed[0, 400] = torch.nan, torch.finfo(torch.float32).max, torch.inf
    signed = torch.zeros(1, 700)
    signed[0, ::3] = -0.0
    special += [mixed, torch.zeros(1, 700), signed]
    check(draw, [(x, parameters_of(s, 1), True) for x in special for s in SETTINGS])


@pytest.mark.parametrize("threads, shared_keys", [(1, 0), (2, 4096)])
def test_the_threads_and_the_shared_memory_of_a_group_do_not_matter(draw, threads, shared_keys):
    requests = [(logits_of("flat", 1, 3000, i), parameters_of(s, i), True) for i, s in enumerate(SETTINGS)]
    check(draw, requests, threads=threads, shared_keys=shared_keys)
