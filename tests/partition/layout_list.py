"""How towers have the results of functions, in words, and the list of that.

``layouts.txt`` has a line for each operation of ``rules/test_rules.py``, and
for each function that a test gives to ``as_listed``. If you change a rule, run
``python -m tests.partition``, which writes it: the diff shows your change.
"""

import inspect
import pathlib

import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import PARTIAL, REPLICATED, ListOf
from tests.partition.kit import (
    FEW,
    check_on_towers,
    computed_once,
    exchange_counts,
    laid_out,
    results_of,
)

FILE = pathlib.Path(__file__).with_name("layouts.txt")
VERSION = f"TensorFlow {tf.__version__}"
_SECTIONS = {}


class Section:
    """A part of the list.

    Args:
        title: its first line.
        cases: what it has a line for.
        line_of: makes the line of a case.
    """

    def __init__(self, title, cases, line_of):
        self._cases, self._line_of = cases, line_of
        self.title = title
        _SECTIONS[title] = self

    @property
    def listed(self):
        """Its lines in the file."""
        _, _, rest = FILE.read_text().partition(f"\n\n{self.title}\n")
        lines = rest.partition("\n\n")[0].splitlines()
        assert len(lines) == len(self._cases), "python -m tests.partition"
        return lines

    def text(self):
        """What is to be in the file."""
        return "\n".join([self.title, *map(self._line_of, self._cases)])


def is_of_this_version():
    """Whether the TensorFlow that has traced the list's steps is this one."""
    return FILE.read_text().startswith(f"{VERSION}\n")


def write():
    """Write the file anew."""
    texts = [VERSION, *(s.text() for _, s in sorted(_SECTIONS.items()))]
    FILE.write_text("\n\n".join(texts) + "\n")


def as_listed(title, table, exchanges=False, **options):
    """A test of each function of a table: it is exact, and laid out as listed.

    Args:
        title: of the part of the list.
        table: functions with their inputs, by what they are; or functions
            alone, whose parameter ``x`` is the input ``X`` of their module.
        exchanges: whether the list says how many exchanges there are; those of
            the results are among them.
        **options: of ``check_on_towers``.
    """

    def line(name, program):
        counts = sorted(exchange_counts(program).items()) if exchanges else ()
        more = "".join(f"; {number} {kind}" for kind, number in counts)
        return f"{name}: {described(program)}{more}"

    def line_of(name):
        return line(name, laid_out(*_with_inputs(table[name])))

    section = Section(title, table, line_of)

    @pytest.mark.parametrize("name", table)
    def test(name):
        function, *given = _with_inputs(table[name])
        known = {g.examples for g in given} - {None}
        towers = [(count - 1, 0, 1) for count in known] or FEW
        checked = {"towers": towers, **options}
        program = check_on_towers(function, *given, **checked)
        assert line(name, program) == section.listed[[*table].index(name)]

    return test


def _with_inputs(entry):
    if isinstance(entry, tuple):
        return entry
    names = inspect.signature(entry).parameters
    return entry, *[entry.__globals__[name.upper()] for name in names]


def described(program):
    """How towers have the results of a traced function: in words, and shapes.

    ``rows 0 of [n, 3]``, ``rows 1 of [4, 6*n] in 2 blocks``, ``sum of [3]``,
    ``list of rows 0``; what is the same everywhere is ``whole [3]``. What is
    computed once for it follows after a colon.
    """
    results = ", ".join(map(_description, results_of(program)))
    once = sorted(computed_once(program))
    return ": ".join([results, *[" ".join(once)] * bool(once)])


def _description(value):
    layout = value.layout
    if isinstance(layout, ListOf):
        return f"list of {_place(layout.element)}"
    known = value.shape is not None
    shape = list(value.shape) if known else "?"
    if layout == REPLICATED:
        return f"whole {shape}"
    blocks = getattr(layout, "blocks", 1)
    more = f" in {blocks} blocks" if blocks > 1 else ""
    return f"{_place(layout)} of {shape}{more}"


def _place(layout):
    if isinstance(layout, ListOf):
        return f"list of {_place(layout.element)}"
    return "sum" if layout == PARTIAL else f"rows {layout.axis}"
