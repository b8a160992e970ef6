"""Every relative link leads to a file of the repository, and its anchor to a heading."""

import re

import pytest
from markdown_pages import PAGES, ROOT, anchors, links

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_resolve(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - navigation == set()


def test_the_ways_through_the_code_name_files_once():
    """The tables of architecture.md that trace an export, a call, a step and a request: at most 12 files each."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Four ways through the code")[2]
    tables = [re.findall(r"^\| \d+ \| `([\w/.*]+)` \|", part, re.MULTILINE) for part in text.split("\n### ")[1:]]
    assert len(tables) == 4
    for files in tables:
        assert 8 <= len(files) <= 12 and len(set(files)) == len(files)
        assert [file for file in files if not [*(ROOT / "backends" / "mlx").glob(file)]] == []


def test_pages_have_links():
    """The regular expression for links finds links, some of them with anchors."""
    found = [link for page in PAGES for link in links(page)]
    assert len(found) > 50 and any("#" in link for link in found)
