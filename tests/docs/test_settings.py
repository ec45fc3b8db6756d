"""``docs/settings.md`` says what ``keras_towers/settings.py`` does."""

import re

import pytest

from keras_towers import settings
from tests.docs.pages import ROOT

pytestmark = pytest.mark.core

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

Environment variables that the package reads or sets, and its time limits, made
of `keras_towers/settings.py`. How a strategy trains is said by its options:
[strategies](strategies.md).
"""
VARIABLES = """
## Environment variables

| variable | meaning |
|---|---|
"""
LIMITS = """
## Time limits

Constants of `keras_towers.settings`, which a script may change
before it trains; those that end in `_S` are seconds.

| name | value | meaning |
|---|---|---|
"""
_SETTING = re.compile(r"^((?:#: .+\n)+)([A-Z_]+) =", re.MULTILINE)
_NAME = re.compile(r"^[A-Z_]+ =", re.MULTILINE)
# A module's own constant for what should be a setting. Thresholds of measured
# times are none.
_LIMIT = re.compile(r"^_?[A-Z_]+_S\b[^=\n]*= *[0-9.]", re.MULTILINE)
_VARIABLE = re.compile(r"\"KERAS_TOWERS_\w+\"")
_MEASURES = ("bench", "timeline")


def rendered():
    """The page, from the module's names and the comments above them."""
    text = (ROOT / "keras_towers/settings.py").read_text()
    variables, limits = [], []
    for comment, key in _SETTING.findall(text):
        value = getattr(settings, key)
        meaning = " ".join(comment.replace("#: ", "").split())
        if isinstance(value, str):
            variables.append(f"| `{value}` | {meaning} |\n")
        else:
            limits.append(f"| `{key}` | {value:g} | {meaning} |\n")
    assert len(variables) + len(limits) == len(_NAME.findall(text))
    return HEAD + VARIABLES + "".join(variables) + LIMITS + "".join(limits)


def test_the_page_says_what_the_module_does():
    """To write it: ``python -m tests.docs.test_settings``."""
    assert PAGE.read_text() == rendered()


def test_no_other_module_has_settings_of_its_own():
    for path in (ROOT / "keras_towers").rglob("*.py"):
        inside = path.relative_to(ROOT / "keras_towers")
        if inside.parts[0] in ("settings.py", *_MEASURES):
            continue
        text = path.read_text()
        found = [*_LIMIT.findall(text), *_VARIABLE.findall(text)]
        assert not found, f"{inside}: {found} belong into settings.py"


if __name__ == "__main__":
    PAGE.write_text(rendered())
