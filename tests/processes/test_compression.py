"""How gradients travel, between two real processes."""

import ast
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).with_name("compression.py").read_text()
NAMES = tuple(
    node.name
    for node in ast.parse(SOURCE).body
    if isinstance(node, ast.FunctionDef)
    and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(run_checks, name):
    run_checks("compression", 2, name, (), limit_s=180)
