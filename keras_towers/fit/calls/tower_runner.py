"""Runs Keras's methods with synchronous steps on all towers.

``keras_patches.py`` passes each call of ``fit``, ``evaluate``, ... to the
runner of its strategy. The runner makes a ``TowerCall`` (``tower_call.py``).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.calls import (
    callback_effects,
    callback_roles,
    model_building,
    saving,
    tower_call,
)
from keras_towers.fit.calls.callback_roles import ObservesFit, ResumesFit
from keras_towers.fit.calls.lone_call import LoneCall, refuse_in_thread
from keras_towers.fit.calls.tower_call import Runner, TowerCall
from keras_towers.fit.components import (
    FitStart,
    KerasCall,
    TowerConfig,
)
from keras_towers.fit.context import step_errors, thread_state
from keras_towers.fit.data import model_use
from keras_towers.fit.data.epoch_iterator import Undistributed
from keras_towers.fit.data.shuffle_order import ShuffleOrder
from keras_towers.fit.ranks import call_agreement
from keras_towers.fit.step.graph.trace import Trace
from keras_towers.fit.weights import agreement, model_state, writes
from keras_towers.foundation import compat
from keras_towers.foundation.errors import (
    EndOfJob,
    TowerError,
    failed_elsewhere,
    shorten,
)
from keras_towers.foundation.object_types import Structure
from keras_towers.jobs.rendezvous import (
    activity,
    failed_calls,
    rank_checks,
    separate_training,
    watch,
)
from keras_towers.jobs.rendezvous.failed_calls import Failure
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.transport.engine_transport import MAYBE_LOST


class TowerRunner(Runner):
    """Runs Keras's methods on towers."""

    def run_call(self, keras_call: KerasCall) -> Structure:
        """Run a call of a method of Keras."""
        resuming = callback_roles.only_one(ResumesFit, keras_call)
        if resuming is None:
            return self._start(keras_call, None)
        with resuming.around():
            arguments = keras_call.arguments
            first = arguments.get("initial_epoch", 0)
            start = resuming.find_start(
                self._config.job, keras_call.model, first
            )
            arguments["initial_epoch"] = start.epoch
            ended = start.epoch >= arguments.get("epochs", 1)
            if (start.done or start.batch) and not ended:
                callback_roles.warn_of_counters(arguments)
            return self._start(keras_call, start)

    def failing_together(
        self, kind: str
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a call fails on all ranks or on none.

        A call within another one uses the block of the outer call.

        Args:
            kind: the method of Keras.
        """
        if tower_call.around() is not None:
            return contextlib.nullcontext()
        if self._config.transport.size > 1:
            separate_training.refuse_child()
            if model_use.reads_data() and failed_calls.calls.are_elsewhere:
                raise TowerError(
                    f"{kind} is called in a thread that reads data, but the "
                    "call that needed them has ended."
                )
        return failing_together(self._config, kind)

    @property
    def runs_plain_keras(self) -> bool:
        """Whether calls run as in plain Keras, without towers."""
        return not self._config.divides

    def _must_plan(self, keras_call: KerasCall) -> bool:
        """Whether a step of plain Keras does not fit, but a planned one may."""
        model, kind = keras_call.model, keras_call.kind
        options = self._config.options
        is_free = None in (options.remat, options.micro_batches)
        may_again = kind == "fit" and is_free
        if not may_again or self.step.memory.own_limit is None:
            return False
        batch, examples = _batch_of(keras_call)
        if batch is None or model_state.runs_eagerly(model):
            return False
        with self._planned_call(model, kind) as call:
            call.make_variables(batch)
        return self.step.memory.exceeds(model, kind, batch, examples)

    def _start(
        self, keras_call: KerasCall, start: FitStart | None
    ) -> Structure:
        kind, model = keras_call.kind, keras_call.model
        outer = tower_call.around()
        # A fit that goes on from a backup has its evaluation on its tower.
        if self.runs_plain_keras and start is None and outer is None:
            self.adoption.refuse_others(model)
            if model_building.layers_are_built(model):
                self.step.memory.check_variables(model, kind, self._config.job)
            if not self._must_plan(keras_call):
                self.adoption.release_model(model)
                return run_on_one_device(keras_call)
        if outer is not None and not _starts_on_all(keras_call, outer):
            return self._start_alone(keras_call)
        # Loops over batches call this for every batch: prepare only once.
        prepared = kind.endswith("_on_batch") and self.adoption.prepared.have(
            model, kind
        )
        self._note_writes(keras_call, prepared and outer is None)
        try:
            # Keras validates at the same place on all ranks.
            if not keras_call.arguments.get("_use_cached_eval_dataset"):
                self._agree(keras_call, prepared, outer)
            with self._config.strategy.scope():
                if not prepared:
                    self.adoption.claim(model)
                if kind == "evaluate" and outer is None:
                    self.adoption.end_rounds()
                elif not keras_call.trains:
                    self.adoption.update.end_rounds()
                call = self.make_call(keras_call, prepared, start)
                with contextlib.ExitStack() as stack:
                    if prepared and outer is None:
                        naming = call_agreement.naming_ended_ranks
                        stack.enter_context(naming(self._config, kind))
                    stack.enter_context(noting_causes(call))
                    return self._run(call)
        except tf.errors.OpError as error:
            refused = step_errors.error_for_user(error)
            if refused is not None:
                raise refused from None
            if rank_checks.OTHER_WRITES in str(error):
                # Ranks share all, as at the beginning of a fit.
                self.adoption.prepared.forget(model)
                return self._start(keras_call, start)
            if rank_checks.OTHER_STEP not in str(error):
                raise
            agreement_of_steps = self.step.order.agreement
            raise agreement_of_steps.mismatch_error(said=str(error)) from None
        finally:
            if outer is None:
                self._config.transport.note_wait("")

    def _note_writes(self, keras_call: KerasCall, compares: bool) -> None:
        """Let steps compare what was written since the last call.

        Args:
            keras_call: the call.
            compares: whether ranks do not share all when it begins.
        """
        if self.places(keras_call.kind).ranks.job.size == 1:
            return
        model, trains = keras_call.model, keras_call.trains
        number, seen = 0, self._seen_writes.setdefault(model, {})
        outside = self.step.comparison.outer_variables(model)
        # A step may use variables for the first time after writes of them.
        noted = writes.number(), len(outside)
        if seen.get(trains) != noted:
            seen[trains] = noted
            variables: list[Any] = [
                *model_state.shared_variables(model, optimizers=trains),
                *outside,
            ]
            written = [
                (k, agreement.digest_of(variables[k]))
                for k in writes.take(variables)
                if compares
            ]
            if written:
                number = 1 + zlib.crc32(repr(written).encode()) // 2
        self.step.order.agreement.note_writes(number)

    def _agree(
        self, keras_call: KerasCall, prepared: bool, outer: TowerCall | None
    ) -> None:
        """Begin a call together with the other ranks.

        Args:
            keras_call: the call.
            prepared: whether they have compared such calls of the model.
            outer: the call around it, if any.
        """
        config, kind = self._config, keras_call.kind
        config.transport.note_wait(
            kind if prepared else f"the beginning of {kind}"
        )
        if self.places(kind).ranks.job.size == 1:
            return
        again = self.adoption.prepared.had_another(keras_call.model, kind)
        where = call_agreement.beginning_of(keras_call, again)
        access = self.adoption.update.variables.access
        if outer is None and access.may_need_all:
            call_agreement.serve(config, access, kind, where)
        if not prepared:
            observer = callback_roles.only_one(ObservesFit, keras_call)
            call_agreement.check_call(config, keras_call, observer, where)

    def _start_alone(self, keras_call: KerasCall) -> Structure:
        """Run a call in a callback that only some ranks make."""
        model = keras_call.model
        doing = f"{keras_call.kind} of model {model.name!r} on this rank alone"
        with self._config.strategy.scope(), activity.within(doing):
            self.adoption.claim(model)
            call = LoneCall(self, keras_call)
            with noting_causes(call):
                return self._run(call)

    def make_call(
        self, keras_call: KerasCall, prepared: bool, start: FitStart | None
    ) -> TowerCall:
        """Create the call object that Keras's loop uses."""
        return TowerCall(self, keras_call, prepared, start)

    def plan(
        self,
        model: keras.Model,
        batch: Structure,
        examples: int | None,
        kind: str = "fit",
        emits: bool = False,
    ) -> tuple[Trace, Timeline]:
        """Trace and plan a step without running it.

        Args:
            model: a compiled model.
            batch: the specs of a global batch, as Keras passes it to the step.
            examples: the number of examples of a batch; None: unknown.
            kind: the method of Keras that the step belongs to.
            emits: whether it is added to a graph, too.
        """
        with self._planned_call(model, kind) as call:
            call.examples[kind] = examples
            call.build(data_batch=batch)
            with compat.FuncGraph("plan").as_default():
                inputs = model_building.placeholders(batch)
                step = compat.convert_call(model_building.step_of(model, kind))
                return self.step.plan(step, inputs, call.settings, emits)

    def plan_variables(self, model: keras.Model, kind: str) -> None:
        """Place the variables of a built model, for steps that never run."""
        with self._planned_call(model, kind) as call:
            call.place_variables()
            if model_building.uses_optimizer(model, kind):
                weights = model.trainable_variables
                self.adoption.update.make_ready(model.optimizer, weights)

    @contextlib.contextmanager
    def _planned_call(
        self, model: keras.Model, kind: str
    ) -> Iterator[TowerCall]:
        keras_call = KerasCall(kind, getattr(type(model), kind), model, {})
        with self._config.strategy.scope(), tower_call.outside():
            self.adoption.claim(model)
            call = self.make_call(keras_call, False, None)
            with call.installed():
                yield call

    def _run(self, call: TowerCall) -> Structure:
        keras_call = call.keras_call
        arguments = keras_call.arguments
        config = self._config
        has_peers = config.job.size > 1 and not call.is_alone
        outer = tower_call.current()
        with contextlib.ExitStack() as stack:
            if call.kind == "fit" and (call.start or has_peers):
                call.shuffle_order = ShuffleOrder(config.job, call.start)
                stack.enter_context(call.shuffle_order.of_sequences())
            stack.enter_context(call.installed())
            if call.kind == "predict_on_batch":
                call.build(data_batch=(arguments["x"],))
            if has_peers:
                stack.enter_context(
                    callback_effects.callbacks_adapted(
                        config, self.adoption, call, outer is not None
                    )
                )
            stack.enter_context(
                callback_roles.swapping_on_first_tower(arguments)
            )
            stack.enter_context(callback_roles.observed(keras_call, config))
            result = keras_call.call_keras()
        if _sums_metrics_within(outer, call):
            self.adoption.leave_metrics_to_rank_0(call.model)
        return result


def _starts_on_all(keras_call: KerasCall, outer: TowerCall) -> bool:
    """Whether all ranks make a call that begins within another one.

    Args:
        keras_call: the call.
        outer: the call of all ranks around it, perhaps in another thread.
    """
    outer.wait_for_steps(keras_call.trains)
    if outer is not tower_call.current():
        refuse_in_thread(keras_call, outer)
        return False
    name = rank_checks.without_numbers(keras_call.model.name)
    what = f"{keras_call.kind} of model {name!r}"
    return len(set(outer.meeting.meet(what, keras_call))) == 1


def _sums_metrics_within(outer: TowerCall | None, call: TowerCall) -> bool:
    """Whether a call sums metrics that a running ``fit`` still updates."""
    # Keras resets the metrics after the validation inside fit.
    validates = call.keras_call.arguments.get("_use_cached_eval_dataset")
    return (
        outer is not None
        and not call.is_alone
        and outer.kind == "fit"
        and outer.model is call.model
        and call.kind in ("fit", "evaluate", "test_on_batch")
        and not validates
    )


def _batch_of(keras_call: KerasCall) -> tuple[Structure, int | None]:
    """Return the specs and the number of examples of a batch of ``fit``.

    They are None if only the code of the data knows them.
    """
    names = ("x", "y", "sample_weight", "batch_size")
    data = {name: keras_call.arguments.get(name) for name in names}
    leaves = tf.nest.flatten([data["x"], data["y"], data["sample_weight"]])
    known = (np.ndarray, tf.Tensor, tf.data.Dataset, type(None))
    if not all(isinstance(leaf, known) for leaf in leaves):
        return None, None
    reader = compat.TFEpochIterator(Undistributed, **data)
    dataset = reader._distributed_dataset
    size = reader.data_adapter.batch_size or compat.batch_size_of(dataset)
    return dataset.element_spec, size


def run_on_one_device(keras_call: KerasCall) -> Structure:
    """Run a call as plain Keras does, on one device."""
    with (
        compat.single_device_mode(),
        thread_state.trains_on_one_device.holding(keras_call.trains),
        callback_roles.observed(keras_call),
    ):
        return keras_call.call_keras()


@contextlib.contextmanager
def noting_causes(call: TowerCall) -> Iterator[None]:
    """Add possible causes to any error that a call raises."""
    try:
        yield
    except Exception as error:
        if call.refused is not None and isinstance(error, tf.errors.OpError):
            raise call.refused from None
        iterator = call.epoch_iterator
        spec = None if iterator is None else iterator.source.element_spec
        # The targets are scalars, as if the dataset were unbatched.
        if isinstance(spec, tuple) and any(
            getattr(leaf, "shape", None) == ()
            for leaf in tf.nest.flatten(spec[1:])
        ):
            error.add_note(
                "The targets of the dataset have no rows: if it yields single "
                "examples, it needs .batch(n)."
            )
        raise


@contextlib.contextmanager
def failing_together(config: TowerConfig, kind: str) -> Iterator[None]:
    """Make a call that fails on one rank fail on all.

    The error names the tower or rank that failed. A script may survive any
    exception, such as the KeyboardInterrupt of a Ctrl-C.

    Args:
        config: the towers.
        kind: the method of Keras.

    Raises:
        TowerError: it has failed on another rank.
    """
    transport, calls = config.transport, failed_calls.calls
    joint, first = transport.size > 1, None
    here = f"{kind} has ended on rank {transport.rank}"
    if joint:
        with call_agreement.naming_ended_ranks(config, kind):
            saving.go_on(in_loop=kind.endswith("_on_batch"))
            first = calls.begin(transport)
        if first is not None:
            raise failed_elsewhere(here, _described(first))
    try:
        yield
        # Steps of a loop over batches, and ranks with data of their own, do not
        # wait for one another here.
        in_lockstep = config.places(kind).ranks.in_lockstep
        if in_lockstep and not kind.endswith("_on_batch"):
            rank_checks.gather(transport, None, f"is at the end of {kind}")
    except EndOfJob:
        # All ranks end, and need no connection to begin another call.
        raise
    except BaseException as error:
        cause: BaseException = error
        if isinstance(error, tf.errors.OpError):
            step_errors.explain_on_towers(error, config)
            cause = transport.cause_of(error)
        if joint:
            first = calls.fail(transport, shorten(cause))
        if not isinstance(error, tf.errors.OpError):
            if first is not None:
                error.add_note(
                    f"keras_towers: rank {first.rank} failed first: {first.why}"
                )
            raise
        if first is not None:
            # The error is that of a collective which other ranks have left.
            raise failed_elsewhere(here, _described(first)) from None
        gone = watch.gone_ranks() if isinstance(cause, MAYBE_LOST) else {}
        if gone:
            ranks = "; ".join(f"{n}, which {how}" for n, how in gone.items())
            raise failed_elsewhere(here, ranks) from None
        if cause is not error:
            raise cause from None
        raise
    finally:
        if joint:
            calls.end()


def _described(failure: Failure) -> str:
    return f"rank {failure.rank}: {failure.why}"
