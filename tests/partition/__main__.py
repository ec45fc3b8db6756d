"""Writes how towers have the results of operations and of functions."""

import importlib

import tests.conftest  # noqa: F401  # The devices of all tests.
from tests.kit.scripts import ROOT
from tests.partition import layout_list

for path in sorted(layout_list.FILE.parent.rglob("test_*.py")):
    if "layout_list" in path.read_text():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        importlib.import_module(name)
layout_list.write()
