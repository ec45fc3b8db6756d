"""What the page on the inside says of files, names and steps is so."""

import ast
import re
import sys

import pytest

import keras_towers as kt
from tests.docs.pages import ROOT, without_code
from tests.kit.training import BATCH, X, Y, linear

pytestmark = pytest.mark.core

PACKAGE = ROOT / "keras_towers"
SOURCE = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
PAGE = without_code(ROOT / "docs" / "architecture.md")
FILE = re.compile(r"`([\w/]+(?:\.py|/))`")
NAME = re.compile(r"`(\w+(?:\.\w+)*)`")
# "`Home` in `fit/weights/tower_variables.py`", or with the file in parentheses.
NAMES_OF_FILES = re.findall(r"`([\w.]+)`\s(?:in\s|\()`([\w/]+\.py)`", PAGE)
# Rows of the table of components: a class, and its subclasses.
COMPONENTS = re.findall(r"^\| `(\w+)` \(.*\| (`.*) \|$", PAGE, re.M)
# What every step goes through: the numbered items of two sections.
STEP = re.findall(
    r"^\d+\. (?:.+\n)+",
    PAGE.partition("## Why it is exact")[2].partition("## From `keras-t")[0],
    re.M,
)


def found(name):
    """The file or folder of a path from the package or the root, if any."""
    return next((p for p in (PACKAGE / name, ROOT / name) if p.exists()), None)


def defined_by(node):
    """The names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return [getattr(t, "name", getattr(t, "id", "")) for t in targets]


def test_names_are_used():
    words = {*re.findall(r"\w+", SOURCE)}
    for name in NAME.findall(PAGE):
        last = name.removesuffix(".py").rpartition(".")[2]
        assert last in words or found(name), name


@pytest.mark.parametrize(("name", "file"), NAMES_OF_FILES)
def test_a_file_defines_what_the_page_says(name, file):
    body = ast.parse(found(file).read_text()).body
    for part in name.split("."):
        node = {name: n for n in body for name in defined_by(n)}[part]
        body = getattr(node, "body", ())


def test_components_have_these_subclasses():
    assert len(COMPONENTS) == 2
    for name, cell in COMPONENTS:
        listed = {*NAME.findall(cell)}
        direct = {*re.findall(rf"^class (\w+)\({name}\):", SOURCE, re.M)}
        assert listed == direct or (cell.endswith("...") and listed < direct)


def test_every_fit_runs_the_files_of_its_walk():
    ran = set()

    def note(frame, event, _):
        # What an import runs says nothing.
        if event == "call" and frame.f_code.co_name != "<module>":
            ran.add(frame.f_code.co_filename)

    before, model = sys.getprofile(), linear()
    sys.setprofile(note)
    try:
        with kt.TowerStrategy(2):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
    finally:
        sys.setprofile(before)
    named = {name for item in STEP for name in FILE.findall(item)}
    assert len(named) > 20
    for name in named:
        place = str(PACKAGE / name.rstrip("/"))
        # Only several ranks compare their arguments.
        alone = name == "fit/ranks/call_agreement.py"
        assert alone or any(file.startswith(place) for file in ran), name
