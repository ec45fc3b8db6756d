"""Plans the memory and exchanges of a model, by a step that never runs.

A step is traced and laid out by the code that trains
(``fit/step/plan/dry_run.py``), in a TensorFlow graph that has no session.
There, variables have only shapes, and devices only names, so neither needs to
exist.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.data.batches import has_rows, of_any_size
from keras_towers.fit.options import Bytes, StrategyOptions
from keras_towers.fit.step.plan.dry_run import (
    LaidOutStep,
    Needs,
    dry_run,
    lay_out_dry,
)
from keras_towers.fit.step.reports.step_costs import (
    Exchanged,
    StepCosts,
    costs_of,
    exchanged_in,
)
from keras_towers.fit.step.reports.step_reports import (
    how_it_fits,
    planned_memory,
)
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.fit.weights.model_state import (
    collect,
    eager_cause,
    runs_eagerly,
)
from keras_towers.fit.weights.shards import SMALLEST_BYTES, choose_layout
from keras_towers.fit.weights.without_memory import without_memory
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import silence
from keras_towers.foundation.object_types import Structure
from keras_towers.inspection.network_cost import work_of
from keras_towers.inspection.user_models import model_and_data, random_examples
from keras_towers.strategies.base import BaseStrategy, strategy_for_dry_run
from keras_towers.strategies.device_mesh import Mesh
from keras_towers.transport.absent_ranks import AbsentRanks
from keras_towers.transport.devices import all_on_host

_SEEDS = "global_seed_generator"
# Counts the names of layers.
_NAMES = "object_name_uids"


@dataclasses.dataclass(frozen=True)
class PlanSetting:
    """The devices, hosts and examples for which to plan.

    Attributes:
        devices: the names of the devices, which need not exist.
        batch_size: the number of examples in a global batch.
        gather_bytes: for layouts that gather weights: the bytes that a device
            holds; None: as for strategies.
        layouts: a function that gets the names of the devices, and returns a
            ``LayoutMap`` or a ``ModelParallel`` of Keras on a mesh of these
            devices; None: plan no mesh.
        memory: the bytes of a device, or on CPUs of a process; None: unknown.
        ranks: the processes of a host, each with these devices; None: one.
        hosts: numbers of hosts, in ascending order. Each host has these
            devices, and adds ``batch_size`` examples to a batch. The traced
            step then does not know the number of examples, as in ``fit``. None:
            one host, whose step knows this number.
    """

    devices: Sequence[str]
    batch_size: int = 32
    gather_bytes: Bytes | None = None
    layouts: Callable[[Sequence[str]], keras.distribution.LayoutMap] | None = (
        None
    )
    hosts: Sequence[int] | None = None
    memory: int | None = None
    ranks: AbsentRanks | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether devices are the host's memory."""
        return all_on_host(self.devices)

    @property
    def processes(self) -> int:
        """The number of processes of a host."""
        return 1 if self.ranks is None else self.ranks.size


CHOICES: Mapping[str, Mapping[str, Any]] = {
    "copies": {},
    'updates="sharded"': {"updates": "sharded"},
    'weights="sharded"': {"weights": "sharded"},
    # With several hosts and devices of each.
    'shard_over="process"': {"weights": "sharded", "shard_over": "process"},
    # With one host, where it saves anything.
    "remat=True": {"remat": True},
    "TowerStrategy()": {},
}
"""The options of ``TowerStrategy`` to compare, by how a user chooses them.

One device can only have the first. The last leaves the choice to the strategy,
if the memory is known.
"""
_COPIES, *_IN_SHARDS, _WITHIN_HOSTS, _AGAIN, BY_ITSELF = CHOICES
_LAYOUTS = "layouts"


def _strategy_of(choice: str, setting: PlanSetting) -> BaseStrategy:
    """Make the strategy of a choice, for the first number of hosts."""
    if choice == _LAYOUTS:
        return on_mesh(setting)
    options = dict(CHOICES[choice])
    if "weights" in options:
        options["gather_bytes"] = setting.gather_bytes
    hosts, *_ = setting.hosts or [1]
    ranks = setting.ranks or AbsentRanks(hosts)
    return strategy_for_dry_run(
        setting.devices, StrategyOptions(**options), ranks
    )


def on_mesh(setting: PlanSetting) -> BaseStrategy:
    """Make ``ModelParallelStrategy`` on devices that need not exist.

    Raises:
        TowerError: the setting's function of layouts returns something else, or
            a mesh of other devices.
    """
    assert setting.layouts is not None, "a choice without layouts"
    found, axis = setting.layouts(setting.devices), None
    if isinstance(found, keras.distribution.ModelParallel):
        found, axis = found._layout_map, found.batch_dim_name
    if not isinstance(found, keras.distribution.LayoutMap):
        raise TowerError(
            "it must return a keras.distribution.LayoutMap or "
            f"ModelParallel, but returned {found!r:.80}"
        )
    names = np.ravel(found.device_mesh.devices)
    if sorted(map(str, names)) != sorted(setting.devices):
        raise TowerError(
            "its mesh has other devices than the function gets: "
            f"{', '.join(setting.devices)}"
        )
    options = StrategyOptions(
        weights="sharded", gather_bytes=setting.gather_bytes
    )
    return strategy_for_dry_run(Mesh.of(found, axis, list), options)


@dataclasses.dataclass(frozen=True)
class Plan(Needs):
    """The memory and the exchanges of a choice.

    Attributes:
        choice: its name.
        model: the name of the model.
        parameters: the number of its parameters.
        costs: what the step exchanges.
        whole: the paths of weights that are never in shards, by the reason.
        is_small: whether that is all of them, on any number of devices.
        hosts: the number of hosts.
        examples: the number of examples of the global batch.
        columns: the number of devices of a tower.
        exchanged: all that the step exchanges.
        work: of each level, how much of the step's computing is in it.
        how: how it is made to fit into memory; empty: as it is.
        process: on CPUs: the bytes of a process, as ``planned_memory``; empty:
            devices have memory of their own.
    """

    choice: str
    model: str
    parameters: int
    costs: StepCosts
    whole: dict[str, list[str]]
    is_small: bool
    hosts: int
    examples: int
    columns: int
    exchanged: Sequence[Exchanged]
    work: Mapping[int, float]
    how: str = ""
    process: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int | None:
        """The bytes of a process, or on the device that needs most."""
        return sum(self.process.values()) if self.process else super().total

    def fits(self, memory: int | None) -> bool | None:
        """Whether it fits into memory; None if that is unknown."""
        if self.total is None or memory is None:
            return None
        return self.total <= memory


def hide_gpus() -> None:
    """Hide this machine's GPUs from TensorFlow, unless it has them already."""
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def plan(build: Callable[[], object], setting: PlanSetting) -> list[Plan]:
    """Plan each choice for a model, on each number of hosts.

    Choices with shards are left out if no weight is large enough for them.

    Args:
        build: returns a compiled model, alone or with data, as for ``fit``. It
            is called at least once for each choice, and large variables that it
            creates have no memory: they read as zeros, and keep nothing.
        setting: the devices and the batch.

    Raises:
        TowerError: it returns anything else, or a step cannot be divided.
    """
    hosts = setting.hosts or [1]
    plans = _plan_all(_COPIES, build, setting)
    towers = len(setting.devices) * setting.processes
    is_alone = towers * max(hosts) == 1
    choices = [] if is_alone or plans[0].is_small else [*_IN_SHARDS]
    if choices and len(setting.devices) > 1 and max(hosts) > 1:
        choices.append(_WITHIN_HOSTS)
    if setting.layouts is not None:
        choices.append(_LAYOUTS)
    for choice in choices:
        plans += _plan_all(choice, build, setting)
    if setting.hosts is None:
        again = _plan_all(_AGAIN, build, setting)
        plans += [p for p in again if p.costs.remat_summary]
        # It compares what devices have, not processes.
        if setting.memory is not None and not setting.is_on_host:
            plans += _plan_all(BY_ITSELF, build, setting)
    return plans


def _plan_all(
    choice: str, build: Callable[[], object], setting: PlanSetting
) -> list[Plan]:
    """Plan a choice for all numbers of hosts."""
    found = _plan(choice, build, setting)
    while rest := (setting.hosts or ())[len(found) :]:
        left = dataclasses.replace(setting, hosts=rest)
        found += _plan(choice, build, left)
    return found


def _plan(
    choice: str, build: Callable[[], object], setting: PlanSetting
) -> list[Plan]:
    """Plan a choice for the first number of hosts, and others like it."""
    hosts, *_ = setting.hosts or [1]
    size = hosts * setting.batch_size
    with contextlib.ExitStack() as stack:
        keep = compat.global_state.set_global_attribute
        # The step may create the one of the graph.
        stack.callback(keep, _SEEDS, compat.get_global_attribute(_SEEDS))
        # Each model has the names that it has alone: layouts go by them.
        names = copy.copy(compat.get_global_attribute(_NAMES))
        stack.callback(keep, _NAMES, names)
        with without_memory():
            open_size = setting.hosts is not None
            model, batch = _model_and_batch(
                build(), None if open_size else size
            )
        make = functools.partial(_strategy_of, choice, setting)
        strategy = stack.enter_context(dry_run(model, make))
        if choice == BY_ITSELF and setting.memory is not None:
            memory = strategy._runner.step.memory
            memory.assume(setting.memory, "each device")
            stack.enter_context(silence())
        emits = setting.is_on_host
        step = lay_out_dry(strategy, model, batch, size, emits=emits)
        process = planned_memory(strategy) if emits else {}
        return [
            dataclasses.replace(
                _plan_on(step, choice, setting, number), process=process
            )
            for number in _like_first(step, setting)
        ]


def _like_first(step: LaidOutStep, setting: PlanSetting) -> list[int]:
    """Return the numbers of hosts with the same program as the first.

    A program has the number of towers only as a symbol, except in the axes of
    shards. If it gathers rows instead of summing gradients, it also depends on
    the number of examples, because more examples have more rows.
    """
    first, *others = setting.hosts or [1]
    if first == 1 or step.program.replaced_sums:
        return [first]
    axes = step.axes_of_shards(first)
    same = itertools.takewhile(
        lambda number: step.axes_of_shards(number) == axes, others
    )
    return [first, *same]


def _plan_on(
    step: LaidOutStep, choice: str, setting: PlanSetting, hosts: int
) -> Plan:
    """Return the plan for a number of hosts."""
    config, model = step.config, step.model
    columns, ranks = len(config.mesh[0]), hosts * setting.processes
    size, towers = hosts * setting.batch_size, ranks * config.num_towers
    needs = step.needs(size, ranks)
    how = how_it_fits(config) if choice == BY_ITSELF else ""
    costs = costs_of(step.timeline, towers, columns=columns)
    if towers == columns == 1:
        # It has no one to exchange with.
        costs = dataclasses.replace(costs, exchanges=0, rounds=0)
    weights = collect(model).weights
    return Plan(
        **vars(needs),
        choice=choice,
        model=model.name,
        parameters=model.count_params(),
        costs=costs,
        whole=_whole(weights, towers * columns),
        is_small=all(map(_is_small, weights)),
        hosts=hosts,
        examples=size,
        columns=columns,
        exchanged=[*exchanged_in(step.timeline, towers)],
        work=work_of(step.timeline, step.sizes(size, ranks)),
        how=how,
    )


def _model_and_batch(
    built: Any, examples: int | None
) -> tuple[keras.Model, Structure]:
    """Return a model, and the specs of a batch of a number of examples."""
    model, data = model_and_data(built, "it")
    if runs_eagerly(model):
        raise TowerError(
            f"it returned model {model.name!r}, which runs eagerly, so towers "
            f"do not divide its steps: leave out {eager_cause(model)}"
        )
    if len(data) == 1 and isinstance(data[0], tf.data.Dataset):
        specs = data[0].element_spec
    else:
        arrays = data or random_examples(model, "it", 1)
        specs = keras.tree.map_structure(_spec, tuple(arrays))
    return model, tf.nest.map_structure(
        lambda spec: _with_rows(spec, examples), specs
    )


def _spec(leaf: Any) -> Any:
    """Return the spec of a part of a batch: of an array, a tensor or a spec."""
    if leaf is None:
        return None
    given = leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        leaf = np.asarray(leaf)
    if not has_rows(leaf):
        raise TowerError(
            "it must return arrays, tensors or specs of examples, or one "
            f"tf.data.Dataset, but one of them is {given!r:.80}"
        )
    dtype = tf.as_dtype(leaf.dtype)
    # Keras passes arrays in its own precision.
    if isinstance(leaf, np.ndarray) and dtype.is_floating:
        dtype = keras.config.floatx()
    return tf.TensorSpec(leaf.shape, dtype)


def _with_rows(spec: Any, examples: int | None) -> Structure:
    """Return the spec of a part of a batch for a number of examples."""
    if isinstance(spec, tf.TensorSpec) and has_rows(spec):
        return tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype)
    # Only the graph knows the number for ragged and sparse tensors.
    return of_any_size(spec) if has_rows(spec) else spec


def _is_small(weight: keras.Variable) -> bool:
    """Whether a weight is too small to be divided."""
    return byte_size(weight) < SMALLEST_BYTES


def _whole(
    weights: Iterable[keras.Variable], towers: int
) -> dict[str, list[str]]:
    """Return the paths of undivided weights, by reason."""
    whole: dict[str, list[str]] = {}
    for weight in weights if towers > 1 else ():
        item_bytes = tf.as_dtype(weight.dtype).size
        if choose_layout(weight.shape, item_bytes, towers).divides:
            continue
        reason = (
            f"smaller than {SMALLEST_BYTES // 1024} KiB"
            if _is_small(weight)
            else "without an axis that has a row for every device"
        )
        whole.setdefault(reason, []).append(weight.path)
    return whole
