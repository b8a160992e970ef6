"""python context_memory.py PROGRAM: chats on the program, and the memory of this process that is in no file.

Prints a line of JSON: the capacity of the caches, and for each step the bytes of resident memory after it.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executorch_mlx import LLM
from executorch_mlx.llm import binding


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def answer(llm: LLM, first: int, length: int = 40) -> list[int]:
    prompt = [(first + i) % 100 + 2 for i in range(length)]
    return llm.generate(prompt, max_new_tokens=40, temperature=0, ignore_eos=True).result().tokens


def main(path: str) -> None:
    with LLM.load(path, device="cpu") as llm:
        after = {"capacity": llm.program.max_context_len}
        after["load"] = resident()
        answer(llm, 0)
        after["answer"] = resident()
        answer(llm, 0, 60)  # begins as the prompt before
        after["same beginning"] = resident()
        with ThreadPoolExecutor(llm.rows) as threads:  # in all rows
            list(threads.map(lambda row: answer(llm, 20 * row), range(llm.rows)))
        after["all rows"] = resident()
        prompt = binding.ids([i % 100 + 2 for i in range(40)])
        llm.program.call("engine_clone", prompt, len(prompt))
        after["clone"] = resident()
        for name in ("suspend", "resume", "release_memory"):
            llm.program.call(f"engine_{name}")
        answer(llm, 0)
        after["resume"] = resident()
    print(json.dumps(after))


if __name__ == "__main__":
    main(sys.argv[1])
