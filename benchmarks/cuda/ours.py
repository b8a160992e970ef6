"""Measures this delegate. run.py runs this file in a process of its own, with a program. Prints JSON."""

import json
import random
import resource
import sys
import time

from executorch_mlx import LLM

CONTEXTS, PREFILLS, STEPS, REPEATS = (128, 2048), (512, 2048), 100, 6
WARM_UP = 11  # tokens that are not timed
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}


def main() -> None:
    begin = time.perf_counter()
    llm = LLM.load(sys.argv[1], reuse_prompts=False)
    rng = random.Random(0)
    prompt = [rng.randrange(llm.program.vocab_size) for _ in range(max(*CONTEXTS, *PREFILLS))]
    options = {"ignore_eos": True, "draft": 0}

    def prefill(length):
        return llm.generate(prompt[:length], max_new_tokens=1, **SAMPLED, **options).result().metrics.prompt_seconds

    result = {"load and first token, s": 0.0}
    prefill(2)
    result["load and first token, s"] = time.perf_counter() - begin
    for length in PREFILLS:
        prefill(length)
        result[f"prefill {length}"] = length / min(prefill(length) for _ in range(REPEATS))
    for overlap in (True, False):
        llm.close()
        llm = LLM.load(sys.argv[1], reuse_prompts=False, overlap=overlap)
        for length in CONTEXTS:
            for kind, parameters in (("greedy", {"temperature": 0.0}), ("sampled", SAMPLED)):
                speeds = []
                for _ in range(REPEATS):
                    answer = llm.generate(prompt[:length], max_new_tokens=STEPS, **parameters, **options)
                    ends = [time.perf_counter() for _ in answer]
                    speeds.append((len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]))
                name = f"decode at {length}" if overlap else f"no overlap, {length}"
                result[f"{name}, {kind}"] = max(speeds)
    result["host peak, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
