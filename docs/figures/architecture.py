"""Draws architecture.svg: the way of a model from PyTorch to its results.

    python docs/figures/architecture.py          # writes the SVG beside this file
    python docs/figures/architecture.py --check  # exit status 1 if the committed SVG differs

Only the standard library is needed. test/docs/test_generated_pages.py runs the check.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

FILE = Path(__file__).with_suffix(".svg")

WIDTH, HEIGHT = 1080, 630
MARGIN, GAP = 24, 36
TOP, STAGE_HEIGHT = 76, 356
STAGE_WIDTH = (WIDTH - 2 * MARGIN - 3 * GAP) // 4

INK, MUTED, LINE, PAPER = "#1f2933", "#52606d", "#cbd2d9", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Title, where and when it happens, color, boxes (title, explanation), whether arrows join the boxes.
STAGES = (
    (
        "Export",
        "Python, once",
        "#2b6cb0",
        (
            ("PyTorch model", ("SamplingHead adds", "token sampling")),
            ("torch.export", ("graph of ATen", "operators")),
            ("MLXPartitioner", ("selects the nodes", "that MLX can run")),
            ("MLXBackend", ("lowers, fuses and", "packs them")),
        ),
        True,
    ),
    (
        "model.pte",
        "one file",
        "#6b46c1",
        (
            ("ExecuTorch program", ("methods, metadata,", "undelegated operators")),
            ("MLX program", ("FlatBuffer of typed", "instructions")),
            ("Weights", ("stored once, shared", "by all methods")),
        ),
        False,
    ),
    (
        "Load and verify",
        "C++, once",
        "#b7791f",
        (
            ("Verify", ("structure, slots, dtypes,", "limits of the program")),
            ("Bind weights", ("in place on a CPU,", "copied to a GPU")),
            ("Allocate state", ("KV caches and other", "mutable buffers")),
        ),
        True,
    ),
    (
        "Run",
        "C++, at every call",
        "#2f855a",
        (
            ("Bind inputs", ("dtypes and shapes", "are checked")),
            ("Interpret", ("instructions call", "mlx::core functions")),
            ("Evaluate", ("CPU, NVIDIA GPU", "or Apple GPU")),
            ("Return outputs", ("tensors or", "token ids")),
        ),
        True,
    ),
)

DECODE_STEP = ("token ids", "layers, KV cache", "logits", "mlx::sample", "next token id")


def text(
    x: float, y: float, content: str, size: float = 13, color: str = MUTED, weight: int = 400, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int = 8):
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.25"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.75):
    """A straight arrow, horizontal or vertical."""
    length = 7
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    base_x, base_y = x2 - dx * length, y2 - dy * length
    half = 4.5
    corners = ((x2, y2), (base_x - dy * half, base_y - dx * half), (base_x + dy * half, base_y + dx * half))
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{base_x:g}" y2="{base_y:g}" stroke="{color}" stroke-width="{width:g}"/>'
        f'<polygon points="{points}" fill="{color}"/>'
    )


def stage(index: int):
    title, when, color, boxes, joined = STAGES[index]
    left = MARGIN + index * (STAGE_WIDTH + GAP)
    middle = left + STAGE_WIDTH / 2
    yield box(left, TOP, STAGE_WIDTH, STAGE_HEIGHT, color + "0d", color + "55", radius=12)
    yield f'<circle cx="{left + 24:g}" cy="{TOP + 26}" r="13" fill="{color}"/>'
    yield text(left + 24, TOP + 31, str(index + 1), size=14, color=PAPER, weight=700)
    yield text(left + 46, TOP + 24, title, size=16, color=INK, weight=700, anchor="start")
    yield text(left + 46, TOP + 41, when, size=12.5, anchor="start")

    first, space = TOP + 56, 14
    height = (STAGE_HEIGHT - 56 - 14 - space * (len(boxes) - 1)) / len(boxes)
    for i, (name, explanation) in enumerate(boxes):
        y = first + i * (height + space)
        center = y + height / 2
        yield box(left + 14, y, STAGE_WIDTH - 28, height, PAPER, color + "88")
        yield text(middle, center - 12, name, size=14.5, color=INK, weight=600)
        yield text(middle, center + 7, explanation[0])
        yield text(middle, center + 23, explanation[1])
        if joined and i:
            yield arrow(middle, y - space, middle, y, color)
    if index:
        y = TOP + STAGE_HEIGHT / 2
        yield arrow(left - GAP + 4, y, left - 4, y, INK, width=2.5)


def decode_step():
    """The loop of a language model, below the stages."""
    top, height = TOP + STAGE_HEIGHT + 24, 150
    color = STAGES[3][2]
    yield box(MARGIN, top, WIDTH - 2 * MARGIN, height, color + "0d", color + "55", radius=12)
    left, title = MARGIN + 18, "A decode step of a language model"
    yield text(left, top + 25, title, size=15, color=INK, weight=700, anchor="start")
    yield text(left, top + 45, "The logits stay in the program. Only token ids cross to the host.", anchor="start")

    count = len(DECODE_STEP)
    width, height, space = 158, 34, 36
    left = (WIDTH - count * width - (count - 1) * space) / 2
    y = top + 80
    inside = (1, 3)  # from the layers to the sampler
    x1, x2 = (left + i * (width + space) for i in inside)
    yield (
        f'<rect x="{x1 - 10:g}" y="{y - 6}" width="{x2 + width - x1 + 20:g}" height="{height + 12}" rx="10" '
        f'fill="none" stroke="{color}" stroke-width="1.25" stroke-dasharray="5 4"/>'
    )
    yield text((x1 + x2 + width) / 2, y - 14, "one call of the program", color=color, weight=600)
    for i, name in enumerate(DECODE_STEP):
        x = left + i * (width + space)
        yield box(x, y, width, height, PAPER, color + "88")
        yield text(x + width / 2, y + 22, name, size=14, color=INK, weight=600)
        if i:
            yield arrow(x - space + 2, y + height / 2, x - 2, y + height / 2, color)

    # Back to the first box.
    start, end, below = left + (count - 0.5) * width + (count - 1) * space, left + width / 2, y + height + 22
    yield (
        f'<path d="M {start:g} {y + height} V {below - 8} Q {start:g} {below} {start - 8:g} {below} '
        f'H {end + 8:g} Q {end:g} {below} {end:g} {below - 8}" fill="none" stroke="{color}" stroke-width="1.75"/>'
    )
    yield arrow(end, below - 8, end, y + height + 1, color)


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{escape(FONT)}" role="img" aria-labelledby="title description">',
        '<title id="title">How executorch-mlx exports and runs a model</title>',
        '<desc id="description">A PyTorch model is exported and lowered to a .pte file. The runtime loads and verifies '
        "the file once, then interprets its instructions with MLX at every call. A decode step of a language model "
        "samples the next token inside the program.</desc>",
        box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, PAPER, LINE, radius=14),
        text(MARGIN, 36, "From a PyTorch model to its results", size=20, color=INK, weight=700, anchor="start"),
        text(MARGIN, 58, "Export runs once. The file runs anywhere MLX runs.", size=14, anchor="start"),
    ]
    for index in range(len(STAGES)):
        parts += stage(index)
    parts += decode_step()
    return "\n".join((*parts, "</svg>", ""))


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text(encoding="utf-8") != draw())
    FILE.write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
