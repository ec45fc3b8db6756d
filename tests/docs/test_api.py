"""``docs/api.md`` has every public name, with the first line of its help."""

import inspect
import re

import pytest

import keras_towers as kt
from tests.docs.pages import ROOT

pytestmark = pytest.mark.core

PAGE = ROOT / "docs" / "api.md"
PUBLIC = re.compile(r"^::: keras_towers\.(\w+)$", re.MULTILINE)
HEAD = """# API reference

The site has all signatures and options: run `make docs`, and open
`site/api/index.html`. In Python, `help(kt.TowerStrategy)` shows them, too.
These are all names, after `import keras_towers as kt`:

"""


def names():
    """The beginning of the page: each section's names, and their docstrings."""
    text = HEAD
    for section in rest_of_page().split("## ")[1:]:
        heading, *_ = section.split("\n")
        if listed := PUBLIC.findall(section):
            text += f"**{heading}**\n\n"
            for name in listed:
                first, *_ = inspect.getdoc(getattr(kt, name)).split("\n")
                text += f"* `{name}`: {first.replace('``', '`')}\n"
            text += "\n"
    return text


def rest_of_page():
    text = PAGE.read_text()
    return text[text.index("## Strategies") :]


def test_the_reference_begins_with_all_public_names():
    """To write it: ``python -m tests.docs.test_api``."""
    assert PAGE.read_text() == names() + rest_of_page()


def test_the_reference_has_all_public_names():
    listed = PUBLIC.findall(rest_of_page())
    assert sorted(listed) == sorted(kt.__all__) == dir(kt)


if __name__ == "__main__":
    PAGE.write_text(names() + rest_of_page())
