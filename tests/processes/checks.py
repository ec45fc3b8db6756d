"""What the worker scripts share: named checks, run in order on every rank.

A rank writes what came of each to a file of its own, at once, so that a rank
that hangs or dies shows where.
"""

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


def main(*arguments):
    """Run the checks that the command line names, or all of them."""
    folder, *names = sys.argv[1:]
    path = pathlib.Path(folder) / f"rank-{os.environ['HOROVOD_RANK']}.json"
    results = {}
    for name in names or CHECKS:
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
