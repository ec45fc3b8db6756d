"""Each part of the package imports only what architecture.md lists below it."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "keras_towers"


def order():
    """The parts as ``docs/architecture.md`` lists them, from the top down."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("```")[1]
    return re.findall(r"\b([a-z_]+(?:\.py|/))", table)


def imported(path):
    """The parts that a file imports when it is itself imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            part = rest.partition(".")[0]
            if package != "keras_towers":
                continue
            if (PACKAGE / part).is_dir():
                yield f"{part}/"
            elif (PACKAGE / f"{part}.py").exists():
                yield f"{part}.py"


def test_imports_go_downwards():
    place = {part: index for index, part in enumerate(order())}
    assert "fit/" in place and "compat.py" in place
    wrong = {
        f"{path.relative_to(ROOT)} imports {part}"
        for path in PACKAGE.rglob("*.py")
        for own in [path.relative_to(PACKAGE).parts[0]]
        for own in [own if own.endswith(".py") else f"{own}/"]
        for part in imported(path)
        if own in place and place.get(part, 0) < place[own]
        if part in place
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_folder_is_listed():
    folders = {
        f"{path.parent.name}/" for path in PACKAGE.glob("[a-z]*/__init__.py")
    }
    assert folders <= set(order())
