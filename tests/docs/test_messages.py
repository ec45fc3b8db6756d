"""Messages that the documentation explains are those of the package."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.core

PAGE = ROOT / "docs" / "troubleshooting.md"
# The first column of its tables, without what is said of it behind.
QUOTED = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)
# What a value is filled in for: a field of an f-string, or of a format.
FIELD = re.compile("…|%[rsd]")


def written(node):
    """A string of the source, with an ellipsis for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FIELD.sub("…", node.value)
    return "…"


@pytest.fixture(scope="module")
def strings():
    return [
        written(node)
        for path in (ROOT / "keras_towers").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    ]


def test_there_are_messages():
    assert len(QUOTED) > 30


@pytest.mark.parametrize("message", QUOTED)
def test_the_message_exists(message, strings):
    assert re.search(r"[a-z]{4}", message)
    fragment = message.strip("… ")
    assert any(fragment in string for string in strings)
