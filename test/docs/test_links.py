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


def test_pages_have_links():
    """The regular expression for links finds links, some of them with anchors."""
    found = [link for page in PAGES for link in links(page)]
    assert len(found) > 50 and any("#" in link for link in found)
