"""MkDocs hooks: files outside docs/ become pages of the site.

- The Markdown files of `PAGES`, which are elsewhere in the repository, have a place in the navigation.
- A link to any other file of the repository leads to a page that shows the file.

A link to a file that does not exist is not changed, and MkDocs reports the link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "backends/mlx/engine/README.md": "llm-engine.md",
    "examples/README.md": "examples.md",
}
LANGUAGES = {
    ".py": "python",
    ".swift": "swift",
    ".h": "cpp",
    ".cpp": "cpp",
    ".sh": "sh",
    ".fbs": "c",
    ".toml": "toml",
    ".json": "json",
}

# Matches fenced blocks and inline code, in which links are not links but text.
_CODE = re.compile(r"^ *(`{3,}).*?^ *\1[^\n]*$|(`+)(?!`).+?(?<!`)\2(?!`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")

# Page of the site → file of the repository, for the pages that this module adds.
_sources: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add `PAGES`, and a page for each other file that a page links to."""
    _sources.clear()
    pending = [(file.src_uri, file.content_string) for file in files if file.is_documentation_page()]

    def add(source: str) -> None:
        page = page_of(source)
        if page in _sources or files.get_file_from_path(page) is not None:
            return
        _sources[page] = source
        content = (ROOT / source).read_text(encoding="utf-8")
        if not source.endswith(".md"):
            content = f"---\nsearch:\n  exclude: true\n---\n# {source}\n\n{fenced(source)}\n"
        files.append(File.generated(config, page, content=content))
        pending.append((page, content))

    for source in PAGES:
        add(source)
    while pending:
        page, markdown = pending.pop()
        outside_code(markdown, partial(_LINK.sub, lambda link, page=page: add_target(page, link[0], add)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to files outside docs/ into links to the pages of these files. Returns the new Markdown."""
    uri = page.file.src_uri
    return outside_code(markdown, lambda text: _LINK.sub(lambda link: site_link(uri, link[0]), text))


def outside_code(markdown: str, replace: Callable[[str], str]) -> str:
    """Return `markdown`, with `replace` applied to everything but code."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [replace(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, replace(markdown[end:])])


def add_target(page: str, link: str, add: Callable[[str], None]) -> str:
    """Add the file that `link` leads to. Returns `link`: as a replacement in `re.sub`, it changes nothing."""
    if target := repository_path(page, link):
        add(target)
    return link


def site_link(page: str, link: str) -> str:
    """Return the link within the site that takes the place of `link` on the page `page`."""
    target = repository_path(page, link)
    if target is None:
        return link
    _, hash_, anchor = link.partition("#")
    return os.path.relpath(page_of(target), PurePosixPath(page).parent) + hash_ + anchor


def repository_path(page: str, link: str) -> str | None:
    """Return the file of the repository to which `link` on the page `page` leads, or None if it leads elsewhere.

    For a link to a folder, the file is the README.md of the folder.
    """
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
        return None
    source = PurePosixPath(_sources.get(page, f"docs/{page}"))
    target = os.path.normpath(source.parent / path)
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def page_of(path: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def fenced(path: str) -> str:
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"``````{language}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n``````"
