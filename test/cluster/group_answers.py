"""Answers prompts with a model, and prints the tokens as JSON. A script that test_tensor_parallel starts.

    python group_answers.py MODEL.pte [NUMBER_OF_PROCESSES [kill | wait]]

`kill` ends process 1 after a few tokens, `wait` prints the ids of the processes and generates until it is killed.
"""

import json
import sys

from executorch_mlx import LLM
from executorch_mlx.llm.processes import Processes

PROMPT = [2 + (7 * i + i * i) % 120 for i in range(40)]


def answers(llm):
    """The tokens of 64 greedy steps, and of 24 steps with a seed, side by side if the program has two rows.

    The prompts begin alike, so that the cache of one row is copied to the other.
    """
    requests = [
        llm.generate(PROMPT, max_new_tokens=64, ignore_eos=True),
        llm.generate(
            PROMPT[:36] + [5, 6], max_new_tokens=24, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, seed=7
        ),
    ]
    return [request.result().tokens for request in requests]


def main():
    path, *rest = sys.argv[1:]
    count = int(rest[0]) if rest else 1
    llm = LLM.load(path, hosts=["localhost"] * count if count > 1 else None)
    if rest[1:]:
        others = [process.pid for process in Processes.running]
        print(json.dumps(others), flush=True)
        for number, _ in enumerate(llm.generate(PROMPT, max_new_tokens=80, ignore_eos=True)):
            if number == 3 and rest[1] == "kill":
                Processes.running[0].kill()
        while True:
            llm.generate(PROMPT, max_new_tokens=80, ignore_eos=True).result()
    print(json.dumps(answers(llm)))


if __name__ == "__main__":
    main()
