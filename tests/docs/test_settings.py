"""``docs/errors.md`` lists the variables that users may set."""

import re

import pytest

from keras_towers.foundation import settings
from tests.docs.pages import ROOT

pytestmark = pytest.mark.core

PAGE = ROOT / "docs" / "errors.md"
HEAD = (
    "## Environment variables\n\n"
    "If a variable has an option, [the option](cli.md#keras-towers-run) "
    "explains it.\n\n"
)
_SETTING = re.compile(r"^((?:#: .+\n)+)([A-Z_]+) =", re.MULTILINE)
_NAME = re.compile(r"^[A-Z_]+ =", re.MULTILINE)
# A module's own constant, or default, for what should be a setting. Thresholds
# of measured times are none.
_LIMIT = re.compile(
    r"^_?[A-Z_]+_S\b[^=\n]*= *[0-9.]|\w_s: \w+ = *[1-9.]", re.MULTILINE
)
_VARIABLE = re.compile(r"\"KERAS_TOWERS_\w+\"")
_MEASURES = ("bench", "recording")


def section():
    """The section, from the module's names and the comments above them."""
    text = (ROOT / "keras_towers/foundation/settings.py").read_text()
    found = _SETTING.findall(text)
    assert len(found) == len(_NAME.findall(text)), "a setting has no comment"
    lines = []
    for comment, name in found:
        variable = getattr(settings, name)
        meaning = " ".join(comment.replace("#: ", "").split())
        # The others are not for users.
        if isinstance(variable, str) and not meaning.startswith("Set by"):
            lines.append(f"* `{variable}`: {meaning}\n")
    return HEAD + "".join(lines)


def rest_of_page():
    return PAGE.read_text().partition("## Environment variables")[0]


def test_the_page_lists_every_variable():
    """To write it: ``python -m tests.docs.test_settings``."""
    assert PAGE.read_text() == rest_of_page() + section()


def test_no_other_module_has_settings_of_its_own():
    for path in (ROOT / "keras_towers").rglob("*.py"):
        inside = path.relative_to(ROOT / "keras_towers")
        if inside.name == "settings.py" or {*inside.parts} & {*_MEASURES}:
            continue
        text = path.read_text()
        found = [*_LIMIT.findall(text), *_VARIABLE.findall(text)]
        assert not found, f"{inside}: {found} belong into settings.py"


if __name__ == "__main__":
    PAGE.write_text(rest_of_page() + section())
