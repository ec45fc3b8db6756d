"""Threads of asynchronous towers, and the training steps they run.

Keras cannot trace in several threads: steps are traced one by one in the thread
of ``fit``; the towers' threads call the traced functions only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_towers.fit.components import ApplyCall, TowerFunction
from keras_towers.fit.context import thread_state
from keras_towers.fit.step.graph.step_clock import StepRecorder
from keras_towers.fit.step.own_batch_step import run_for_own_batch
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights.copies import native
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Logs, Structure
from keras_towers.replicas.averages import Averages, refuse_new_step
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.hogwild import HogwildUpdate
from keras_towers.replicas.named_resources import free
from keras_towers.replicas.replica_counts import Quorum
from keras_towers.replicas.replica_group import END, ReplicaEvent, ReplicaGroup
from keras_towers.replicas.staleness import Staleness
from keras_towers.transport import devices as devices_lib

_numbers = itertools.count()

Step = Callable[[Structure], Structure]


class TowerSteps:
    """The training step of a model, traced for each of its towers.

    Every tower trains and updates without waiting for other towers.

    Attributes:
        alone: Keras's train function, for steps that no other step overlaps.
    """

    alone: TowerFunction | None = None

    def __init__(self, update: HogwildUpdate, model: keras.Model):
        self._update = update
        self._config = update.config
        self._model = model
        self._traced: list[tuple[Structure, list[Step]]] = []

    def forget(self) -> None:
        """Drop all traces, because the model has changed."""
        self._traced.clear()

    def for_batches(self, spec: object) -> list[Step]:
        """Return the towers' steps for batches of a spec, traced."""
        for known, steps in self._traced:
            if known is spec or known == spec:
                return steps
        towers = range(self._config.num_towers)
        steps = [self._trace(index, spec) for index in towers]
        self._traced.append((spec, steps))
        return steps

    def _trace(self, index: int, spec: object) -> Step:
        """Trace the step of a tower, as on one device."""
        config, model = self._config, self._model
        device = config.devices[index]
        train_step = compat.convert_optionals(model, model.train_step)
        active = thread_state.ActiveStep(
            training=True,
            apply=self._apply,
            index=index,
            total=config.num_towers,
            device=devices_lib.short_name(device),
        )

        @tf.autograph.experimental.do_not_convert
        def step(batch: Structure) -> Structure:
            with tf.device(device):
                return self._run(index, train_step, batch)

        with compat.single_device_mode(), thread_state.tracing(active):
            function = tf.function(step, autograph=False)
            concrete = function.get_concrete_function(spec)
        return lambda batch: _to_numpy(concrete(batch))

    def _run(self, tower: int, step: Step, batch: Structure) -> Structure:
        """Run the step of a tower, while it is traced."""

        def run(batch: Structure) -> Structure:
            return tf.distribute.get_strategy().run(step, (batch,))

        if not self._model.jit_compile:
            return run(batch)
        active = thread_state.current_step()
        assert active is not None
        active = dataclasses.replace(active, device=self._config.devices[tower])
        build = self._update.make_ready
        return run_for_own_batch(run, batch, self._model, active, build)

    def _apply(self, call: ApplyCall) -> None:
        """Handle a call of an optimizer in the step of a tower."""
        self._update.apply_on_tower(call)

    # Called by ``TowerThreads`` during a ``fit``, in this order:

    def prepare(self, on_failure: Callable[[BaseException], None]) -> None:
        """Prepare, before the threads start.

        Args:
            on_failure: ends the training.
        """

    def wait_for_turn(self, tower: int) -> bool:
        """Wait, in a tower's thread, for its next batch; False at the end."""
        return True

    def wait_for_updates(self, flush: bool) -> None:
        """Wait for updates; if ``flush``, also of too few gradients."""

    def release_threads(self) -> None:
        """Release all waiting threads."""


class ReplicaSteps(TowerSteps):
    """Steps whose gradients are averaged; a tower waits for its turn."""

    def __init__(
        self,
        update: HogwildUpdate,
        model: keras.Model,
        quorum: Quorum,
        begins: Callable[[Coordinator], None],
    ):
        super().__init__(update, model)
        self._begins = begins
        self._quorum = quorum
        self._coordinator: Coordinator | None = None
        # Frees the group; None before a step is traced.
        self._freed: weakref.finalize | None = None

    def forget(self) -> None:
        if self._coordinator is not None:
            refuse_new_step()
        super().forget()
        if self._freed is not None:
            self._freed()
            self._freed = None
            del self._averages, self._group

    def _create_group(self) -> None:
        self._update.forget_on_release(self)
        name = f"keras_towers/replicas_{next(_numbers)}"
        freed = weakref.finalize(self, free, name)
        freed.atexit = False
        self._group = ReplicaGroup(name, compat.HOST, self._quorum)
        self._group.initialize()
        self._averages = Averages(
            name,
            self._group,
            lambda variable: native(variable).device,
            self._apply_average,
        )
        self._freed = freed

    def _run(self, tower: int, step: Step, batch: Structure) -> Structure:
        with self._averages.tracing():
            # Once more: since its turn the tower may have waited for a batch.
            started = []
            if not self._quorum.shared:
                started.append(self._group.start_gradient(tower))
            with tf.control_dependencies(started):
                logs = super()._run(tower, step, batch)
            self._averages.end_step(tower)
        return logs

    def _trace(self, index: int, spec: object) -> Step:
        if self._freed is None:
            self._create_group()
        return super()._trace(index, spec)

    def _apply(self, call: ApplyCall) -> None:
        self._update.make_ready(call.optimizer, call.variables)
        tower = thread_state.current_step()
        assert tower is not None
        self._averages.push(tower.index, call)

    def _apply_average(self, call: ApplyCall) -> None:
        with as_one_device(call.optimizer, call.variables):
            call.update_variables()
            self._update.after_update(call.variables)

    def prepare(self, on_failure: Callable[[BaseException], None]) -> None:
        def fail(error: BaseException) -> None:
            on_failure(error)
            self._group.send_end_to_all()

        update = self._averages.update_function()
        self._averages.begin_fit()
        self._coordinator = Coordinator(
            self._group,
            lambda count: update(tf.constant(count)).numpy(),
            fail,
            self._config.options.stall_timeout_s,
        )
        self._begins(self._coordinator)
        self._coordinator.start()

    def wait_for_turn(self, tower: int) -> bool:
        (step,) = self._group.calls(
            ("wait", tower), lambda: self._group.wait_for_step(tower)
        )
        return int(step) < END

    def wait_for_updates(self, flush: bool) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_until_handled(
                ReplicaEvent.FLUSH if flush else ReplicaEvent.SYNC
            )

    def release_threads(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            self._group.send_end_to_all()
            coordinator.stop()


def _to_numpy(logs: Logs) -> Structure:
    """Wait for the results of a step and copy them to the host."""
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, logs
    )


THREAD_NAME_PREFIX = "keras-towers-async"


class TowerThreads:
    """One thread per tower, for the length of a ``fit``.

    Idle towers take batches from a shared queue, so a slow tower takes fewer
    and never blocks a fast one. The queue holds as many batches as there are
    towers, so that fast towers do not wait for data.

    All methods that wait raise any error of an earlier step, and TowerError if
    no step has ended for too long.

    Attributes:
        latest: the logs of the last batch whose step has ended.
    """

    def __init__(
        self,
        towers: int,
        steps: TowerSteps,
        stall_timeout_s: float | None = None,
        recorder: StepRecorder | None = None,
    ):
        self.latest: Structure = None
        self._towers = towers
        self._steps = steps
        self._stall_timeout_s = stall_timeout_s
        self._recorder = recorder
        # Guards all attributes below, and is notified of every change.
        self._changed = threading.Condition()
        self._waiting: collections.deque[
            tuple[int, Sequence[Step], Structure]
        ] = collections.deque()
        self._submitted = 0
        # The number of the batch that ``latest`` is of.
        self._latest_number = 0
        # The towers that are in a step.
        self._busy: set[int] = set()
        self._ended_steps = 0
        # The number of steps, by how many updates of other towers they missed.
        self._staleness: collections.Counter[int] = collections.Counter()
        self._error: BaseException | None = None
        self._closed = False
        self._hangs = False
        self._threads: list[threading.Thread] = []

    def submit(
        self, steps: Sequence[Step], batch: Structure, is_last: bool
    ) -> None:
        """Queue a batch for the next idle tower; wait while it is full.

        Args:
            steps: the towers' steps for it.
            batch: the batch.
            is_last: whether it is the last one of an epoch. It waits for the
                steps before, so that metrics that its step returns are of all.
        """
        with self._changed:
            self._wait(
                self._is_idle
                if is_last
                else lambda: len(self._waiting) < self._towers
            )
            self._submitted += 1
            self._waiting.append((self._submitted, steps, batch))
            self._changed.notify_all()
        if not self._threads:
            self._start()

    def drain(self, flush: bool = True) -> None:
        """Wait until all submitted batches are done.

        Args:
            flush: whether gradients that are too few for an update of replicas
                are applied, too.
        """
        with self._changed:
            self._wait(self._is_idle)
        self._steps.wait_for_updates(flush)
        with self._changed:
            self._raise_error()

    def _is_idle(self) -> bool:
        return not self._busy and not self._waiting

    def wait_for_a_step(self) -> None:
        """Wait until at least one step has ended."""
        with self._changed:
            self._wait(lambda: self.latest is not None)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait as long as steps end; called with the lock."""
        while self._error is None and not ready():
            ended = self._ended_steps

            def has_progressed(ended: int = ended) -> bool:
                failed = self._error is not None
                return failed or ready() or self._ended_steps != ended

            limit_s = self._stall_timeout_s
            if not self._changed.wait_for(has_progressed, limit_s):
                self._hangs = True
                raise TowerError(
                    f"no step has finished for {limit_s:g} s: "
                    f"replicas {sorted(self._busy)} of {self._towers} are "
                    "running one. A device hangs, or a step is very slow: "
                    "raise stall_timeout_s to wait longer."
                )
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def take_staleness(self) -> Staleness:
        """Return the staleness recorded since the last call."""
        with self._changed:
            counts, self._staleness = self._staleness, collections.Counter()
        return Staleness(dict(sorted(counts.items())))

    def close(self) -> None:
        """End the threads once all batches are done or dropped by an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._threads:
            self._steps.release_threads()
        for index, thread in enumerate(self._threads):
            # None if Ctrl-C was pressed before it was started.
            if thread.ident is not None:
                # A thread that hangs never ends.
                thread.join(0 if self._hangs and index in self._busy else None)
        self._threads.clear()
        # The error's traceback holds all objects of the fit call.
        self._error = None

    def _start(self) -> None:
        # Daemons, so that a second Ctrl-C exits without waiting for steps.
        # Stored before they start, so that Ctrl-C leaks no thread.
        self._threads += [
            threading.Thread(
                target=self._run,
                args=(index,),
                name=f"{THREAD_NAME_PREFIX}-{index}",
                daemon=True,
            )
            for index in range(self._towers)
        ]
        self._steps.prepare(self._fail)
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        """Train on one tower, in its thread."""
        try:
            while self._steps.wait_for_turn(index) and self._train(index):
                pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._busy.discard(index)
                self._changed.notify_all()

    def _train(self, index: int) -> bool:
        """Train on the next batch; return whether there was one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            number, steps, batch = self._waiting.popleft()
            self._busy.add(index)
            read = self._ended_steps
            self._changed.notify_all()
        span: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._recorder is not None:
            span = self._recorder.span(index)
        with span:
            result = steps[index](batch)
        with self._changed:
            self._staleness[self._ended_steps - read] += 1
            self._ended_steps += 1
            if number > self._latest_number:
                self.latest, self._latest_number = result, number
            self._busy.discard(index)
            self._changed.notify_all()
        return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._waiting.clear()
            self._changed.notify_all()
