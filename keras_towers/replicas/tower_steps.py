"""Training steps of asynchronous towers, and when each tower runs one.

Keras cannot trace in several threads: steps are traced one by one in the thread
of ``fit``; the towers' threads call the traced functions only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers import devices as devices_lib
from keras_towers.fit.context import thread_state
from keras_towers.fit.contract import UpdateCall
from keras_towers.fit.step.keras_function import TowerFunction
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights.tower_variables import native
from keras_towers.replicas.averages import Averages, refuse_new_step
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.hogwild import HogwildUpdate
from keras_towers.replicas.named_resources import free
from keras_towers.replicas.replica_group import (
    END,
    Quorum,
    ReplicaEvent,
    ReplicaGroup,
)

_numbers = itertools.count()
_HOST = "/device:CPU:0"

Step = Callable[[Any], Any]


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
        self._traced: list[tuple[Any, list[Step]]] = []

    def forget(self) -> None:
        """Drop all traces, because the model has changed."""
        self._traced.clear()

    def for_batches(self, spec: Any) -> list[Step]:
        """Return the towers' steps for batches of a spec, traced."""
        for known, steps in self._traced:
            if known is spec or known == spec:
                return steps
        towers = range(self._config.num_towers)
        steps = [self._trace(index, spec) for index in towers]
        self._traced.append((spec, steps))
        return steps

    def _trace(self, index: int, spec: Any) -> Step:
        """Trace the step of a tower, as on one device."""
        config, model = self._config, self._model
        device = config.devices[index]
        train_step = model._autoconvert_optionals(model.train_step)
        active = thread_state.ActiveStep(
            training=True,
            apply=self._apply,
            index=index,
            total=config.num_towers,
            device=devices_lib.short_name(device),
        )

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Any:
            with tf.device(device):
                return self._run(index, train_step, batch)

        with compat.single_device_mode(), thread_state.tracing(active):
            function = tf.function(step, autograph=False)
            concrete = function.get_concrete_function(spec)
        return lambda batch: _to_numpy(concrete(batch))

    def _run(self, tower: int, step: Step, batch: Any) -> Any:
        """Run the step of a tower, while it is traced."""
        return tf.distribute.get_strategy().run(step, (batch,))

    def _apply(self, call: UpdateCall) -> None:
        """Handle a call of an optimizer in the step of a tower."""
        self._update.apply_in_step(call)

    # Called by ``TowerThreads`` during a ``fit``, in this order:

    def prepare(self, on_failure: Callable[[BaseException], None]) -> None:
        """Prepare, before the threads start; ``failed`` ends the training."""

    def wait_for_turn(self, tower: int) -> bool:
        """Wait, in a tower's thread, for its next batch; False at the end."""
        return True

    def wait_for_updates(self, whole: bool) -> None:
        """Wait for updates, when all batches have been trained on."""

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
        limit_s: float | None,
    ):
        super().__init__(update, model)
        self._begins = begins
        self._quorum = quorum
        self._limit_s = limit_s
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
        self._group = ReplicaGroup(name, _HOST, self._quorum)
        self._group.initialize()
        self._averages = Averages(
            name, self._group, _device_of, self._apply_average
        )
        self._freed = freed

    def _run(self, tower: int, step: Step, batch: Any) -> Any:
        self._averages.begin_step()
        # Once more: since its turn the tower may have waited for a batch.
        started = []
        if not self._quorum.shared:
            started.append(self._group.start_gradient(tower))
        with tf.control_dependencies(started):
            logs = super()._run(tower, step, batch)
        self._averages.end_step(tower)
        return logs

    def _trace(self, index: int, spec: Any) -> Step:
        if self._freed is None:
            self._create_group()
        return super()._trace(index, spec)

    def _apply(self, call: UpdateCall) -> None:
        self._update.make_ready(call.optimizer, call.variables)
        tower = thread_state.current_step()
        assert tower is not None
        self._averages.push(tower.index, call)

    def _apply_average(self, call: UpdateCall) -> None:
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
            limit_s=self._limit_s,
        )
        self._begins(self._coordinator)
        self._coordinator.start()

    def wait_for_turn(self, tower: int) -> bool:
        (step,) = self._group.calls(
            ("wait", tower), lambda: self._group.wait_for_step(tower)
        )
        return int(step) < END

    def wait_for_updates(self, whole: bool) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_until_handled(
                ReplicaEvent.FLUSH if whole else ReplicaEvent.SYNC
            )

    def release_threads(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            self._group.send_end_to_all()
            coordinator.stop()


def _device_of(variable: Any) -> str:
    return native(variable).device


def _to_numpy(logs: Any) -> Any:
    """Wait for the results of a step and copy them to the host."""
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, logs
    )
