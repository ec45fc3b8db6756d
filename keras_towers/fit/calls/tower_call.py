"""A call of a Keras method on towers, and its interface to Keras's own loop.

``tower_runner.py`` makes a ``TowerCall`` for each call;
``fit/step/global_step.py`` runs its steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import keras

from keras_towers.fit.calls import keras_loop, model_building
from keras_towers.fit.calls.keras_loop import UserStep
from keras_towers.fit.calls.meeting import Meeting
from keras_towers.fit.components import (
    FitStart,
    KerasCall,
    KerasStrategy,
    TowerConfig,
)
from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.data import model_use
from keras_towers.fit.data.data_use import DataUse
from keras_towers.fit.data.epoch_iterator import TowerEpochIterator
from keras_towers.fit.options import Shards
from keras_towers.fit.places import Places
from keras_towers.fit.step.global_step import GlobalStep
from keras_towers.fit.step.graph.step_layout import StepSettings
from keras_towers.fit.step.running.adaptive_function import (
    AdaptiveFunction,
    running_settings,
    tower_function,
)
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights import model_state
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.fit.weights.writes import OuterVariable
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Logs, Step, Structure
from keras_towers.jobs.rendezvous import activity, rank_checks

if TYPE_CHECKING:
    from keras_towers.fit.data.shuffle_order import ShuffleOrder


_calls: ThreadLocal[TowerCall] = ThreadLocal()
# The calls of all ranks, in the one thread that makes such calls.
_joint: list[TowerCall] = []


def current() -> TowerCall | None:
    """Return the call that this thread is running, or None."""
    return _calls.get()


def around() -> TowerCall | None:
    """Return the call that this thread works for, or None.

    A thread that runs no call itself may work for a call of all ranks in
    another thread, such as read its data.
    """
    return current() or (_joint[-1] if _joint else None)


def outside() -> contextlib.AbstractContextManager[None]:
    """Return a block in which this thread counts as running no call."""
    return _calls.holding(None)


def step_of(fn: Callable[..., object]) -> Callable[..., Structure] | None:
    """Return a runner for a function that is a step of this thread's call.

    None: it is not a step of Keras, and runs on each tower.

    Args:
        fn: what ``Strategy.run`` gets.

    Raises:
        TowerError: it is one, but of no call.
    """
    call, is_step = current(), keras_loop.is_of_keras(fn)
    if call is None and is_step:
        raise keras_loop.without_call()
    if call is None or not (
        is_step or fn in (call.model.train_step, call.model.test_step)
    ):
        return None
    # The user wrote the train function, and AutoGraph rewrites it.
    step = fn if isinstance(fn, UserStep) else compat.convert_call(fn)
    return functools.partial(call.run_step, step)


class Runner:
    """Runs the calls of a strategy.

    Attributes:
        step: runs their steps.
        adoption: the models on the towers.
        undivided: what batches so far have shown, as in ``StepSettings``.
    """

    def __init__(self, update: WeightUpdate, keeps: bool = True):
        self._config: TowerConfig = update.config
        self.step: GlobalStep = GlobalStep(update)
        self.adoption: Adoption = Adoption(self._config, update, keeps)
        self.undivided: dict[tuple[str, ...], set[str]] = {}
        # Up to which write models were asked, by whether the call trains.
        self._seen_writes: weakref.WeakKeyDictionary[
            keras.Model, dict[bool, tuple[int, int]]
        ] = weakref.WeakKeyDictionary()

    def places(self, kind: str) -> Places:
        """Return where the steps of a method compute, and with whom."""
        return self._config.places(kind)


class TowerCall:
    """A call of ``fit``, ``evaluate``, ... of one model on towers.

    While it runs, the attributes of the model by which Keras's loop builds it,
    makes its functions and ends an epoch's steps are shadowed by this object's.
    ``start`` is the position in the data where ``fit`` resumes, or None.

    Attributes:
        is_alone: whether other ranks do not make this call.
        makes_first: whether all variables are made before the first step.
        places: where its steps compute, and with whom.
        meeting: how ranks meet while code of the user runs.
        examples: the usual number of examples of a batch, by the method of
            Keras; None: unknown.
    """

    is_alone = False
    makes_first = False

    def __init__(
        self,
        runner: Runner,
        keras_call: KerasCall,
        prepared: bool = False,
        start: FitStart | None = None,
    ):
        self._step: GlobalStep = runner.step
        self._undivided = runner.undivided
        self.config: TowerConfig = self._step.config
        self.adoption: Adoption = runner.adoption
        self.keras_call = keras_call
        self.model = keras_call.model
        self.kind = keras_call.kind
        self.start = start
        self.epoch_iterator: TowerEpochIterator | None = None
        # Why what reads its data has failed, where TensorFlow wraps the error.
        self.refused: TowerError | None = None
        self.meeting: Meeting = Meeting(self.config.transport)
        self._iterators: list[TowerEpochIterator] = []
        self.shuffle_order: ShuffleOrder | None = None
        self._prepared = prepared
        outer = current()
        self._is_nested: bool = outer is not None
        # Inside another call of the same model, ranks have the same values.
        self._is_inner = (
            outer is not None and outer.model is self.model and outer._prepared
        )
        self._places_of = runner.places
        self.places: Places = runner.places(self.kind)
        # Keras's fit makes the iterator of a validation within it.
        self.examples: dict[str, int | None] = {}
        if outer is not None and outer.model is self.model:
            self.examples = outer.examples
        # The specs of a batch, to trace a step with.
        self._batch: Structure = None
        self._has_made_all = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install this call on the model inside a ``with`` block."""
        with (
            contextlib.ExitStack() as ending,
            _calls.holding(self),
            keras_loop.iterators.holding(self.iterator),
            patches.shadowed(self.model, self.shadows()),
            contextlib.ExitStack() as stack,
        ):
            if not self.is_alone:
                stack.enter_context(self._among_calls())
            try:
                yield
            finally:
                self.end_threads()
                ending.enter_context(model_use.ending)
                if self.epoch_iterator is not None:
                    # The process would hang at its exit if TensorFlow were
                    # still running Python code that reads an unused batch.
                    self.epoch_iterator.release()

    @contextlib.contextmanager
    def _among_calls(self) -> Iterator[None]:
        """Order the steps and the calls of this rank as on all other ranks."""
        order = self._step.order
        with contextlib.ExitStack() as stack:
            if self.config.transport.size > 1:
                _joint.append(self)
                stack.callback(_joint.remove, self)
            if self._is_nested:
                # The next step of the call around this one may be its first.
                stack.enter_context(order.within_epoch())
            if not self._prepared:
                order.begin_epoch()
            yield

    def shadows(self) -> dict[str, object]:
        """Return the model attributes to shadow, by name."""
        return {
            "_maybe_symbolic_build": self.build,
            "_get_metrics_result_or_logs": self._end_of_steps,
            "_make_function": self._make_function,
            **{
                f"make_{kind}_function": functools.partial(
                    self._make_step_function, kind
                )
                for kind in ("train", "test", "predict")
            },
        }

    def _original_method(self, name: str) -> Callable[..., Any]:
        """Return the model's own method, also inside another of its calls."""
        return getattr(type(self.model), name).__get__(self.model)

    def _make_step_function(self, kind: str, force: bool = False) -> None:
        """Replacement for ``make_train_function`` and its siblings.

        A function that was traced outside of any call does not use the towers,
        and may be compiled by XLA.
        """
        iterator = self.epoch_iterator
        if kind == "predict" and iterator is not None:
            self.build(iterator)
        settings = self.settings
        function = tower_function(
            self.model, f"{kind}_function", self.config, settings, force
        )
        if isinstance(function, AdaptiveFunction):
            from_now = not self.kind.endswith("_on_batch")
            if iterator is None and kind == "test" and from_now:
                # The validation of a fit, which has made its iterator.
                iterator = getattr(self.model, "_eval_epoch_iterator", None)
            function.begin_call(
                settings,
                rows_may_differ=self.config.options.batches == "split"
                and iterator is not None
                and iterator.has_unknown_rows(),
                from_now=from_now,
                one_by_one=iterator is not None and iterator.is_read_by_steps,
            )

    def _make_function(self, step: Step) -> Step:
        """Replacement for ``_make_function``, given a marked step."""
        return self._original_method("_make_function")(UserStep(step))

    def wait_for_steps(self, trains: bool) -> None:
        """Wait for steps running in other threads, if any."""

    def end_threads(self) -> None:
        """End the threads that run steps, if any."""

    @property
    def settings(self) -> StepSettings:
        """The settings of the call's steps, before functions adapt them."""
        examples = self.examples.get(self.kind)
        number = self.config.options.micro_batches
        # A loop over batches would ask the other ranks at each of them.
        in_loop = self.kind.endswith("_on_batch")
        may_run_out = self._step.memory.has_limit and not in_loop
        return StepSettings(
            self.model,
            self.kind,
            self.places,
            self._undivided,
            examples,
            repeats=number == "auto" or (number is None and may_run_out),
            place=self._place_made,
            divide=self._divide if self._may_divide else None,
            make=self._make_unbuilt,
        )

    @property
    def _may_divide(self) -> bool:
        """Whether all ranks can divide variables between two traces."""
        ranks = self.places.ranks
        together = ranks.job.size == 1 or ranks.in_lockstep
        return together and not (self.is_alone or self._is_nested)

    def _divide(self, shards: Shards) -> None:
        """Divide variables, between two traces of a step. Collective.

        Args:
            shards: the option by which they are divided.
        """
        strategy = self.config.strategy
        assert isinstance(strategy, KerasStrategy), strategy
        with compat.unseen():
            strategy._divide(shards)
            self._place_all(renews=True, but=self._function_name)
            if self.keras_call.trains:
                self.adoption.begin_steps(self.model)

    @property
    def _function_name(self) -> str:
        """The name of the model's attribute for the function of its steps."""
        if self.keras_call.trains:
            return "train_function"
        is_test = not self.kind.startswith("predict")
        return "test_function" if is_test else "predict_function"

    def run_step(self, step: Step, batch: Structure) -> Structure:
        settings = running_settings.get() or self.settings
        return self._step.run_step(step, batch, settings)

    @property
    def outer_variables(self) -> list[OuterVariable]:
        """The variables outside of the model that its steps use."""
        return self._step.comparison.outer_variables(self.model)

    def iterator(self, **kwargs: object) -> TowerEpochIterator:
        # The second iterator of a fit is for validation.
        first = self.epoch_iterator is None
        kind = self.kind if first else "evaluate"
        iterator = TowerEpochIterator(self._data_use(kind), **kwargs)
        self._iterators.append(iterator)
        if kind == "fit" and self.start is not None:
            iterator.skip_to(self.start)
        if first:
            self.epoch_iterator = iterator
        self.examples[kind] = iterator.batch_size
        return iterator

    def _epochs(self, kind: str) -> int | None:
        """Return how many epochs use one iterator over data, if it is known."""
        if kind != "fit":
            return 1
        if self.start is not None:
            return None
        arguments = self.keras_call.arguments
        return arguments.get("epochs", 1) - arguments.get("initial_epoch", 0)

    def _data_use(self, kind: str) -> DataUse:
        # The validation of a fit has its own.
        is_own = kind == self.kind
        places = self.places if is_own else self._places_of(kind)
        # What still reads the data later must not keep the model.
        model = weakref.ref(self.model)
        return DataUse(
            self.config,
            places,
            kind,
            self.shuffle_order,
            epochs=self._epochs(kind),
            state=functools.partial(_variables_of, model),
            end_data=lambda batches: self._step.order.end_data(
                batches, self.model, places.ranks.share_step
            ),
            within=self.meeting.within_data,
        )

    def refuse(self, why: str) -> TowerError:
        """Return an error for data to raise, which ends the call."""
        error = TowerError(why)
        if model_use.reads_data():
            self.refused = error
        return error

    def why_not_use(self, model: keras.Model) -> str:
        """Return why threads that read the data must not use a model."""
        written = model_state.collect(self.model).everything()
        if not model_use.are_any(model.variables, written) or any(
            iterator.is_read_by_steps for iterator in self._iterators
        ):
            return ""
        reasons = [iterator.why_not_use for iterator in self._iterators]
        return next(filter(None, reasons), "")

    def build(
        self,
        iterator: TowerEpochIterator | None = None,
        data_batch: Structure = None,
    ) -> None:
        """Replacement for ``_maybe_symbolic_build``: place what is there.

        The first step makes the other variables, as on one device.
        """
        if iterator is not None:
            data_batch = model_building.batch_spec(iterator)
        self._batch = data_batch
        if self.makes_first or self._must_make_now():
            self.make_variables(data_batch)
        self.prepare()

    def _must_make_now(self) -> bool:
        """Whether ranks cannot make variables in the first step, together."""
        ranks = self.places.ranks
        if self._prepared or ranks.job.size == 1:
            return False
        # Only ranks that take the same steps can place variables in one.
        if self._is_nested or not ranks.in_lockstep:
            return True
        where = f"prepares {self.kind}"
        made = model_building.parts_made(self.model)
        return len(set(rank_checks.gather(ranks.job, made, where))) > 1

    def make_variables(self, batch: Structure) -> None:
        """Make the variables that a step would make, by a trace of one.

        Args:
            batch: the specs of a batch, or its arrays.
        """
        model, kind = self.model, self.kind
        if not model_building.needs_build(model, kind):
            return
        step = compat.convert_call(model_building.step_of(model, kind))
        with compat.FuncGraph("variables").as_default():
            inputs = model_building.placeholders(batch)
            # They are placed with what all ranks have.
            settings = dataclasses.replace(self.settings, place=lambda: None)
            self._step.make_variables(step, inputs, settings)

    def prepare(self) -> None:
        """Place all variables that the model has on the towers."""
        if not self._prepared:
            self._place_all(renews=True)
        if self.kind == "train_on_batch":
            self.adoption.begin_steps(self.model)

    def prepare_all(self) -> None:
        """Make and place all variables, before any step."""
        if not self._has_made_all:
            self._has_made_all = True
            self.make_variables(self._batch)
            self._place_all(renews=True)

    def _make_unbuilt(self) -> None:
        """Make the variables of an unbuilt model, before data are read.

        One device traces the first step, which makes them, before it reads. A
        step of one's own may use built layers only, and never build the model.
        """
        layers = list(self.model._flatten_layers(include_self=False))
        builds = not layers or not all(layer.built for layer in layers)
        if builds and not self.model.built:
            self.make_variables(self._batch)
            self._place_made()

    def _place_made(self) -> None:
        """Place what a step has made; only its own function has used it."""
        self._place_all(renews=False)
        if self.keras_call.trains:
            self.adoption.begin_steps(self.model)

    def _place_all(self, renews: bool, but: str = "") -> None:
        ranks = self.places.ranks.job
        # A call that is alone has what ranks have placed together.
        if not self.is_alone:
            self._step.memory.check_variables(
                self.model,
                self.kind,
                ranks,
                self.adoption.prepared.have(self.model, self.kind),
            )
        new = self.place_variables(renews, but)
        if new or self.kind == "fit" or not self._is_inner:
            self.adoption.synchronize(self.model, ranks, self.keras_call.trains)
        # Ranks have yet to compare a model that a call uses alone.
        if not self.is_alone:
            self.adoption.prepared.add(self.model, self.kind)
        self._prepared = True

    def place_variables(self, renews: bool = True, but: str = "") -> bool:
        """Place the model's variables; return whether any were new.

        Args:
            renews: whether functions that have used them are made again.
            but: the name of the model's function that is being traced.
        """
        placed = self.adoption.agree_on_wholes(
            self.model, self.places.ranks.job, self.keras_call.trains
        )
        return self.adoption.bind(self.model, placed, renews, but)

    def _end_of_steps(self, logs: Logs) -> Logs:
        """Replacement for ``_get_metrics_result_or_logs``."""
        if not self.is_alone:
            # The step in which the data has ended was cancelled.
            activity.this_rank.exchanges.settle()
            self.config.transport.note_wait(f"end of {self.kind}")
            self._step.order.begin_epoch()
        logs = self.finish_steps(logs)
        iterator = self.epoch_iterator
        if not logs and iterator is not None and iterator.was_empty():
            refuse_empty(self.kind, self.model)
        if self.kind == "fit":
            self.adoption.sum_metrics(self.model)
            self.adoption.end_rounds()
            if self.config.options.sync_every_epoch:
                self.adoption.broadcast(self.model)
        activity.mark_over()
        return self._original_method("_get_metrics_result_or_logs")(logs)

    def finish_steps(self, logs: Logs) -> Logs:
        """End an epoch's steps; return its logs, given the last step's."""
        return logs


def _variables_of(
    model: weakref.ref[keras.Model],
) -> Collection[keras.Variable]:
    """Return all variables of a model, if it is still there."""
    alive = model()
    return [] if alive is None else model_state.collect(alive).everything()


def refuse_empty(kind: str, model: keras.Model) -> NoReturn:
    """Reject a call without batches, about which Keras only warns."""
    raise TowerError(
        f"{kind} of model {model.name!r} got no batch: the dataset is empty. "
        "Give at least one example."
    )
