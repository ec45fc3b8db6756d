"""What the worker scripts share: named checks, run in order on every rank.

A rank writes what came of each to a file of its own, at once, so that a rank
that hangs or dies shows where.
"""

import ast
import json
import os
import pathlib
import sys
import traceback

CHECKS = {}


def check(function):
    """Make a function a check, of its own name."""
    CHECKS[function.__name__] = function
    return function


def names(module):
    """The checks of a worker's file beside this one, without running it."""
    source = pathlib.Path(__file__).with_name(f"{module}.py").read_text()
    return tuple(
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
    )


def main(*arguments):
    """Run the checks that the command line names, or all of them."""
    folder, *wanted = sys.argv[1:]
    path = pathlib.Path(folder) / f"rank-{os.environ['HOROVOD_RANK']}.json"
    results = {}
    for name in wanted or CHECKS:
        try:
            CHECKS[name](*arguments)
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        path.write_text(json.dumps(results))


def outcomes(folder, ranks):
    """What each rank made of each check: a dict for every rank."""
    found = []
    for rank in range(ranks):
        path = pathlib.Path(folder) / f"rank-{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    return found
