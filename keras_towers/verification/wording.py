"""Findings in words."""

from __future__ import annotations

from collections.abc import Iterable

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.verify import layers as layers_lib
from keras_towers.verification.compare import Differences
from keras_towers.verification.rehearsal import Options
from keras_towers.verification.remedies import IN_A_GRAPH, REMEDIES
from keras_towers.verification.report import Finding, Kind


def of_failure(model: keras.Model, error: Exception) -> Finding:
    """Tell why a step fails on parts of a batch that one device can train."""
    said = _said_by(error)
    if names := layers_lib.stateful(model):
        message = f"{names[0]} keeps a state for each row of a batch ({said})"
        return finding(Kind.STATEFUL, names[0], message)
    if names := layers_lib.fixed_inputs(model):
        message = f"input {names[0]} has a fixed batch size ({said})"
        return finding(Kind.FIXED_BATCH, names[0], message)
    if "merge_call" in str(error):
        message = "towers update weights, or exchange values, unequally often"
        return finding(Kind.UPDATES, "the step", message)
    message = f"the step works on the whole batch, but fails on parts: {said}"
    return finding(Kind.FAILS, type(error).__name__, message)


def of_trace(error: Exception) -> Finding:
    """Tell why a step that runs eagerly fails where ``fit`` traces it."""
    message = (
        "the step works on values, but not as the graph on towers that fit "
        f"makes of it: {_said_by(error)}"
    )
    return Finding(Kind.FAILS, type(error).__name__, message, IN_A_GRAPH)


def _said_by(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    # TensorFlow begins with a traceback where it has converted the code.
    said = lines[-1 if lines[0].endswith("in user code:") else 0].strip()
    if isinstance(error, TowerError) or len(said) <= 200:
        return said
    return f"{said[:200]}..."


def sum_or_mean(options: Options, off: Differences) -> Finding:
    """Say that the other kind of loss was expected."""
    if options.average:
        message = f"the loss of {named(off)} is a sum over examples"
        return finding(Kind.SUM, off, message)
    message = f"the loss of {named(off)} is a mean over examples"
    return finding(Kind.MEAN, off, message)


def finding(kind: Kind, what: Differences | str, message: str) -> Finding:
    """Make a finding of what differs, the largest first, or of a name."""
    if isinstance(what, str):
        return Finding(kind, what, message, REMEDIES[kind])
    name, size = next(iter(what.items()))
    return Finding(kind, name, message, REMEDIES[kind], size)


def named(names: Iterable[str]) -> str:
    """List names in a few words."""
    first, *others = names
    more = f" and {len(others)} others" if len(others) > 1 else ""
    return f"{first} and {others[0]}" if len(others) == 1 else first + more


def brief(array: object) -> str:
    """Write a log, unless it is long."""
    text = str(array)
    return text if len(text) < 20 else "another value"
