"""Repeats steps that run out of memory, with plans that need less."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.places import ALONE, Ranks
from keras_towers.fit.step.graph.step_layout import MemoryPlan, StepSettings
from keras_towers.fit.weights.copies import read_handle
from keras_towers.foundation import compat
from keras_towers.foundation.errors import shorten
from keras_towers.foundation.notices import announce
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous import failed_calls, rank_checks
from keras_towers.transport import Transport

# How often a step may be cancelled until that is its error.
_MAX_CANCELLED = 4


class MemoryRetries:
    """Runs the steps of a function until they fit into memory.

    If memory runs out, it restores the variables, has the steps traced again
    for less memory, and runs them again. Ranks take the plan that any of them
    needs, and repeat a step together.

    Args:
        name: the name of the model, for messages.
        config: the towers.
        retrace: has the steps traced again.
    """

    def __init__(
        self, name: str, config: TowerConfig, retrace: Callable[[], None]
    ):
        self._name = name
        self._config = config
        self._retrace = retrace
        # The last plan, and the last one with which memory has run out.
        self._plan: MemoryPlan | None = None
        self._failed: MemoryPlan | None = None
        # How often that was so.
        self._failures = 0
        # The largest number of rows of a tower in a step, and in one that has
        # fit into memory.
        self._rows: int | None = None
        self._largest = 0
        # The variables that traced steps use, and their values before a step.
        self._handles: dict[int, tf.Tensor] = {}
        self._before: dict[int, tf.Tensor] = {}

    def planned(self, settings: StepSettings) -> StepSettings:
        """Return settings with the plan that earlier steps have needed."""
        replace, plan, failed = dataclasses.replace, self._plan, self._failed
        number = plan.micro_batches if plan else 1
        places = replace(settings.places, micro_batches=number)
        return replace(settings, places=places, rows=self._rows, failed=failed)

    def note_trace(self, graph: tf.Graph, plan: MemoryPlan) -> None:
        """Record the plan and the variables of a step before it runs."""
        if self._plan is not None and plan.shards != self._plan.shards:
            # Variables have moved.
            self._handles.clear()
            self._before.clear()
        self._plan = plan
        with tf.init_scope():
            for handle, _ in graph.captures:
                if id(handle) not in self._handles and _is_variable(handle):
                    self._handles[id(handle)] = handle
                    self._before[id(handle)] = _value_of(handle)

    def run(
        self,
        run_steps: Callable[[], Structure],
        rows: int,
        ranks: Ranks,
        is_new: bool,
    ) -> Structure:
        """Run steps with the first plan that fits into memory.

        Args:
            run_steps: runs them.
            rows: the largest number of rows of a batch on one tower.
            ranks: the ranks, of which those that have parts of the batch take
                the same steps.
            is_new: whether steps of so many rows may not have fit yet.
        """
        joint = ALONE if ranks.batch.size == 1 else self._config.transport
        failures, cancelled, begins_again = self._failures, 0, False
        while True:
            tries = True
            try:
                begun = rank_checks.gather(
                    joint, (rows, failures), "begins a step"
                )
                rows, failures = map(max, zip(*begun, strict=True))
                self._rows = max(rows, self._rows or 0)
                if failures > self._failures:
                    # Plan steps for less memory than with the last plan.
                    self._failures, self._failed = failures, self._plan
                    self._retrace()
                tries = begins_again or is_new or rows > self._largest
                if tries:
                    handles = self._handles.items()
                    self._before = {k: _value_of(h) for k, h in handles}
                result = run_steps()
                if tries:
                    # A rank that has done it repeats it if another one has to.
                    rank_checks.gather(joint, None, "has done a step")
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
                if not _begin_again(joint, again, cause):
                    raise
                begins_again = True
                if cancelled and again:
                    announce(
                        f"a step of model {self._name!r} was cancelled, and is "
                        "repeated to find the error behind it: repetition "
                        f"{cancelled} of {_MAX_CANCELLED - 1} at most"
                    )
            else:
                self._before = {}
                self._largest = max(self._largest, rows)
                return result

    def _has_next_plan(self, rows: int) -> bool:
        """Whether another plan may need less memory than the last one."""
        plan, failed = self._plan, self._failed
        if plan is None:
            return False
        # If the last one needs no less than the one before, none does.
        return (
            plan.micro_batches < rows
            or failed is None
            or plan.needs_less_than(failed)
        )

    def _restore_variables(self) -> None:
        """Assign the values that variables had before the step."""
        for key, value in self._before.items():
            handle = self._handles[key]
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _begin_again(ranks: Transport, wanted: bool, error: Exception) -> bool:
    """Return whether all ranks repeat a step that has failed.

    Args:
        ranks: those that take the step.
        wanted: whether this rank has a reason.
        error: why the step has failed.
    """
    if ranks.size == 1:
        return wanted
    return failed_calls.calls.repeat(ranks, shorten(error) if wanted else None)


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
