"""Runs the batch command, kills it with SIGKILL at random points, and resumes it.

python test/batch/killed.py MODEL.pte --requests 2000 --kills 3 --seed 0
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "executorch_mlx.cli.main", "batch"]


def write_requests(path: Path, count: int, model: str) -> None:
    """Write `count` requests that give the same tokens in every run, for both endpoints."""
    rng = random.Random(count)
    with open(path, "w") as file:
        for number in range(count):
            prompt = f"Return the {rng.randrange(1000)}"
            body = {"model": model, "max_tokens": rng.randint(1, 16), "temperature": 0}
            body |= {"messages": [{"role": "user", "content": prompt}]} if number % 2 else {"prompt": prompt}
            url = "/v1/chat/completions" if number % 2 else "/v1/completions"
            line = {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_and_kill(command: list, answers: Path, count: int, kills: int, seed: int) -> list[int]:
    """Run `command` until it ends, and kill it `kills` times. Return the number of whole lines after each kill.

    Each kill happens when the file has a certain number of answers, which is drawn with `seed`, or one more answer than
    after the last kill if that kill came late. A third of the answers is left after the last of these numbers, so that
    a late kill does not miss the run. After each kill, a part of a line is added to the file, as an interrupted write
    would leave it.
    """
    rng, after = random.Random(seed), []
    for point in sorted(rng.sample(range(1, count * 2 // 3), kills)):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        point = max(point, after[-1] + 1 if after else 1)
        while lines_in(answers) < point and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the batch ended before it was killed"
        after.append(lines_in(answers))
        last = answers.read_bytes().splitlines()[-1]
        with open(answers, "ab") as file:
            file.write(last[: rng.randrange(1, len(last))])
    subprocess.run(command, check=True)
    return after


def text_of(answer: dict) -> str:
    choice = answer["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def texts_in(path: Path) -> dict[str, str]:
    """Return the texts of the answers by custom_id. Raises AssertionError if a request has two answers."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    texts = {answer["custom_id"]: text_of(answer) for answer in answers}
    assert len(texts) == len(answers), "a request has two answers"
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        requests, whole, resumed = (Path(folder, f"{name}.jsonl") for name in ("requests", "whole", "resumed"))
        write_requests(requests, options.requests, options.model.stem)
        command = [*COMMAND, options.model, requests, "-o"]
        subprocess.run([*command, whole], check=True)
        points = run_and_kill([*command, resumed], resumed, options.requests, options.kills, options.seed)
        texts, expected = texts_in(resumed), texts_in(whole)
        print(f"killed after {points} answers; {len(texts)} of {options.requests} requests answered once")
        print(f"answers equal to those of an uninterrupted run: {texts == expected}")
        sys.exit(texts != expected or len(texts) != options.requests)


if __name__ == "__main__":
    main()
