"""Tries the code in the rows of the page on migration."""

import ast
import contextlib
import inspect
import itertools
import json
import os
import typing
from unittest import mock

import keras
import pytest

import keras_towers as kt
from keras_towers.strategies import distributed, options
from tests.kit.served import Job

DEVICES = ["/cpu:0", "/cpu:1"]
# What takes the options, and has the attributes, that a section's rows name.
KINDS = {
    "From tf.distribute": "MultiWorkerTowerStrategy",
    "From TensorFlow 1's SyncReplicasOptimizer": "SyncReplicasStrategy",
}
_jobs = itertools.count()


@contextlib.contextmanager
def served():
    """A job with a parameter server; this process is the only worker."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(f"migration_{next(_jobs)}", 1, patch)
        connection = job.connect(0)
        patch.setattr(distributed, "take_role", lambda *_: connection)
        patch.setenv("TF_CONFIG", connection.cluster.written())
        try:
            yield
        finally:
            job.close()


def place_of(kind):
    """Where an object of a class can be made."""
    if kind.startswith(("Distributed", "SyncReplicas")):
        return served()
    if kind.startswith("MultiWorker"):
        task = {"type": "worker", "index": 0}
        job = {"cluster": {"worker": ["localhost:1"]}, "task": task}
        return mock.patch.dict(os.environ, TF_CONFIG=json.dumps(job))
    if kind.startswith("Horovod"):
        pytest.importorskip("horovod")
    return contextlib.nullcontext()


def class_of(kind):
    """A class; a strategy of BytePS would make this process a worker."""
    if kind.startswith("BytePS"):
        return options.Options
    return keras.optimizers.SGD if kind == "SGD" else getattr(kt, kind)


def read(node):
    """The value of an argument, as rows write it."""
    if isinstance(node, ast.Name):
        return 1 if node.id == "towers" else DEVICES
    return ast.literal_eval(node)


def taken(kind):
    """What a class takes, by name: annotations and defaults, as fields."""
    parameters = dict(inspect.signature(kind).parameters)
    if "options" in parameters:
        parameters |= inspect.signature(options.Options).parameters
    return parameters


def allowed(option):
    """The values of an option, which a row may leave open."""
    parts = typing.get_args(eval(option.annotation, vars(options)))
    values = [value for part in parts for value in typing.get_args(part)]
    return values or [True, False]


def value_of(made, name):
    given = getattr(made, "_options", made)
    return getattr(given if hasattr(given, name) else made, name)


def assert_takes(row, kind, arguments, given):
    """A class takes options, and gives its objects these."""
    made = class_of(kind)
    # Those of the strategy itself, of BytePS's, too.
    accepted = taken(getattr(kt, kind, made))
    values = [
        allowed(accepted[name]) if value is ... else [value]
        for name, value in given.items()
    ]
    for one in itertools.product(*values):
        named = dict(zip(given, one, strict=True))
        with place_of(kind):
            found = made(*arguments, **named)
        assert {name: value_of(found, name) for name in named} == named
    # A row shows the default only where it says so.
    if "default" not in row.here:
        assert not [n for n in given if given[n] == accepted[n].default]


def try_code(row):
    """Use what the code in a row names: options, attributes and functions."""
    kind, last = KINDS.get(row.section, "TowerStrategy"), None
    for node in row.expressions:
        text = ast.unparse(node)
        root, _, path = text.partition("(")[0].partition(".")
        if isinstance(node, ast.Constant) and last:
            # Another value of the option before.
            if node.value is not ...:
                assert_takes(row, kind, [], {last: node.value})
        elif isinstance(node, ast.Call) and text.startswith("_("):
            (option,) = node.keywords
            last = option.arg
            takes = last in taken(getattr(kt, kind))
            taker = kind if takes else "SGD"
            assert_takes(row, taker, [], {last: read(option.value)})
        elif "Strategy(" in text:
            kind = (path or root).rpartition(".")[2]
            given = {option.arg: read(option.value) for option in node.keywords}
            last = next(iter(given), None)
            assert_takes(row, kind, [*map(read, node.args)], given)
        elif root == "strategy" and path:
            assert hasattr(getattr(kt, kind), path)
        elif root in ("kt", "keras") and path:
            if path.startswith("elastic"):
                pytest.importorskip("horovod")
            named = eval(f"{root}.{path}", {"kt": kt, "keras": keras})
            if isinstance(node, ast.Call):
                given = {option.arg: option for option in node.keywords}
                inspect.signature(named).bind(*node.args, **given)
