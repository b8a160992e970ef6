"""Answers prompts with a model, and prints the tokens as JSON. test_tensor_parallel starts this script.

    python group_answers.py MODEL.pte [NUMBER_OF_PROCESSES [kill | wait]]

With `kill` or `wait`, the script prints the system's ids of all other processes of the group, and generates without
end. With `kill`, it kills the process of rank 1 after a few tokens. With `wait`, the test kills the script.
"""

import json
import sys
import tempfile

from executorch_mlx import LLM
from executorch_mlx.llm.processes import Processes

PROMPT = [2 + (7 * i + i * i) % 120 for i in range(40)]


def answers(llm):
    """Return the tokens of two requests: 64 greedy steps, and 24 sampled steps with a seed.

    The requests run at the same time if the program has two rows. The prompts have a common beginning, so that the
    cache of one row is copied to the other.
    """
    requests = [
        llm.generate(PROMPT, max_new_tokens=64, ignore_eos=True),
        llm.generate(
            PROMPT[:36] + [5, 6], max_new_tokens=24, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, seed=7
        ),
    ]
    return [request.result().tokens for request in requests]


def main():
    with tempfile.TemporaryDirectory():
        pass  # its finalizer makes that of the model run later at the exit than functions of atexit
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
