"""Reports on steps, for users: their costs, and what XLA leaves out.

``describe()`` and log lines show them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterable

import keras
import tensorflow as tf

from keras_towers.fit.components import TRAINING, KerasStrategy, TowerConfig
from keras_towers.fit.places import Places
from keras_towers.fit.step.graph.code_lines import line_of
from keras_towers.fit.step.reports.step_costs import StepCosts, costs_of
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.notices import announce, first_time, logger
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.partition.timeline.timeline import StepPlan, Timeline
from keras_towers.partition.xla.xla_pieces import Stages
from keras_towers.transport.devices import all_on_host

# The part that is not used of what TensorFlow's allocator of CPUs and glibc
# hold: they take larger pieces of memory than needed, and keep freed ones.
_GAPS = 12

# The bytes of a process for an operation in a graph, and those until TensorFlow
# has optimized the graph: of Python, and several times of TensorFlow.
_PER_OPERATION = 17 * 2**10
_PER_BUILT = 25 * 2**10

_costs: weakref.WeakKeyDictionary[Strategy, dict[str, StepCosts]]
_costs = weakref.WeakKeyDictionary()
# The models of these steps.
_models: weakref.WeakKeyDictionary[
    Strategy, dict[str, weakref.ref[keras.Model]]
]
_models = weakref.WeakKeyDictionary()
# What is said of the functions that the steps of a model call once.
_called_once: weakref.WeakKeyDictionary[keras.Model, dict[str, None]]
_called_once = weakref.WeakKeyDictionary()


def record_costs(
    config: TowerConfig,
    kind: str,
    model: keras.Model,
    timeline: Timeline,
    places: Places,
    how: str = "",
) -> None:
    """Record the costs of a step; announce once what is not divided.

    Args:
        config: the towers that run the step.
        kind: the method of Keras that the step belongs to.
        model: its model.
        timeline: when the towers compute what.
        places: where they run it.
        how: how it is made to fit into memory.
    """
    name, ranks = _name_of(kind, model), places.ranks
    parts = places.towers * places.micro_batches * ranks.step.size
    costs = costs_of(timeline, parts, ranks.step.size, places.columns)
    if places.micro_batches == 1:
        costs = dataclasses.replace(costs, held={})
    costs = dataclasses.replace(costs, how_it_fits=how)
    _costs.setdefault(config.strategy, {})[name] = costs
    _models.setdefault(config.strategy, {})[name] = weakref.ref(model)
    said = costs.announcement
    if said and ranks.job.rank == 0 and first_time(model, "computed once"):
        announce(f"{name}: {said}")


def record_called_once(
    config: TowerConfig, model: keras.Model, function: str, difference: str
) -> None:
    """Record, and announce once, that plain Keras calls a function twice.

    Args:
        config: the towers that run the step.
        model: its model.
        function: the name of the function, which the user lets recompute.
        difference: what its second call does.
    """
    line = (
        f"{_name_of('fit', model)} calls {function} once. Plain Keras, which "
        f"calls it again for gradients, {difference}."
    )
    _called_once.setdefault(model, {})[line] = None
    if config.job.rank == 0 and first_time(model, line):
        announce(line)


def called_once(model: keras.Model) -> tuple[str, ...]:
    """Return what ``record_called_once`` has said of a model."""
    return tuple(_called_once.get(model, ()))


def record_graph(
    config: TowerConfig, kind: str, model: keras.Model, graph: tf.Graph
) -> None:
    """Record the graph of a step, once the step has been added.

    Args:
        config: the towers that run the step.
        kind: the method of Keras that the step belongs to.
        model: its model.
        graph: the graph, with all functions that it calls.
    """
    operations = graph.get_operations()
    calls = collections.Counter(
        operation.get_attr("f").name
        for operation in operations
        if operation.type.endswith("PartitionedCall")
    )
    built = held = len(operations)
    for function in graph._functions.values():
        number = len(function.definition.node_def)
        built += number
        # TensorFlow has one for each tower that calls it.
        held += number * max(1, calls[tf.compat.as_str(function.name)])
    costs, name = _costs[config.strategy], _name_of(kind, model)
    costs[name] = dataclasses.replace(
        costs[name],
        graph_bytes=_PER_OPERATION * held,
        building_bytes=_PER_BUILT * built,
    )


def _name_of(kind: str, model: keras.Model) -> str:
    other = "prediction" if "predict" in kind else "evaluation"
    return f"{'training' if kind in TRAINING else other} of {model.name!r}"


def planned_memory(strategy: KerasStrategy) -> dict[str, int]:
    """Return the planned bytes, by purpose.

    They are for the models that are still there: those of this process if its
    devices share the host's memory, else of the device that has the most.
    TensorFlow needs some more memory for any model.

    Args:
        strategy: the strategy, whose steps have been traced.
    """
    config = strategy._config
    models = _models.get(config.strategy, {})
    costs = [
        step
        for name, step in _costs.get(config.strategy, {}).items()
        # The graphs of others have been freed.
        if models[name]() is not None
    ]
    plans = [c.plan for c in costs]
    held = collections.Counter[str]()
    for by_device in strategy._adoption.held_bytes().values():
        held.update(by_device)
    if not all_on_host(config.devices):
        return {
            "variables": max(held.values(), default=0),
            "a step": max((plan.bytes for plan in plans), default=0),
        }
    tensors = {
        "variables": held.total(),
        "a step": max((plan.shared for plan in plans), default=0),
    }
    total = sum(tensors.values())
    # For each 256 bytes that it has reserved, twice as many each time, the
    # allocator keeps 8.
    gaps = total // _GAPS + (1 << total.bit_length()) // 32
    messages = _message_bytes(strategy, plans)
    # A graph is built before there are any tensors of its step, but beside the
    # memory that TensorFlow keeps of those before it.
    graphs, most, kept = 0, 0, 0
    for step in costs:
        graphs += step.graph_bytes
        free = tensors["a step"] + messages + gaps - kept
        most = max(most, step.building_bytes - step.graph_bytes - free)
        kept = max(kept, step.plan.shared)
    return tensors | {
        "messages between ranks": messages,
        "gaps between tensors": gaps,
        "the graphs of steps": graphs + most,
    }


def _message_bytes(strategy: KerasStrategy, plans: Iterable[StepPlan]) -> int:
    """Return what ranks need to exchange, besides the tensors of a step."""
    transport, rank_sum = strategy._config.transport, strategy._update.rank_sum
    in_memory = 0 if rank_sum is None else rank_sum.kept_bytes
    most = 0
    for plan in plans:
        for kinds in plan.rounds:
            rest = dict(kinds)
            gradients = rest.pop("gradient", ())
            if not in_memory:
                rest["sum"] = [*rest.get("sum", ()), *gradients]
            sizes = itertools.starmap(transport.message_bytes, rest.items())
            most = max(most, sum(sizes))
    return in_memory + transport.kept_bytes + most


def describe_planned(strategy: KerasStrategy) -> list[str]:
    """Describe the planned memory, once steps have been traced."""
    if strategy not in _costs:
        return []
    planned = planned_memory(strategy)
    parts = [
        f"{format_bytes(n)} for {what}" for what, n in planned.items() if n
    ]
    if not parts:
        return []
    on_host = all_on_host(strategy._config.devices)
    where = "this process" if on_host else "each device"
    total = format_bytes(sum(planned.values()))
    return [f"planned memory of {where}: {total} ({', '.join(parts)})"]


def how_it_fits(config: TowerConfig) -> str:
    """Return how the last step is made to fit into memory; empty: as it is."""
    *_, last = _costs[config.strategy].values()
    return last.how_it_fits


def describe_steps(config: TowerConfig) -> list[str]:
    """Describe the steps that ran under a strategy."""
    lines = []
    for name, costs in _costs.get(config.strategy, {}).items():
        said = [costs.exchange_summary, costs.axes_summary]
        if config.transport.size > 1:
            said.append(f"each rank sends at most {costs.sent_summary}")
        if costs.replaced_sums:
            sums = format_bytes(costs.replaced_sums)
            said.append(f"gathers rows in place of sums of {sums}")
        if costs.gathered:
            most = format_bytes(costs.gathered)
            said.append(f"at most {most} of gathered weights at a time")
        said += [costs.remat_summary, costs.how_it_fits]
        if costs.held_summary:
            said.append(f"held for all micro-batches: {costs.held_summary}")
        said += costs.once_summary
        lines += [f"{name}: {line}" for line in said if line]
    return lines


def log_not_compiled(
    trainer: keras.Model, training: bool, stages: Stages
) -> None:
    """Log once what XLA compiles on one device, but not on towers.

    It is a warning if the user requested XLA, which Keras would not use by
    default.
    """
    for reason, operation in stages.not_compiled.items():
        source = operation.source
        where = "" if source is None else f": {line_of(source)}"
        log_no_xla(trainer, f"a part of the step {reason}{where}", training)


def log_no_xla(
    trainer: keras.Model, reason: str, training: bool = True
) -> None:
    """Log once why XLA does not compile a step, unlike on one device."""
    kind = "training" if training else "evaluation"
    line = (
        f"jit_compile is off for {kind} of {trainer.name!r} on towers: {reason}"
    )
    if first_time(trainer, line):
        by_user = not trainer._resolve_auto_jit_compile()
        level = logging.WARNING if by_user else logging.INFO
        logger.log(level, "%s", line)
