"""Keras's step functions, adapted to batches and to memory.

``AdaptiveFunction`` finds out which parts of a batch have rows, and how many
micro-batches fit (``micro_batches="auto"``). ``calls/tower_call.py`` wraps the
functions that Keras makes, and ``weights/model_binding.py`` drops those of
other strategies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce
from keras_towers._types import Plain, Structure
from keras_towers.errors import shorten
from keras_towers.fit.components import TowerConfig, TowerFunction
from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data import batches as data_lib, read_ahead
from keras_towers.fit.places import ALONE
from keras_towers.fit.step.step_layout import (
    MemoryPlan,
    StepLayout,
    StepSettings,
)
from keras_towers.fit.weights.copies import read_handle
from keras_towers.rendezvous import activity, failed_calls, rank_checks
from keras_towers.transport import Transport

# The first steps of a call show which inputs are not divided and how much
# memory a step needs.
_FIRST_STEPS = 3
# A step is traced again for batches that are this many times larger.
_RETRACE_RATIO = 4
# How often a step may be cancelled until that is its error.
_MAX_CANCELLED = 4

running_settings: ThreadLocal[StepSettings] = ThreadLocal()
"""The settings with which the function that this thread runs traces steps."""


class AdaptiveFunction(TowerFunction):
    """A function that Keras makes, wrapped to learn how to divide batches.

    It inspects the first batches of a call. Parts that turn out not to have a
    row for each example go to every tower whole. With ``micro_batches="auto"``,
    if memory runs out in the first steps of a call, or with later lists of
    batches that are larger, it restores the variables and runs the steps again
    as planned for less memory.

    Args:
        model: the model that has the function.
        name: the name of the model's attribute that holds the function.
        config: the towers.
        settings: what steps are traced for, until a call has others.
    """

    def __init__(
        self,
        model: keras.Model,
        name: str,
        config: TowerConfig,
        settings: StepSettings,
    ):
        self._function: Callable[[Structure], Structure] = getattr(model, name)
        self._model = model
        self._name = name
        self._config = config
        self._auto_micro_batches = config.options.micro_batches == "auto"
        self._settings = settings
        # The last plan, and the last one with which memory has run out.
        self._plan: MemoryPlan | None = None
        self._failed: MemoryPlan | None = None
        # How often that was so.
        self._failures = 0
        self._inspects = False
        # For batches of how many examples a step gathers rows; None: of any.
        self._gathers_for: int | None = None
        self._undivided: set[str] = set()
        # How many steps of this call were inspected.
        self._steps = 0
        # The largest number of rows of a tower in a step, and in one that has
        # fit into memory.
        self._rows: int | None = None
        self._largest = 0
        # The variables that traced steps use, and their values before a step.
        self._handles: dict[int, tf.Tensor] = {}
        self._before: dict[int, tf.Tensor] = {}
        self._prepare: Callable[[], None] | None = None

    def begin_call(
        self,
        settings: StepSettings,
        rows_may_differ: bool,
        from_now: bool,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Inspect the first batches of a call, if needed.

        Args:
            settings: what steps are traced for.
            rows_may_differ: whether parts of a batch may have different numbers
                of rows.
            from_now: whether batches may differ from the batches of earlier
                calls.
            prepare: builds and places the model; the call's first step begins
                with it.
        """
        self._settings = settings
        self._prepare = prepare
        self._inspects = not self._model.run_eagerly and (
            self._auto_micro_batches or rows_may_differ
        )
        if not from_now:
            return
        self._steps = 0
        expected, examples = self._gathers_for, settings.examples
        # The choice to gather rows was made for much smaller batches.
        if expected and examples and examples > _RETRACE_RATIO * expected:
            self._gathers_for = None
            self._retrace()

    def __call__(self, data: Structure) -> Structure:
        result = self._run_steps(data)
        # Callbacks follow.
        activity.mark_over()
        return result

    def _run_steps(self, data: Structure) -> Structure:
        if self._prepare is not None:
            prepare, self._prepare = self._prepare, None
            function = getattr(self._model, self._name)
            prepare()
            if getattr(self._model, self._name) is not function:
                # Placing variables has renewed it.
                setattr(self._model, self._name, function)
                self._retrace()
        if isinstance(data, list):
            if self._must_inspect(data):
                return self._inspect(data, lambda: data)
            return self._run_once(data)
        # Whoever gets fewer batches than an execution has runs fewer steps, so
        # the batches to inspect are read and run one by one.
        number, done, result = self._model.steps_per_execution, 0, None
        limit = read_ahead.limit_of(data)
        while done < number and (
            self._must_inspect(data) or (limit and limit.has_to_wait())
        ):
            if limit:
                limit.begin_step(done)
            batch = next(data, None)
            if batch is None:
                if done:
                    return result
                break
            alone = functools.partial(_iterate, data, [batch])
            if self._must_inspect(data):
                result = self._inspect([batch], alone)
            else:
                result = self._run_once(alone())
            done += 1
        if done == number:
            return result
        if not done:
            # Keras's function raises the error for the end of the data.
            return self._run_once(data)
        try:
            return self._run_once(_next_of(data, number - done))
        except StopIteration:
            return result

    def _inspect(
        self, batches: list[Structure], data: Callable[[], Structure]
    ) -> Structure:
        """Look at the batches of the next steps, then run the steps.

        Args:
            batches: their batches.
            data: returns the batches in the form in which Keras passes them.
        """
        self._find_undivided_parts(batches)
        self._steps += 1
        if not self._auto_micro_batches:
            return self._run_once(data())
        # The largest number of rows that a tower gets of one of them.
        rows = max(
            int(count) for batch in batches for count in self._counts_of(batch)
        )
        return self._run_in_memory(data, rows)

    def _must_inspect(self, data: Structure) -> bool:
        """Whether to read the next batches before the steps do."""
        if isinstance(data, tf.data.Iterator):
            return self._inspects and self._steps < _FIRST_STEPS
        # Batches of any other iterator were already divided by TensorFlow.
        may_have_parts = isinstance(data, list)
        return self._inspects and (self._auto_micro_batches or may_have_parts)

    def _find_undivided_parts(self, batches: Sequence[object]) -> None:
        """Give every tower the parts that have a different number of rows."""
        if self._config.options.batches != "split":
            return
        undivided: set[str] = set()
        for batch in batches:
            if data_lib.is_whole(batch):
                parts = data_lib.Batch.of(batch)
                known = self._settings.undivided
                known.setdefault(parts.names, set()).update(parts.undivided())
                undivided |= known[parts.names]
        if undivided <= self._undivided:
            return
        self._undivided |= undivided
        # All ranks get the same batches.
        if self._settings.places.ranks.job.rank == 0:
            announce(
                f"these parts of the batches of model {self._model.name!r} do "
                "not have one row per example, so every tower gets all of "
                f"them: {', '.join(sorted(undivided))}"
            )
        self._retrace()

    def _counts_of(self, batch: Structure) -> list[data_lib.Count]:
        """Return how many rows of a batch each tower gets."""
        places, undivided = self._settings.places, self._settings.undivided
        pieces, like = data_lib.as_tower_batch(
            self._config, places, batch, undivided
        )
        return pieces.counts(like)

    def _run_in_memory(
        self, batches: Callable[[], Structure], rows: int
    ) -> Structure:
        """Run steps with the first plan that fits into memory.

        Ranks take the plan that any of them needs, and repeat a step together.

        Args:
            batches: returns the batches of these steps.
            rows: the largest number of rows of a batch on one tower.
        """
        failures, cancelled, begins_again = self._failures, 0, False
        while True:
            tries = True
            try:
                begun = self._of_ranks((rows, failures), "begins a step")
                rows, failures = map(max, zip(*begun, strict=True))
                self._rows = max(rows, self._rows or 0)
                if failures > self._failures:
                    # Plan steps for less memory than with the last plan.
                    self._failures, self._failed = failures, self._plan
                    self._retrace()
                # Steps of this call have fit.
                fits = self._steps > _FIRST_STEPS and rows <= self._largest
                tries = begins_again or not fits
                if tries:
                    handles = self._handles.items()
                    self._before = {k: _value_of(h) for k, h in handles}
                result = self._run_once(batches(), joint=tries)
            except tf.errors.OutOfRangeError:
                # The data has ended.
                raise
            except tf.errors.OpError as error:
                if not tries:
                    raise
                self._restore_variables()
                again, cause = False, self._config.transport.cause_of(error)
                if isinstance(cause, tf.errors.ResourceExhaustedError):
                    again = self._has_next_plan(rows)
                    failures += 1
                elif isinstance(error, tf.errors.CancelledError):
                    # TensorFlow may report a tower that it cancelled after
                    # another one failed, instead of the failure.
                    cancelled += 1
                    again = cancelled < _MAX_CANCELLED
                if not self._begin_again(again, cause):
                    raise
                begins_again = True
                if cancelled and again:
                    announce(
                        f"a step of model {self._model.name!r} was cancelled, "
                        "and is repeated to find the error behind it: "
                        f"repetition {cancelled} of {_MAX_CANCELLED - 1} at "
                        "most"
                    )
            else:
                self._largest = max(self._largest, rows)
                return result

    def _has_next_plan(self, rows: int) -> bool:
        """Whether another plan may need less memory than the last one."""
        plan, failed = self._plan, self._failed
        if plan is None:
            return False
        # If the last one is no smaller than the one before, none is.
        return plan.micro_batches < rows or failed is None or plan < failed

    @property
    def _joint(self) -> Transport:
        """The ranks that take the same steps."""
        is_alone = self._settings.places.ranks.batch.size == 1
        return ALONE if is_alone else self._config.transport

    def _of_ranks(self, value: Plain, where: str) -> list[Plain]:
        """Gather a value from each rank that takes the same steps."""
        return rank_checks.gather(self._joint, value, where)

    def _begin_again(self, wanted: bool, error: Exception) -> bool:
        """Return whether all ranks repeat a step that has failed.

        Args:
            wanted: whether this rank has a reason.
            error: why the step has failed.
        """
        ranks, why = self._joint, shorten(error)
        if ranks.size == 1:
            return wanted
        return failed_calls.calls.repeat(ranks, why if wanted else None)

    def _run_once(self, data: Structure, joint: bool = False) -> Structure:
        settings = dataclasses.replace(
            self._settings, on_trace=self._note_trace
        )
        if self._auto_micro_batches:
            settings = self._with_plan(settings)
        with running_settings.holding(settings):
            result = self._function(data)
        if joint:
            # A rank that has done it repeats it if another one has to.
            self._of_ranks(None, "has done a step")
        self._before = {}
        return result

    def _with_plan(self, settings: StepSettings) -> StepSettings:
        """Return settings with the plan that earlier steps have needed."""
        replace, plan, failed = dataclasses.replace, self._plan, self._failed
        places = replace(
            settings.places, micro_batches=plan.micro_batches if plan else 1
        )
        return replace(settings, places=places, rows=self._rows, failed=failed)

    def _note_trace(self, graph: tf.Graph, layout: StepLayout) -> None:
        """Record the variables of a step that was traced but not run."""
        if layout.program.replaced_sums > 0:
            self._gathers_for = self._settings.examples
        if not self._auto_micro_batches:
            return
        self._plan = layout.plan
        with tf.init_scope():
            for handle, _ in graph.captures:
                if id(handle) not in self._handles and _is_variable(handle):
                    self._handles[id(handle)] = handle
                    self._before[id(handle)] = _value_of(handle)

    def _restore_variables(self) -> None:
        """Assign the values that variables had before the step."""
        for key, value in self._before.items():
            handle = self._handles[key]
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def _retrace(self) -> None:
        """Make Keras make the function again, so that it is traced again."""
        # The model's attribute may be another function that wraps this one.
        before = getattr(self._model, self._name)
        self._function = make_by_keras(self._model, self._name, force=True)
        setattr(self._model, self._name, before)


def make_by_keras(
    model: keras.Model, name: str, force: bool
) -> Callable[[Structure], Structure]:
    """Let a model make a function that it lacks; return the function.

    Args:
        model: the model.
        name: the name of the function.
        force: whether to replace an existing function.
    """
    make = getattr(type(model), f"make_{name}").__get__(model)
    # XLA cannot compile a function that spans devices.
    with patches.shadowed(model, {"_jit_compile": False}):
        # A model that overrides it may take no argument.
        make(**({"force": True} if force else {}))
    return getattr(model, name)


def _iterate(data: Structure, batches: list[Structure]) -> Iterator[Structure]:
    """Return an iterator of batches, of the same type as that of the data."""
    if not isinstance(data, tf.data.Iterator):
        return iter(batches)
    return _with_specs(tf.data.Dataset.from_tensors(batches[0]), data)


def _next_of(data: tf.data.Iterator, number: int) -> Iterator[Structure]:
    """Return an iterator of the next few batches of an iterator."""
    # Where the iterator ends, a dataset of TensorFlow 1 does, too.
    numbers: tf.data.Dataset = tf.compat.v1.data.Dataset.range(number)
    return _with_specs(numbers.map(lambda _: data.get_next()), data)


def _with_specs(
    dataset: tf.data.Dataset, data: tf.data.Iterator
) -> Iterator[Structure]:
    """Iterate over a dataset with the specs of the data.

    The function would be traced again for other static shapes.
    """
    variant = tf.data.experimental.to_variant(dataset)
    return iter(tf.data.experimental.from_variant(variant, data.element_spec))


def _is_variable(handle: tf.Tensor) -> bool:
    """Whether a tensor is the handle of an initialized variable."""
    if handle.dtype != tf.resource or compat.type_of_variable(handle) is None:
        return False
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def _value_of(handle: tf.Tensor) -> tf.Tensor:
    """Return a variable's value in host memory.

    A variable in host memory is copied only when it changes.
    """
    value = read_handle(handle)
    with tf.device(compat.HOST):
        return tf.identity(value)
