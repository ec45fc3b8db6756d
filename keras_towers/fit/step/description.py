"""What a step costs on towers: exchanges, and what is computed once for all."""

from __future__ import annotations

import collections
import dataclasses
import linecache
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import keras_towers
from keras_towers._notices import announce, is_news
from keras_towers._strategy import Strategy
from keras_towers.fit.contract import TRAINING, TowerConfig
from keras_towers.fit.step import trace
from keras_towers.partition.program import Program, Tensor
from keras_towers.partition.sizes import EXAMPLES, Size

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep
    for module in (keras, tf, keras_towers)
)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What a step costs on towers.

    Attributes:
        exchanges: the number of exchanges.
        rounds: the number of rounds in which they take place.
        fixed: their bytes, whatever the batch.
        per_example: those for each example.
        are_all: whether these are all of their bytes.
        once: by the line of code that asks for it: the share of the step's
            operations that are computed once for all towers because of it.
    """

    exchanges: int
    rounds: int
    fixed: int
    per_example: int
    are_all: bool
    once: Mapping[str, float]

    @property
    def described(self) -> str:
        """The exchanges in words; N is the number of examples."""
        parts = [_in_units(self.fixed)] if self.fixed else []
        if self.per_example:
            parts.append(f"{_in_units(self.per_example)} x N")
        if not self.are_all:
            parts.append("what a batch decides")
        exchanges = f"{self.exchanges} exchange{_s(self.exchanges)}"
        rounds = f"{self.rounds} round{_s(self.rounds)}"
        return f"{exchanges} in {rounds}, {' + '.join(parts) or '0 bytes'}"

    @property
    def described_once(self) -> list[str]:
        """What is computed once in words, most of it first."""
        found = sorted(self.once.items(), key=lambda item: -item[1])
        said = "computed once for all towers"
        return [f"{said}: {line} ({x:.1%} of the step)" for line, x in found]


_costs: weakref.WeakKeyDictionary[Strategy, dict[str, StepCosts]] = (
    weakref.WeakKeyDictionary()
)


def note(config: TowerConfig, kind: str, model: str, program: Program) -> None:
    """Note what a step costs; say what is computed once, once."""
    evaluates = kind in ("evaluate", "test_on_batch")
    does = "evaluation" if evaluates else "prediction"
    name = f"{'training' if kind in TRAINING else does} of {model!r}"
    costs = costs_of(program, config.num_replicas)
    _costs.setdefault(config.strategy, {})[name] = costs
    first, *others = costs.described_once or [""]
    if first and config.peers.rank == 0 and is_news((name, first)):
        announce(f"{name}: {first}{', ...' if others else ''}")


def described(strategy: Strategy) -> list[str]:
    """Describe the steps that ran under a strategy."""
    lines = []
    for name, costs in _costs.get(strategy, {}).items():
        every = [costs.described, *costs.described_once]
        lines += [f"{name}: {line}" for line in every]
    return lines


def costs_of(program: Program, towers: int) -> StepCosts:
    """Return what a program costs on a number of towers."""
    # Levels, what a tower gives, and how large it is together along an axis.
    given: list[tuple[int, Tensor, int | None, Any]] = []
    for exchange in program.exchanges:
        own, size = exchange.given, exchange.size
        if size is not None:
            given.append((own.level, own, exchange.axis, size))
        elif exchange.kind != "first":
            times = 1 if exchange.kind == "sum" else towers
            given.append((own.level, own, None, times))
    for update in program.updates:
        parts = [part for part in update.given if part.on_towers]
        given += [(update.level, part, None, 1) for part in parts]
    fixed, per_example, are_all = 0, 0, True
    for _, own, axis, size in given:
        shape = own.shape if own.shape.rank is not None else [None]
        sizes = [s for a, s in enumerate(shape) if a != axis]
        grows = isinstance(size, Size) and size.powers == EXAMPLES.powers
        if None in sizes or not (grows or isinstance(size, int)):
            are_all = False
        elif grows:
            per_example += math.prod(sizes) * own.dtype.size * size.number
        else:
            fixed += math.prod(sizes) * own.dtype.size * size
    return StepCosts(
        exchanges=len(given),
        rounds=len({level for level, _, _, _ in given}),
        fixed=fixed,
        per_example=per_example,
        are_all=are_all,
        once=_once(program),
    )


def _once(program: Program) -> dict[str, float]:
    taking_rows = {id(operation) for operation in program.once}
    causes: dict[Any, str] = {}
    found: collections.Counter[str] = collections.Counter()
    for operation in program.operations:
        cause = next((causes[t] for t in operation.inputs if t in causes), None)
        if id(operation.source) in taking_rows:
            cause = _line_of(operation.source)
        if cause is not None and not operation.on_towers:
            causes.update(dict.fromkeys(operation.outputs, cause))
            found[cause] += operation.source is not None
    total = sum(len(graph.get_operations()) for graph in program.graphs)
    return {line: count / total for line, count in found.items()}


def _line_of(operation: Any) -> str:
    """The innermost line of the step that is no library's, or a name."""
    for frame in reversed(list(operation.traceback)):
        path = os.path.abspath(frame.filename)
        if path == os.path.abspath(trace.__file__):
            break
        if not path.startswith(_LIBRARIES) and os.path.exists(path):
            line = linecache.getline(path, frame.lineno).strip()
            return f"{os.path.basename(path)}:{frame.lineno}: {line}"
    return operation.name.rpartition("/")[0] or operation.type


def _in_units(size: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} bytes"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
