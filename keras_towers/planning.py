"""What a model needs on several devices, from a step that never runs.

A step is traced and laid out by the code that trains, in a TensorFlow graph
that has no session: variables have shapes there, and devices names, and neither
needs to exist.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.devices import short_name
from keras_towers.errors import TowerError
from keras_towers.fit.context import patches
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.data.batches import has_rows, of_any_size
from keras_towers.fit.options import Bytes, StrategyOptions
from keras_towers.fit.step.step_costs import (
    Exchanged,
    StepCosts,
    costs_of,
    exchanged_in,
)
from keras_towers.fit.step.trace import Trace
from keras_towers.fit.weights.copies import bytes_on
from keras_towers.fit.weights.least_loaded import byte_size
from keras_towers.fit.weights.model_state import (
    collect,
    eager_cause,
    runs_eagerly,
)
from keras_towers.fit.weights.shards import (
    SMALLEST_BYTES,
    ShardedVariable,
    choose_layout,
    share_counts,
)
from keras_towers.fit.weights.tower_variables import with_values
from keras_towers.fit.weights.without_memory import (
    graph_without_memory,
    variable_like,
    without_memory,
)
from keras_towers.partition import Program
from keras_towers.partition.lifetimes import Lifetimes
from keras_towers.partition.program import Tensor
from keras_towers.step_times import work_of
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.model_parallel import OnMesh
from keras_towers.transport import SingleProcess
from keras_towers.user_models import random_examples

_SEEDS = "global_seed_generator"
# Counts the names of layers.
_NAMES = "object_name_uids"


@dataclasses.dataclass(frozen=True)
class PlanSetting:
    """What is planned for.

    Attributes:
        devices: the names of the devices, which need not exist.
        batch_size: the number of examples of a global batch.
        gather_bytes: of choices that gather weights.
        layouts: returns a ``LayoutMap`` or a ``ModelParallel`` of Keras on a
            mesh of the devices, given their names; None: neither is planned.
        hosts: numbers of hosts that have such devices each, in ascending order.
            Each host brings as many examples. The examples of a batch are then
            as many as ``fit`` gets, and not a size that the step knows. None:
            one host, whose step knows it.
    """

    devices: Sequence[str]
    batch_size: int = 32
    gather_bytes: Bytes = StrategyOptions.gather_bytes
    layouts: Callable[[Sequence[str]], Any] | None = None
    hosts: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to train a model on several devices.

    Attributes:
        name: how a user chooses it.
        strategy: makes its strategy, for the first number of hosts.
    """

    name: str
    strategy: Callable[[PlanSetting], BaseStrategy]


class _Hosts(SingleProcess):
    """The last of several ranks, whose towers have the most rows."""

    def __init__(self, size: int):
        self.rank, self.size = size - 1, size


class _Planned(BaseStrategy):
    """``TowerStrategy`` on devices, and hosts, that need not exist."""

    def __init__(self, setting: PlanSetting, **options: Any):
        hosts, *_ = setting.hosts or [1]
        super().__init__(
            setting.devices,
            StrategyOptions(**options),
            transport=_Hosts(hosts),
        )
        self._compose()


class _PlannedOnMesh(OnMesh):
    """``ModelParallelStrategy`` on devices that need not exist."""

    def __init__(self, setting: PlanSetting):
        assert setting.layouts is not None, "a choice without layouts"
        found, axis = setting.layouts(setting.devices), None
        if isinstance(found, keras.distribution.ModelParallel):
            found, axis = found._layout_map, found.batch_dim_name
        if not isinstance(found, keras.distribution.LayoutMap):
            raise TowerError(
                "it has to return a keras.distribution.LayoutMap or "
                f"ModelParallel, but returned {found!r:.80}"
            )
        mesh = np.ravel(found.device_mesh.devices)
        if sorted(map(str, mesh)) != sorted(setting.devices):
            raise TowerError(
                "the mesh of what it returns has other devices than those "
                f"that it is given: {', '.join(setting.devices)}"
            )
        options = StrategyOptions(
            weights="sharded", gather_bytes=setting.gather_bytes
        )
        super().__init__(found, axis, options, list)


CHOICES: Sequence[Choice] = (
    Choice("copies", _Planned),
    Choice(
        'updates="sharded"',
        lambda setting: _Planned(setting, updates="sharded"),
    ),
    Choice(
        'weights="sharded"',
        lambda setting: _Planned(
            setting, weights="sharded", gather_bytes=setting.gather_bytes
        ),
    ),
)
"""What is compared; the first one is all that one device can do."""

_WITHIN_HOSTS = Choice(
    'shard_over="process"',
    lambda setting: _Planned(
        setting,
        weights="sharded",
        shard_over="process",
        gather_bytes=setting.gather_bytes,
    ),
)
# With several hosts and devices of each.

_LAYOUTS = Choice("layouts", _PlannedOnMesh)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a choice needs.

    Attributes:
        choice: its name.
        model: the name of the model.
        parameters: the number of its parameters.
        weights: the bytes of the model's weights on each of K devices.
        optimizer: the bytes of the optimizer's variables on each of them.
        step: the bytes that a device has at a time while a step runs, besides
            these variables: an estimate, as ``Lifetimes`` says; None: unknown.
        gradients: the bytes of the gradients that a device updates with.
        costs: what the step exchanges.
        whole: the paths of weights that are never in shards, by the reason.
        is_small: whether that is all of them, on any number of devices.
        hosts: the number of hosts.
        examples: the number of examples of the global batch.
        columns: the number of devices of a tower.
        exchanged: all that the step exchanges.
        work: of each level, how much of the step's computing is in it.
    """

    choice: str
    model: str
    parameters: int
    weights: list[int]
    optimizer: list[int]
    gradients: int | None
    step: int | None
    costs: StepCosts
    whole: dict[str, list[str]]
    is_small: bool
    hosts: int
    examples: int
    columns: int
    exchanged: Sequence[Exchanged]
    work: Mapping[int, float]

    @property
    def total(self) -> int | None:
        """The bytes on the device that has most; None: unknown."""
        if self.step is None:
            return None
        held = zip(self.weights, self.optimizer, strict=True)
        return max(map(sum, held)) + self.step

    def fits(self, memory: int | None) -> bool | None:
        """Whether it fits into the memory of a device; None: unknown."""
        if self.total is None or memory is None:
            return None
        return self.total <= memory


def hide_gpus() -> None:
    """Leave the GPUs of this machine to others, if TensorFlow has none yet."""
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def check_layouts(setting: PlanSetting) -> None:
    """Raise TowerError if the layouts of a setting are on no such mesh."""
    _LAYOUTS.strategy(setting)


def plan(build: Callable[[], Any], setting: PlanSetting) -> list[Plan]:
    """Plan each choice for a model, on each number of hosts.

    Where no weight is large enough for shards, these are no choice.

    Args:
        build: returns a compiled model, alone or with data, as for ``fit``. It
            is called at least once for each choice, and large variables that it
            creates have no memory: they read as zeros, and keep nothing.
        setting: the devices and the batch.

    Raises:
        TowerError: it returns anything else, or a step cannot be divided.
    """
    hosts = setting.hosts or [1]
    copies, *in_shards = CHOICES
    if len(setting.devices) > 1 and max(hosts) > 1:
        in_shards.append(_WITHIN_HOSTS)
    plans = _plan_all(copies, build, setting)
    is_alone = len(setting.devices) * max(hosts) == 1
    choices = [] if is_alone or plans[0].is_small else in_shards
    if setting.layouts is not None:
        choices.append(_LAYOUTS)
    for choice in choices:
        plans += _plan_all(choice, build, setting)
    return plans


def _plan_all(
    choice: Choice, build: Callable[[], Any], setting: PlanSetting
) -> list[Plan]:
    """Plan a choice for all numbers of hosts."""
    found = _plan(choice, build, setting)
    while rest := (setting.hosts or ())[len(found) :]:
        left = dataclasses.replace(setting, hosts=rest)
        found += _plan(choice, build, left)
    return found


def _plan(
    choice: Choice, build: Callable[[], Any], setting: PlanSetting
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
        stack.enter_context(graph_without_memory())
        variables = collect(model).everything()
        stack.enter_context(
            with_values((v, variable_like(v)) for v in variables)
        )
        strategy = choice.strategy(setting)
        calls: Any = strategy._calls
        # Other ranks, which do not exist, have the same values.
        agreed: dict[str, Any] = {
            name: lambda *_: None for name in ("synchronize", "agree_on_values")
        }
        with patches.shadowed(calls.adoption, agreed):
            traced, program = calls.plan(model, batch, size)
        step = _PlannedStep(
            choice, setting, model, strategy._config, traced, program
        )
        return [step.on(number) for number in step.like_first()]


@dataclasses.dataclass(frozen=True)
class _PlannedStep:
    """A step that is laid out for the first number of hosts.

    Attributes:
        choice: how it is to train.
        setting: what it is planned for.
        model: the model, adopted by a strategy.
        config: the places of the strategy.
        traced: the trace of its step.
        program: the program.
    """

    choice: Choice
    setting: PlanSetting
    model: keras.Model
    config: TowerConfig
    traced: Trace
    program: Program

    def like_first(self) -> list[int]:
        """Return the numbers of hosts that have the program of the first.

        A program knows the number of towers by symbols, but for the axes of
        shards. And rows that are gathered in place of sums are more with more
        examples.
        """
        first, *others = self.setting.hosts or [1]
        if first == 1 or self.program.replaced_sums:
            return [first]
        axes = self._axes_of_shards(first)
        same = itertools.takewhile(
            lambda number: self._axes_of_shards(number) == axes, others
        )
        return [first, *same]

    def on(self, hosts: int) -> Plan:
        """Return the plan for a number of hosts."""
        config, program = self.config, self.program
        here, columns = config.num_towers, len(config.mesh[0])
        size, towers = hosts * self.setting.batch_size, hosts * here
        step = gradients = None
        work: Mapping[int, float] = {}
        # The step may not fit the sizes that the trace leaves open.
        with contextlib.suppress(ValueError):
            lifetimes = Lifetimes(program, towers, -(-size // towers))
            gradients = lifetimes.bytes_of(_gradients_in(self.traced, program))
            step = lifetimes.most_bytes()
            work = work_of(program, lifetimes)
        costs = costs_of(program, towers, columns=columns)
        if towers == columns == 1:
            # It has no one to exchange with.
            costs = dataclasses.replace(costs, exchanges=0, rounds=0)
        state, model = collect(self.model), self.model
        return Plan(
            choice=self.choice.name,
            model=model.name,
            parameters=model.count_params(),
            weights=self._held(state.weights, hosts),
            optimizer=self._held(state.optimizer_variables, hosts),
            gradients=gradients,
            step=step,
            costs=costs,
            whole=_whole(state.weights, towers * columns),
            is_small=all(map(_is_small, state.weights)),
            hosts=hosts,
            examples=size,
            columns=columns,
            exchanged=[*exchanged_in(program, towers)],
            work=work,
        )

    @property
    def _in_shards_of_all(self) -> list[ShardedVariable]:
        """The variables in shards, if these are over the towers of all."""
        if self.config.places("fit").ranks.shards.size == 1:
            return []
        state = collect(self.model)
        values = [
            v._value for v in (*state.weights, *state.optimizer_variables)
        ]
        return [v for v in values if isinstance(v, ShardedVariable)]

    def _axes_of_shards(self, hosts: int) -> list[Any]:
        towers, axes = hosts * self.config.num_towers, []
        for variable in self._in_shards_of_all:
            item_bytes = variable.dtype.size
            layout = choose_layout(variable.shape, item_bytes, towers)
            rows = None if layout is None else layout.towers
            axes.append(rows and (rows.axis, rows.size % towers == 0))
        return axes

    def _held(
        self, variables: Iterable[keras.Variable], hosts: int
    ) -> list[int]:
        """Return the bytes of variables on the devices of the last host."""
        config, variables = self.config, list(variables)
        mesh, here = config.mesh, config.num_towers
        on = dict(bytes_on(mesh, variables))
        of_all = set(map(id, self._in_shards_of_all))
        for value in (v._value for v in variables if id(v._value) in of_all):
            rows = value.layout.towers
            counts = share_counts(rows.size, here * hosts)[-here:]
            for devices, shards, count in zip(
                mesh, value.shards, counts, strict=True
            ):
                for device, shard in zip(devices, shards, strict=False):
                    size, planned = byte_size(shard), shard.shape[rows.axis]
                    on[short_name(device)] += size * count // planned - size
        names = [short_name(device) for device in itertools.chain(*mesh)]
        found = [on[name] for name in names]
        # What towers have once was made on the host of this process.
        others = sum(on.values()) - sum(found)
        return [others + found[0], *found[1:]]


def _model_and_batch(
    built: Any, examples: int | None
) -> tuple[keras.Model, Any]:
    """Return a model, and the specs of a batch of a number of examples."""
    model, *data = built if isinstance(built, tuple) else (built,)
    if not isinstance(model, keras.Model) or len(data) > 3:
        raise TowerError(
            "it has to return a compiled keras.Model, alone or as (model, x), "
            "(model, x, y), (model, x, y, sample_weight) or (model, dataset), "
            f"but returned {built!r:.80}"
        )
    if not model.compiled:
        raise TowerError(
            f"it returned model {model.name!r}, which is not compiled: call "
            "model.compile(optimizer, loss) in it, since the optimizer's "
            "variables and the gradients take memory, too"
        )
    if runs_eagerly(model):
        raise TowerError(
            f"it returned model {model.name!r}, which runs eagerly, so that "
            f"its steps are not divided: leave out {eager_cause(model)}"
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
    """Return the spec of a part of a batch: an array, a tensor or a spec."""
    if leaf is None:
        return None
    given = leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        leaf = np.asarray(leaf)
    if not has_rows(leaf):
        raise TowerError(
            "it has to return arrays, tensors or specs of examples, or one "
            f"tf.data.Dataset, but among them is {given!r:.80}"
        )
    dtype = tf.as_dtype(leaf.dtype)
    # Keras passes arrays in its own precision.
    if isinstance(leaf, np.ndarray) and dtype.is_floating:
        dtype = keras.config.floatx()
    return tf.TensorSpec(leaf.shape, dtype)


def _with_rows(spec: Any, examples: int | None) -> Any:
    """Return the spec of a part of a batch for a number of examples."""
    if isinstance(spec, tf.TensorSpec) and has_rows(spec):
        return tf.TensorSpec([examples, *spec.shape[1:]], spec.dtype)
    # Of ragged and sparse tensors only the graph knows the number.
    return of_any_size(spec) if has_rows(spec) else spec


def _gradients_in(traced: Trace, program: Program) -> list[Tensor]:
    """Return what towers have of gradients, as optimizers get them."""
    values = [program.values[name] for name in traced.gradients]
    found = [value.local or value.whole for value in values]
    return [tensor for tensor in found if tensor is not None]


def _is_small(weight: keras.Variable) -> bool:
    """Whether a weight is never divided."""
    return byte_size(weight) < SMALLEST_BYTES


def _whole(
    weights: Iterable[keras.Variable], towers: int
) -> dict[str, list[str]]:
    """Return the paths of weights that are not divided, by the reason."""
    whole: dict[str, list[str]] = {}
    for weight in weights if towers > 1 else ():
        item_bytes = tf.as_dtype(weight.dtype).size
        if choose_layout(weight.shape, item_bytes, towers) is not None:
            continue
        reason = (
            f"smaller than {SMALLEST_BYTES // 1024} KiB"
            if _is_small(weight)
            else "without an axis that has a row for every device"
        )
        whole.setdefault(reason, []).append(weight.path)
    return whole
