"""What the pages say of the package's source is so."""

import ast
import contextlib
import importlib.util
import inspect
import re
from graphlib import TopologicalSorter

import keras
import pytest

from keras_towers.fit import keras_patches
from keras_towers.foundation import compat
from keras_towers.jobs.known_engines import ENGINES
from tests.docs.pages import ROOT, callbacks_by_rank

pytestmark = pytest.mark.core

PACKAGE = ROOT / "keras_towers"
PAGE = (ROOT / "docs" / "errors.md").read_text()
# What its items begin with.
MESSAGES = re.findall(
    r"^\* `([^`]+)`", PAGE.partition("## No error")[0], re.MULTILINE
)
# The parts as a table lists them, from the top down.
ORDER = re.findall(
    r"\b([a-z_]+(?:\.py|/))",
    (ROOT / "docs" / "architecture.md")
    .read_text()
    .partition("## The modules")[2]
    .split("```")[1],
)
# Classes and types at the outermost level of a module; constants are none.
DEFINED = re.compile(
    r"^(?:class )?([A-Z]\w*[a-z]\w*)(?=[(:]| [=:])", re.MULTILINE
)


def test_the_page_says_which_ranks_run_each_callback_of_keras():
    """Those of this Keras; ``tests/processes/roles.py`` runs them."""
    installed = {
        name
        for name, kind in vars(keras.callbacks).items()
        if isinstance(kind, type) and issubclass(kind, keras.callbacks.Callback)
    } - {"Callback", "CallbackList"}
    newer = {"OrbaxCheckpoint"} if compat.KERAS < (3, 14) else set()
    assert callbacks_by_rank().keys() == installed | newer


def shown_types(entry):
    """The words of the types that the reference shows of an object."""
    module, _, name = entry.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    # The others have none that Python knows of.
    parts = []
    with contextlib.suppress(TypeError, ValueError):
        parts.append(inspect.signature(found))
    if isinstance(found, type):
        parts += vars(found).get("__annotations__", {}).values()
        parts += [
            inspect.signature(member.fget).return_annotation
            for member in vars(found).values()
            if isinstance(member, property)
        ]
    return {word for part in parts for word in re.findall(r"\w+", str(part))}


def test_the_reference_explains_every_type_it_shows():
    page = (ROOT / "docs" / "api.md").read_text()
    entries = re.findall(r"^::: (keras_towers[.\w]+)$", page, re.MULTILINE)
    explained = {entry.rpartition(".")[2] for entry in entries}
    ours = {
        name
        for path in PACKAGE.rglob("*.py")
        # Its tensors are not those of the reference, which are TensorFlow's.
        if "partition" not in path.relative_to(PACKAGE).parts
        for name in DEFINED.findall(path.read_text())
    }
    # Without Horovod or BytePS, their drop-ins cannot be imported.
    missing = {
        f"keras_towers.{engine.name}."
        for engine in ENGINES.values()
        if engine.module and importlib.util.find_spec(engine.name) is None
    }
    there = [e for e in entries if not e.startswith(tuple(missing))]
    shown = set().union(*map(shown_types, there))
    shown &= ours
    assert {"Towers", "Batches", "ModeName"} <= shown
    assert shown <= explained


# What a launched process sets up before its script begins, in functions.
UPWARDS = {
    "keras_towers/jobs/launching/script.py": {
        *("strategies/", "parameter_servers/", "fit/"),
    },
    "keras_towers/jobs/launching/late_entry.py": {"fit/"},
    # Once the function has been called.
    "keras_towers/jobs/launching/function_job.py": {"fit/"},
}


def named(path, for_types=True):
    """The modules and names that a file imports, in functions too.

    Args:
        path: the file.
        for_types: whether those count that only its types need.
    """
    tree = ast.parse(path.read_text())
    left_out = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and not for_types
        if ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path):
    """The parts of the package that a file imports."""
    for name in named(path, for_types=False):
        package, part, *_ = [*name.split("."), ""]
        if package != "keras_towers":
            continue
        if (PACKAGE / part).is_dir():
            yield f"{part}/"
        elif (PACKAGE / f"{part}.py").exists():
            yield f"{part}.py"


def test_imports_go_downwards():
    place = {part: index for index, part in enumerate(ORDER)}
    assert "fit/" in place and "foundation/" in place
    wrong = {
        f"{path.relative_to(ROOT)} imports {part}"
        for path in PACKAGE.rglob("*.py")
        for may in [UPWARDS.get(str(path.relative_to(ROOT)), ())]
        for own in [path.relative_to(PACKAGE).parts[0]]
        for own in [own if own.endswith(".py") else f"{own}/"]
        for part in imported(path)
        if own in place and part in place and place[part] < place[own]
        if part not in may
    }
    assert not wrong, "\n".join(sorted(wrong))


def module_of(path):
    """The name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_no_files_import_one_another():
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    imports = {
        module: {
            name
            for name in paths.keys() & named(paths[module])
            # The package itself imports its names as they are asked for.
            if name not in (module, "keras_towers")
        }
        for module in paths
    }
    contract = imports["keras_towers.fit.components"]
    assert {name for name in contract if ".fit." in name} == {
        f"keras_towers.fit.{name}" for name in ("options", "places")
    }
    # A step asks for an update, which knows of no step, as all below it.
    assert not {
        (module, name)
        for module, names in imports.items()
        for name in names
        if module.startswith("keras_towers.fit.")
        if module.split(".")[2] not in ("step", "calls", "keras_patches")
        if name.startswith("keras_towers.fit.step.")
    }
    # From above and from below, all goes that is in no circle.
    while free := {
        module
        for module, names in imports.items()
        if not names or not any(module in names for names in imports.values())
    }:
        imports = {
            module: names - free
            for module, names in imports.items()
            if module not in free
        }
    assert not imports, "\n".join(sorted(imports))


def modules_in_order(room):
    """The modules of a room and of its rooms, in the order of its docstring."""
    said = importlib.import_module(room).__doc__
    for name in re.findall(r"^``(\w+)``$", said, re.M):
        if (ROOT / room.replace(".", "/") / name).is_dir():
            yield from modules_in_order(f"{room}.{name}")
        else:
            yield f"{room}.{name}"


def test_files_of_the_partition_import_what_is_listed_before_them():
    room = "keras_towers.partition"
    place = {name: k for k, name in enumerate(modules_in_order(room))}
    wrong = {
        f"{name} imports {other}"
        for name in place
        for path in [ROOT / f"{name.replace('.', '/')}.py"]
        for other in place.keys() & named(path)
        if place[other] >= place[name]
    }
    files = (PACKAGE / "partition").rglob("[!_]*.py")
    assert place.keys() == {
        module_of(path) for path in files if path.parent.name != "rules"
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("room", ["jobs", "fit.step"])
def test_rooms_of_a_room_do_not_import_one_another(room):
    """A file of the room itself is a room of its own."""
    package = f"keras_towers.{room}."
    imports = {}
    for path in (PACKAGE / room.replace(".", "/")).rglob("[!_]*.py"):
        own = module_of(path).removeprefix(package).split(".")[0]
        imports.setdefault(own, set()).update(
            name.removeprefix(package).split(".")[0]
            for name in named(path)
            if name.startswith(package)
        )
    assert len(imports) > 2
    order = TopologicalSorter(
        {own: names - {own} for own, names in imports.items()}
    )
    order.prepare()


def test_parts_of_fit_import_what_is_named_before_them():
    room = "keras_towers.fit"
    said = importlib.import_module(room).__doc__.partition("bottom up:")[2]
    order = re.findall(r"``(\w+)``", said.partition("But")[0])
    parts = {}
    for path in PACKAGE.glob("fit/[a-z]*/**/*.py"):
        parts.setdefault(path.relative_to(PACKAGE).parts[1], []).append(path)
    parts |= {path.stem: [path] for path in PACKAGE.glob("fit/[a-z]*.py")}
    assert sorted(order) == sorted(parts)
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for place, part in enumerate(order)
        for path in parts[part]
        for name in named(path, for_types=False)
        if name.startswith(
            tuple(f"{room}.{other}." for other in order[place + 1 :])
        )
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_part_is_listed():
    folders = {
        f"{path.parent.name}/" for path in PACKAGE.glob("[a-z]*/__init__.py")
    }
    files = {
        path.name
        for path in PACKAGE.glob("*.py")
        if not path.name.startswith("__")
    }
    assert folders | files <= set(ORDER)


def written(node):
    """A string of the source, with an ellipsis for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # A field of a format.
        return re.sub("%[rsd]", "…", node.value)
    return "…"


def test_messages_that_are_explained_exist():
    strings = [
        written(node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    ]
    assert len(MESSAGES) > 10
    for message in MESSAGES:
        assert re.search(r"[a-z]{4}", message)
        fragment = message.strip("… ")
        assert any(fragment in string for string in strings), message


def test_all_replacements_are_listed():
    replaces = re.compile(
        r"\bpatches\.(shadowed|overridden|replaced|patched_while_used)\("
    )
    files = {
        "/".join(path.relative_to(PACKAGE).parts[-2:])
        for path in PACKAGE.rglob("*.py")
        if replaces.search(path.read_text())
    } - {"fit/keras_patches.py"}
    assert len(files) > 9
    assert {f for f in files if f not in keras_patches.__doc__} == set()
