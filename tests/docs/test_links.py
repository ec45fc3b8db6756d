"""Links lead to files and headings, and the paths that pages name exist."""

import re
import unicodedata

import pytest

from tests.docs.pages import PAGES, ROOT, name_of, without_code

pytestmark = pytest.mark.core

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`([\w./-]+(?:\.(?:py|txt|md)|/))`")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


FOR_DEVELOPERS = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "docs/architecture.md", "docs/extending.md")
]
# The example that is to be written.
NEW = "strategies/mine.py"


def links(page):
    return [
        link
        for link in _LINK.findall(without_code(page))
        if not link.startswith(("http://", "https://"))
    ]


def anchors(page):
    """The anchors of a page's headings, as code hosts and the site make them.

    Headings with punctuation between words get different ones from the two.
    """
    found = []
    for heading in _HEADING.findall(without_code(page)):
        text = unicodedata.normalize("NFKD", heading)
        text = re.sub(r"[^\w\s-]", "", text).strip().lower()
        found.append(re.sub(r"\s", "-", text))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    # No merge is left half done.
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", FOR_DEVELOPERS, ids=name_of)
def test_paths_exist_as_written(page):
    """They begin in the package or at the root, with every room on the way."""
    for path in {*_PATH.findall(without_code(page))} - {NEW}:
        tops = ROOT / "keras_towers", ROOT
        assert any((top / path).exists() for top in tops), path


def test_the_site_has_every_page():
    """It does not see files outside of its folder."""
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}\n" in listed
        for link in links(page):
            assert not link.startswith(".."), f"{page.name}: {link}"
