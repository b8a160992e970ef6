"""The Markdown pages of the repository: their code blocks, links and anchors."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "backends").rglob("README.md")),
]

_FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced code block. `output` is the `text` block that follows it directly, if there is one."""

    page: Path
    line: int
    language: str
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, following in zip(fences, [*fences[1:], None]):
        is_output = (
            following is not None and following[3] == "text" and not text[fence.end() : following.start()].strip()
        )
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[3], fence[4], following[4] if is_output else None))
    return found


def prose(page: Path) -> str:
    """The text outside of code."""
    return _INLINE_CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of the links in `page`, without those to web sites."""
    return [link for link in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as Python-Markdown and GitHub write them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    texts = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in texts}
