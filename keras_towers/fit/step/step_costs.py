"""The costs of a step on towers: exchanges, and undivided computations."""

from __future__ import annotations

import collections
import dataclasses
import functools
import linecache
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import keras_towers
from keras_towers._notices import announce, first_time
from keras_towers._strategy import Strategy
from keras_towers.fit.contract import TRAINING, TowerConfig
from keras_towers.fit.step import trace
from keras_towers.partition.layouts import sizes_of
from keras_towers.partition.program import Program, Tensor
from keras_towers.partition.sizes import (
    EXAMPLES,
    UNKNOWN,
    Size,
    is_data_dependent,
    symbol_name,
)

_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")
    for module in (keras, tf, keras_towers)
)
_costs: weakref.WeakKeyDictionary[Strategy, dict[str, StepCosts]]
_costs = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of a step on towers.

    Attributes:
        exchanges: the number of exchanges.
        rounds: the number of rounds in which they take place.
        fixed: bytes exchanged per step, whatever the batch; None if unknown.
        per_unit: bytes exchanged for each N, the number of examples, or other
            product of sizes that are not fixed.
        held: the bytes per example that a tower with several micro-batches
            holds for all of them until an exchange is over; None: unknown.
        once: by line of code: the fraction of the step's operations that are
            computed once for all towers because of it.
    """

    exchanges: int
    rounds: int
    fixed: int | None
    per_unit: dict[str, int]
    held: int | None
    once: dict[str, float]

    @property
    def exchange_summary(self) -> str:
        """Describe the exchanges; N is the number of examples."""
        exchanges = _count(self.exchanges, "exchange")
        sizes = [f"{_bytes(n)} x {unit}" for unit, n in self.per_unit.items()]
        if self.fixed != 0 or not sizes:
            sizes.insert(0, _bytes(self.fixed))
        rounds = _count(self.rounds, "round")
        return f"{exchanges} in {rounds}, {' + '.join(sizes)}"

    @property
    def once_summary(self) -> list[str]:
        """Describe the operations computed once, most expensive first."""
        shares = sorted(self.once.items(), key=lambda item: -item[1])
        return [
            f"computed once for all towers: {line} ({share:.1%} of the step)"
            for line, share in shares
        ]


def record_costs(
    config: TowerConfig, kind: str, model: str, program: Program, parts: int
) -> None:
    """Record the costs of a step, and announce once what is not divided.

    Args:
        config: the towers that run the step.
        kind: the method of Keras that the step belongs to.
        model: the name of its model.
        program: the program that the towers run.
        parts: the number of micro-batches in all processes.
    """
    other = "prediction" if "predict" in kind else "evaluation"
    name = f"{'training' if kind in TRAINING else other} of {model!r}"
    costs = costs_of(program, parts)
    _costs.setdefault(config.strategy, {})[name] = costs
    first, *more = costs.once_summary or [""]
    if first and config.peers.rank == 0 and first_time((name, first)):
        announce(f"{name}: {first}{', ...' if more else ''}")


def describe_steps(config: TowerConfig) -> list[str]:
    """Describe the steps that ran under a strategy."""
    lines = []
    for name, costs in _costs.get(config.strategy, {}).items():
        lines.append(f"{name}: {costs.exchange_summary}")
        if config.options.micro_batches != 1 and costs.held != 0:
            held = f"{_bytes(costs.held)} per example"
            lines.append(f"{name}: held for all micro-batches: {held}")
        lines += [f"{name}: {line}" for line in costs.once_summary]
    return lines


def costs_of(program: Program, towers: int) -> StepCosts:
    """Return the costs of a program on a number of towers."""
    # Level, tensor, and shape of what all towers contribute.
    exchanged: list[tuple[int, Tensor, Sequence[Any]]] = []
    for exchange in program.exchanges:
        tensor, sizes = exchange.given, exchange.sizes
        if sizes is None:
            times = 1 if exchange.kind == "sum" else towers
            sizes = [times, *_sizes(tensor)]
        if exchange.kind != "first":
            exchanged.append((tensor.level, tensor, sizes))
    for update in program.updates:
        for part in update.given:
            if part in update.rows:
                sizes = [update.rows[part], *_sizes(part)[1:]]
                exchanged.append((update.level, part, sizes))
            elif part.on_towers:
                exchanged.append((update.level, part, _sizes(part)))
    fixed: Any = 0
    per_unit: collections.Counter[str] = collections.Counter()
    for _, tensor, sizes in exchanged:
        size: Any = math.prod(sizes, start=tensor.dtype.size)
        if isinstance(size, Size) and not is_data_dependent(size):
            per_unit[_unit(size)] += size.number
        else:
            fixed += size if isinstance(size, int) else UNKNOWN
    rounds = len({level for level, _, _ in exchanged})
    return StepCosts(
        exchanges=len(exchanged),
        rounds=rounds,
        fixed=None if fixed is UNKNOWN else fixed,
        per_unit=dict(sorted(per_unit.items())),
        held=_held_bytes(program),
        once=_once(program),
    )


def _sizes(tensor: Tensor) -> list[Any]:
    """Return the shape of a tensor, with ``UNKNOWN`` sizes."""
    if tensor.shape.rank is None:
        return [UNKNOWN]
    return list(sizes_of(tensor.shape))


def _unit(size: Size) -> str:
    """Name what a size is a multiple of."""
    example = symbol_name(EXAMPLES)
    names = [
        "N" if name == example else "length"
        for name, power in size.powers
        for _ in range(power)
    ]
    return " x ".join(sorted(names))


def _held_bytes(program: Program) -> int | None:
    """Return the bytes per example that towers hold from level to level."""
    later = {
        tensor
        for operation in program.operations
        for tensor in operation.inputs
        if operation.on_towers
        and tensor.on_towers
        and tensor.operation is not None
        and not tensor.operation.is_repeated
        and tensor.level < operation.level
    }
    later.update(e.given for e in program.exchanges if e.kind == "gather")
    held = 0
    for tensor in later:
        if tensor.shape.rank is None:
            return None
        sizes = [size for size in tensor.shape if size is not None]
        if tensor.shape.rank - len(sizes) > 1:
            return None
        if len(sizes) < tensor.shape.rank:
            held += math.prod(sizes) * tensor.dtype.size
    return held


def _once(program: Program) -> dict[str, float]:
    undivided = {id(operation) for operation in program.computed_once}
    causes: dict[Any, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for operation in program.operations:
        cause = next((causes[t] for t in operation.inputs if t in causes), None)
        if id(operation.source) in undivided:
            cause = line_of(operation.source)
        if cause is not None and not operation.on_towers:
            causes.update(dict.fromkeys(operation.outputs, cause))
            counts[cause] += operation.source is not None
    total = sum(len(graph.get_operations()) for graph in program.graphs)
    return {line: count / total for line, count in counts.items()}


def line_of(operation: Any) -> str:
    """Return the innermost line of the user's code, or the operation's name."""
    for frame in reversed(list(operation.traceback)):
        path = frame.filename
        if path == trace.__file__:
            break
        if _is_users(path):
            line = linecache.getline(path, frame.lineno).strip()
            return f"{os.path.basename(path)}:{frame.lineno}: {line}"
    return operation.name.rpartition("/")[0] or operation.type


@functools.cache
def _is_users(path: str) -> bool:
    path = os.path.abspath(path)
    return not path.startswith(_LIBRARIES) and os.path.exists(path)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(number: int | None) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number is not None and number >= least:
            return f"{number / least:.3g} {unit}"
    return "? bytes" if number is None else _count(number, "byte")
