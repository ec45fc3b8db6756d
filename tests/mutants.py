"""Mutants of the package's rooms, each run against the tests of its module.

    python -m tests.mutants partition jobs/rendezvous --count 100

A mutant is a module with one change: another comparison, a number that is one
off, a loop that never runs. If no test fails, it survives: a test is missing,
or nothing follows from the change. The command prints survivors as diffs, for
you to read, and those of which the tests do not end: they may hang, or the
machine may be slow. ``make mutants`` draws them by the seed of the tests.
"""

import argparse
import contextlib
import difflib
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile

from tests.kit import sampling, scripts
from tests.test_modules import SHOWN_BY

# Changes of types in annotations, and of what a definition is decorated by,
# which ends the import.
_LEFT_OUT = ("BitOr", "no-op", "RemoveDecorator", "Variable")
# Of what Python has only once, such as names, None and small numbers, equal
# ones are the same.
_SAME = tuple(
    f"ReplaceComparisonOperator_{change}"
    for change in ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
)
LIMIT_S = 900


def main():
    """Draw mutants, run them, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", help="folders of the package")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="skip so many")
    options = parser.parse_args()
    every = [m for room in options.rooms for m in positions(room)]
    draw = random.Random(sampling.SEED)
    draw.shuffle(every)
    every = every[options.first : options.first + options.count]
    survivors = hangs = 0
    for number, (module, names, at) in enumerate(every, options.first):
        change = draw.choice(names)
        source = mutated(module, change, at)
        killer, ends = killed_by(module, source)
        fate = killer if killer and ends else f"{killer} DOES NOT END"
        print(f"{number} {module} {change}:", fate if killer else "SURVIVES")
        survivors += not killer
        hangs += not ends
        if not (killer and ends):
            print(_diff(module, source))
        sys.stdout.flush()
    print(f"of {len(every)} mutants {survivors} survive, {hangs} do not end")


def positions(room):
    """Places of a room's modules that can be changed.

    Returns:
        Triples of a module, the operators that change the place, and which of
        the places of these operators it is.
    """
    from cosmic_ray import plugins
    from cosmic_ray.ast import get_ast

    found = {}
    folder = scripts.ROOT / "keras_towers" / room
    for path in sorted(folder.rglob("*.py")):
        if path.name.startswith("__"):
            continue
        module = path.relative_to(scripts.ROOT).as_posix()
        nodes = list(_nodes(get_ast(path.read_text())))
        for name in plugins.operator_names():
            if any(part in name for part in _LEFT_OUT) or name.endswith(_SAME):
                continue
            operator = plugins.get_operator(name)()
            places = [
                node
                for node in nodes
                for _ in operator.mutation_positions(node)
            ]
            for at, node in enumerate(places):
                if not _is_strictness(node):
                    key = module, node.start_pos, at
                    found.setdefault(key, []).append(name)
    return [(module, names, at) for (module, _, at), names in found.items()]


def _nodes(node):
    """All nodes of a syntax tree, in the order in which they are changed."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _is_strictness(node):
    """Whether it says that ``zip`` fails if a caller has a mistake."""
    argument = node.parent
    return getattr(argument, "type", "") == "argument" and (
        getattr(argument.children[0], "value", "") == "strict"
    )


def mutated(module, change, at):
    """Return the source of a module with a change."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    source = (scripts.ROOT / module).read_text()
    return mutate_code(source, plugins.get_operator(change)(), at)


def killed_by(module, source):
    """Return which tests fail with another source of a module, if any.

    All cases of the tests of the module come first, then what is drawn of those
    of its room.

    Returns:
        the tests, or "" where all succeed, and whether they have ended.
    """
    own, room = _tests_of(module)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("keras_towers", "tests", "docs", "pyproject.toml"):
            copy = shutil.copytree if "." not in name else shutil.copy
            copy(scripts.ROOT / name, pathlib.Path(folder, name))
        pathlib.Path(folder, module).write_text(source)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tensorflow", "keras", "pytest"])
        for tests, marks in ((own, ["-m", "not cluster"]), (room, [])):
            run = context.Process(target=_run, args=(folder, [*tests, *marks]))
            run.start()
            run.join(LIMIT_S)
            ends = run.exitcode is not None
            if not ends:
                run.kill()
                run.join()
            if run.exitcode:
                return " ".join(tests), ends
    return "", True


def _tests_of(module):
    """The tests of a module, and of its room."""
    path = pathlib.PurePath(module).relative_to("keras_towers")
    name = f"test_{path.name.lstrip('_')}"
    own = [f"tests/{path.with_name(name)}"]
    if not (scripts.ROOT / own[0]).exists():
        key = path.with_suffix("").as_posix()
        own = [
            f"tests/{where}"
            for where, names in SHOWN_BY.items()
            if key in names.split()
        ]
    return own, [f"tests/{path.parts[0]}"]


def _run(folder, arguments):
    """Run tests of a folder, in a process that has imported TensorFlow."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "keras_towers"):
            del sys.modules[name]
    import pytest

    with pathlib.Path(folder, "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(
            pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
        )


def _diff(module, source):
    before = (scripts.ROOT / module).read_text().splitlines()
    lines = difflib.unified_diff(
        before, source.splitlines(), module, "mutant", n=2, lineterm=""
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
