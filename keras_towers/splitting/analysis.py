"""Whether a traced step splits over towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from keras_towers.splitting.interpreter import Draw, Effect, Interpreter
from keras_towers.splitting.values import (
    Degree,
    Kind,
    Value,
    other,
    same,
    total,
)

What: TypeAlias = Literal["gradient", "log", "metric", "state", "output"]

MEAN = -1
SUM = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step hands on.

    Attributes:
        what: "gradient", "log" or "output", which has a row for each example.
        name: its name, for messages.
        tensors: what it consists of: one tensor, or, of a gradient with
            indices, its values.
        degree: what the towers' values are added up as: ``MEAN`` over
            examples, or ``SUM``.
        places: of a gradient with indices, these.
    """

    what: What
    name: str
    tensor: Any
    degree: int = MEAN
    places: Any = None


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable that a step may use.

    Attributes:
        name: its name, for messages.
        merge: what the towers' values become before anything but a step reads
            them: their "sum"; their "mean", weighted by the towers' numbers of
            examples; None: one of them, as all have to be the same.
    """

    name: str
    merge: Literal["sum", "mean"] | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something that the towers' values do not add up to.

    Attributes:
        what: "gradient", "log", "metric" (a sum), "state" or "output".
        names: the names of what differs.
        text: why: "takes the largest value of the batch".
        operation: the operation that does it.
        is_open: whether they may add up nevertheless, as nobody knows.
        variables: the keys of the variables among what differs.
    """

    what: What
    names: tuple[str, ...]
    text: str
    operation: Any
    is_open: bool = False
    variables: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What is known of a step.

    Attributes:
        differences: what the towers' values do not add up to.
        draws: the random numbers of the step.
        effects: what happens once for every tower, or for all if it is alike.
        unknown: types of operations that have no rule.
        count: the number of operations.
        values: what the tensors of the graph are, by their names.
        causes: the differences of a first step, before which all towers hold
            the same, where later steps differ by more; else empty.
    """

    differences: tuple[Difference, ...]
    draws: tuple[Draw, ...]
    effects: tuple[Effect, ...]
    unknown: frozenset[str]
    count: int
    values: Mapping[str, Value]
    causes: tuple[Difference, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether the towers do together what one device does.

        What is alike on all of them is to happen once.
        """
        alike = all(effect.is_alike for effect in self.effects)
        return not self.differences and alike


def analyse(
    graph: Any,
    inputs: Sequence[Value],
    variables: Mapping[Any, Variable],
    results: Iterable[Result],
) -> Analysis:
    """Find out whether a traced step splits over towers.

    Args:
        graph: the graph of the step of one tower, with an unknown number of
            examples.
        inputs: what its inputs are; handles of variables have their keys.
        variables: the variables, by the keys of their handles.
        results: what the step hands on.
    """
    results = list(results)
    # A step follows another: what towers hold may already be a mean.
    means = {k for k, variable in variables.items() if variable.merge == "mean"}
    analysis, _ = _pass(graph, inputs, variables, results, means)
    if analysis.is_proven or not means:
        return analysis
    # Or all towers write the same, which says more.
    apart: set[Any] = set()
    causes: tuple[Difference, ...] = ()
    while True:
        analysis, not_same = _pass(graph, inputs, variables, results, apart)
        if not causes and any(not d.is_open for d in analysis.differences):
            causes = analysis.differences
        if not_same <= apart:
            return dataclasses.replace(analysis, causes=causes)
        apart |= not_same


def _pass(
    graph: Any,
    inputs: Sequence[Value],
    variables: Mapping[Any, Variable],
    results: Sequence[Result],
    apart: set[Any],
) -> tuple[Analysis, set[Any]]:
    """Analyse a step, before which variables that are apart hold means.

    Returns:
        The analysis, and the variables with means that are not the same on all
        towers after it.
    """
    initial = {
        key: total()
        if variable.merge == "sum"
        else total(MEAN)
        if key in apart
        else same()
        for key, variable in variables.items()
    }
    interpreter = Interpreter(initial)
    values = interpreter.run(graph, inputs)
    found = []
    for result in results:
        value = values[result.tensor.name]
        if result.places is not None:
            value = _added_up(value, values[result.places.name])
        if result.what == "output":
            why = _why_no_rows(value)
        else:
            why = _why_no_sum(value, result.degree)
        if why is not None:
            at = result.tensor.op
            found.append(_difference(result.what, result.name, why, value, at))
    not_same = set()
    for key, operation in interpreter.written.items():
        value, variable = interpreter.state[key], variables[key]
        why = _why_no_state(value, variable)
        what: What = "metric" if variable.merge == "sum" else "state"
        if why is not None:
            found.append(
                _difference(what, variable.name, why, value, operation, key)
            )
        if variable.merge == "mean" and not value.is_same:
            not_same.add(key)
    analysis = Analysis(
        _merged(found),
        tuple(interpreter.draws.values()),
        tuple(e for es in interpreter.effects.values() for e in es),
        frozenset(interpreter.unknown),
        interpreter.count,
        values,
    )
    return analysis, not_same


def _difference(
    what: What, name: str, why: str, value: Value, at: Any, key: Any = None
) -> Difference:
    """Return what differs, by the cause of its value or the operation."""
    reason = value.reason
    return Difference(
        what,
        (name,),
        why,
        at if reason is None else reason.operation or at,
        reason is not None and reason.is_open,
        () if key is None else (key,),
    )


def _merged(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return differences, of which those with one cause are one."""
    merged: dict[Any, Difference] = {}
    for found in differences:
        cause = found.what, found.text, found.operation, found.is_open
        before = merged.get(cause, found)
        if before is not found:
            found = dataclasses.replace(
                before,
                names=before.names + found.names,
                variables=before.variables + found.variables,
            )
        merged[cause] = found
    return tuple(merged.values())


def _added_up(rows: Value, places: Value) -> Value:
    """Return the value of a gradient's rows, which are added up by indices."""
    if Kind.OTHER in (rows.kind, places.kind):
        return rows if rows.kind is Kind.OTHER else places
    a, b = rows.rows, places.rows
    if a is None and places.is_same:
        return rows
    text = "adds rows of a gradient up by the indices of others"
    if a is None or b is None or not places.is_free:
        return other(text)
    if a.draw is not None or b.draw is not None or a.unit != b.unit:
        return other(text)
    if not (a.uniform or b.uniform or a.place == b.place):
        return other(text)
    return total(rows.degree)


def _why_no_sum(value: Value, degree: int) -> str | None:
    if value.reason is not None:
        return value.reason.text
    if value.kind is Kind.ROWS:
        return "has a row for each example"
    if value.kind not in (Kind.SAME, Kind.SUM):
        return "is no tensor of numbers"
    own: Degree = value.degree_as_sum
    if own in (degree, None):
        return None
    if (own, degree) == (SUM, MEAN):
        return "is a sum over the examples, not their mean"
    if (own, degree) == (MEAN, SUM):
        return "is a mean over the examples, not their sum"
    return "scales with the number of examples"


def _why_no_rows(value: Value) -> str | None:
    if value.reason is not None:
        return value.reason.text
    rows = value.rows
    if rows is None or rows.axis or rows.unit is not None:
        return "has no row for each example, one after the other"
    if rows.outer > 1 and not rows.uniform:
        return "has no row for each example, one after the other"
    return None if value.is_free else "scales with the number of examples"


def _why_no_state(value: Value, variable: Variable) -> str | None:
    if variable.merge is not None:
        return _why_no_sum(value, SUM if variable.merge == "sum" else MEAN)
    if value.is_same:
        return None
    return _why_no_sum(value, MEAN) or "is a mean over the tower's examples"
