"""The docstring of a room lists its modules, in the words of their own.

``python -m tests.docs.test_rooms`` writes the lists: modules that are listed
keep their order, and new ones follow.
"""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "keras_towers"
# With fewer modules their names say enough.
FEWEST = 4
ENTRY = re.compile(r"^``(\w+)``\n  (.+)\n", re.MULTILINE)
ROOMS = [
    path.relative_to(PACKAGE).as_posix()
    for path in sorted(PACKAGE.rglob("*/"))
    if len(list(path.glob("[!_]*.py"))) >= FEWEST
]


def first_line(path):
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def with_list(room):
    """The text of a room's ``__init__.py``, with the list of its modules."""
    path = PACKAGE / room / "__init__.py"
    text = path.read_text()
    listed = [name for name, _ in ENTRY.findall(text)]
    modules = {p.stem: first_line(p) for p in (PACKAGE / room).glob("[!_]*.py")}
    # Its rooms, where they have a place among them.
    for path in (PACKAGE / room).glob("*/__init__.py"):
        if path.parent.name in listed:
            modules[path.parent.name] = first_line(path)
    order = [name for name in listed if name in modules]
    order += sorted(modules.keys() - set(order))
    entries = "".join(f"``{name}``\n  {modules[name]}\n" for name in order)
    if listed:
        first, *_, last = ENTRY.finditer(text)
        return text[: first.start()] + entries + text[last.end() :]
    _, docstring, rest = text.split('"""', 2)
    return f'"""{docstring.rstrip()}\n\n{entries}"""{rest}'


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_its_modules(room):
    assert (PACKAGE / room / "__init__.py").read_text() == with_list(room)


if __name__ == "__main__":
    for each in ROOMS:
        (PACKAGE / each / "__init__.py").write_text(with_list(each))
