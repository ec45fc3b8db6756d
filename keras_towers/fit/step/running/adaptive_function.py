"""Keras's step functions, adapted to batches and to memory.

``AdaptiveFunction`` finds out which parts of a batch have rows, and
``memory_retries.py`` how many micro-batches fit. ``calls/tower_call.py`` wraps
the functions that Keras makes, and ``weights/model_binding.py`` drops those of
other strategies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig, TowerFunction
from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.step.graph.step_layout import StepLayout, StepSettings
from keras_towers.fit.step.running.memory_retries import MemoryRetries
from keras_towers.foundation.notices import announce
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous import activity

# The first steps of a call show which inputs are not divided and how much
# memory a step needs.
_FIRST_STEPS = 3
# A step is traced again for batches that are this many times larger.
_RETRACE_RATIO = 4

running_settings: ThreadLocal[StepSettings] = ThreadLocal()
"""The settings with which the function that this thread runs traces steps."""


class AdaptiveFunction(TowerFunction):
    """A function that Keras makes, wrapped to learn how to divide batches.

    It inspects the first batches of a call. Parts that turn out not to have a
    row for each example go to every tower whole. If memory may run out, the
    first steps of a call, and later lists of batches that are larger, run again
    with less of it.

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
        self._settings = settings
        self._retries: MemoryRetries | None = None
        if settings.repeats:
            self._retries = MemoryRetries(model.name, config, self._retrace)
        self._inspects = self._one_by_one = False
        # For batches of how many examples a step gathers rows; None: of any.
        self._gathers_for: int | None = None
        self._undivided: set[str] = set()
        # How many steps of this call were inspected.
        self._steps = 0
        # Whether data were read for a first step.
        self._has_read = False

    def begin_call(
        self,
        settings: StepSettings,
        rows_may_differ: bool,
        from_now: bool,
        one_by_one: bool,
    ) -> None:
        """Inspect the first batches of a call, if needed.

        Args:
            settings: what steps are traced for.
            rows_may_differ: whether parts of a batch may have different numbers
                of rows.
            from_now: whether batches may differ from the batches of earlier
                calls.
            one_by_one: whether each batch is read, then its step run.
        """
        self._settings = settings
        self._inspects = not self._model.run_eagerly and (
            self._retries is not None or rows_may_differ
        )
        if not from_now:
            return
        self._steps, self._one_by_one = 0, one_by_one
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
        if isinstance(data, list):
            if self._must_inspect(data):
                return self._inspect(data, lambda: data)
            return self._run_once(data)
        # Whoever gets fewer batches than an execution has runs fewer steps, so
        # the batches to inspect are read and run one by one.
        number, done, result = self._model.steps_per_execution, 0, None
        while done < number and (self._one_by_one or self._must_inspect(data)):
            if not self._has_read:
                self._has_read = True
                self._settings.make()
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
        if self._retries is None:
            return self._run_once(data())
        # The largest number of rows that a tower gets of one of them.
        rows = max(
            int(count) for batch in batches for count in self._counts_of(batch)
        )
        return self._retries.run(
            lambda: self._run_once(data()),
            rows,
            self._settings.places.ranks,
            # Steps of this call may not have fit yet.
            is_new=self._steps <= _FIRST_STEPS,
        )

    def _must_inspect(self, data: Structure) -> bool:
        """Whether to read the next batches before the steps do."""
        if isinstance(data, tf.data.Iterator):
            return self._inspects and self._steps < _FIRST_STEPS
        # Batches of any other iterator were already divided by TensorFlow.
        may_have_parts = isinstance(data, list)
        return self._inspects and (self._retries is not None or may_have_parts)

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

    def _run_once(self, data: Structure) -> Structure:
        settings = dataclasses.replace(
            self._settings, on_trace=self._note_trace
        )
        if self._retries is not None:
            settings = self._retries.planned(settings)
        with running_settings.holding(settings):
            return self._function(data)

    def _note_trace(self, graph: tf.Graph, layout: StepLayout) -> None:
        """Record a step that was traced but not run."""
        if layout.program.replaced_sums > 0:
            self._gathers_for = self._settings.examples
        if self._retries is not None:
            assert layout.plan is not None, "a step without a plan"
            self._retries.note_trace(graph, layout.plan)

    def _retrace(self) -> None:
        """Make Keras make the function again, so that it is traced again."""
        # The model's attribute may be another function that wraps this one.
        before = getattr(self._model, self._name)
        self._function = _make_by_keras(self._model, self._name, force=True)
        setattr(self._model, self._name, before)


def tower_function(
    model: keras.Model,
    name: str,
    config: TowerConfig,
    settings: StepSettings,
    force: bool = False,
) -> TowerFunction:
    """Return a model's function for towers; make it again if needed."""
    before = getattr(model, name)
    uses_towers = before is None or isinstance(before, TowerFunction)
    function = _make_by_keras(model, name, force or not uses_towers)
    if not isinstance(function, TowerFunction):
        function = AdaptiveFunction(model, name, config, settings)
        setattr(model, name, function)
    return function


def _make_by_keras(
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
