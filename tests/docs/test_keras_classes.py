"""``docs/keras_classes.md`` says how each class of Keras trains on towers."""

import random
from collections.abc import Iterator

import keras
import pytest

import keras_towers as kt
from tests.docs.pages import ROOT
from tests.exactness.classes import groups, listed, optimizer_recipes
from tests.exactness.classes.recipes import public
from tests.exactness.classes.test_classes import PARTS
from tests.exactness.classes.verdicts import verdicts
from tests.kit.long import SEED
from tests.kit.untuned import leave_untuned

PAGE = ROOT / "docs" / "keras_classes.md"
HEAD = """# Keras's classes

Every public layer, loss, metric and optimizer of Keras {version}, each trained
in a small model on two towers, in batches of 8 and 3 examples, and compared
with one device; losses and metrics without and with sample weights.
`make test-all` also tries every reduction of losses, and optimizers with
clipping, accumulation, averages, weight decay and a loss scale.

* **equal**: proven to be that of one device, and it is;
* **equal, rehearsed**: not proven, but equal on the first examples, and here;
* **equal here, told**: `fit` says that it differs, or may, in other batches;
* **differs, told**: it is another, and `fit` says so before it trains.

[What is exact](exactness.md) says why.
"""
# Parts of a class that are tried: losses are made in many ways.
MOST = {"layers": 1, "losses": 2, "metrics": 2, "optimizers": 1}
NOTES = {
    name: why[:1].upper() + why[1:] for name, why in listed.NO_PART.items()
}


def _named() -> Iterator[tuple[str, str]]:
    """Every public class, as its module and the name that has a part."""
    for namespace, parts in PARTS.items():
        for names in public(namespace).values():
            known = [n for n in names if n in parts or n in listed.NO_PART]
            yield namespace, (known or names)[0]


def _found(namespace: str, names: list[str], exact: bool) -> dict[str, str]:
    """The verdicts on classes."""
    make = groups.of_recipes
    if namespace == "optimizers":
        make = optimizer_recipes.group
    classes = {
        name: dict([*PARTS[namespace][name].items()][: MOST[namespace]])
        for name in names
    }
    return verdicts(classes, make, exact=exact)


def rendered() -> str:
    """The page, from trainings of all classes."""
    head = HEAD.format(version=keras.__version__)
    return head + "".join(map(section, PARTS))


def section(namespace: str) -> str:
    """The part of the page on the classes of a module."""
    names = sorted(name for n, name in _named() if n == namespace)
    tried = [name for name in names if name in PARTS[namespace]]
    by_default, exact = (
        _found(namespace, tried, option) for option in (False, True)
    )
    lines = [
        f"\n## keras.{namespace}\n",
        "| class | by default | `exact=True` |\n|---|---|---|",
    ]
    for name in names:
        cells = [NOTES.get(name, ""), ""]
        if name in by_default:
            cells = [by_default[name], exact[name]]
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _rows() -> dict[tuple[str, str], list[str]]:
    """The cells of each class on the page."""
    rows, namespace = {}, ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## keras."):
            namespace = line.removeprefix("## keras.")
        if line.startswith("| `") and namespace:
            name, *cells = map(str.strip, line.strip("|").split("|"))
            rows[namespace, name.strip("`")] = cells
    return rows


on_its_version = pytest.mark.skipif(
    f" of Keras {keras.__version__}, " not in PAGE.read_text(),
    reason="the page is of another version of Keras",
)


@pytest.mark.core
@on_its_version
def test_the_page_has_every_class():
    assert set(_rows()) == set(_named())


def _drawn(namespace: str) -> dict[str, list[str]]:
    """Rows of a quarter of a module's classes."""
    rows = {
        name: cells
        for (of, name), cells in _rows().items()
        if of == namespace and name in PARTS[namespace]
    }
    names = [name for name in rows if name not in listed.TOLD]
    drawn = random.Random(SEED).sample(names, len(names) // 4)
    return {name: rows[name] for name in drawn}


# `make test` trains with the same classes in tests/exactness/classes.
@pytest.mark.long
@on_its_version
@pytest.mark.timeout(1200)
def test_rows_are_right():
    """To write them all: ``python -m tests.docs.test_keras_classes``."""
    for namespace in PARTS:
        rows = _drawn(namespace)
        for exact in (False, True):
            found = _found(namespace, [*rows], exact)
            assert found == {name: cells[exact] for name, cells in rows.items()}


if __name__ == "__main__":
    kt.virtual_towers(2)
    leave_untuned()
    PAGE.write_text(rendered())
