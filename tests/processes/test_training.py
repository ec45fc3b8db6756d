"""What users do with ``HorovodStrategy``, each in two real processes."""

import ast
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).with_name("training.py").read_text()
NAMES = tuple(
    node.name
    for node in ast.parse(SOURCE).body
    if isinstance(node, ast.FunctionDef)
    and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(run_checks, name):
    run_checks("training", 2, name, (), limit_s=300)
