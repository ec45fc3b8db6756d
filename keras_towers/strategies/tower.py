"""A replica of the model on every tower of one machine, kept equal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.errors import TowerError
from keras_towers.fit import adoption, hooks, interrupts, lockstep, step
from keras_towers.fit import session as session_lib
from keras_towers.fit import tower as tower_lib
from keras_towers.strategies import modes
from keras_towers.transport import SingleProcess, Transport

# TensorFlow numbers the collectives of every strategy from this base; two
# strategies of different size in one process must not share numbers.
_collective_key_bases = itertools.count(1_000_000, 100_000)


class TowerStrategy(tf.distribute.MirroredStrategy):
    """Trains an existing Keras model on several devices of one machine.

    Every tower has a replica of the model and computes gradients on its part
    of the batch; these are all-reduced, and the optimizer then does what it
    would do on one device, so that the weights are those of one device, float
    rounding apart. It is a real ``tf.distribute.Strategy``: it can also be
    used as ``with strategy.scope():`` and in a custom loop.

    It carries over tensorpack's ``SyncMultiGPUTrainerReplicated``
    (``mode="nccl"``, ``"cpu"``, ``"hierarchical"``, ``"collective"``) and
    ``SyncMultiGPUTrainer``.

    Args:
        towers: number of devices, a list of GPU ids, a list of device names,
            or None for all visible GPUs, else all logical CPUs.
        mode: how gradients are summed: ``"nccl"``, ``"collective"``
            (TensorFlow's collective ops: ring on CPUs, NCCL on GPUs),
            ``"hierarchical"`` (two groups; needs an even number of towers),
            ``"gpu"`` (on the towers in turn), ``"cpu"`` (on the host), or None
            to pick. A mode that cannot run falls back, with a logged reason.
        average: True if the loss is a mean over the batch (Keras's habit):
            gradients are averaged over examples. False sums the towers'
            gradients, for a custom ``train_step`` whose loss is a sum.
        batches: ``"split"``: the global batch is split over the towers.
            ``"each"``: every tower draws a whole batch of its own in ``fit``,
            so that a step uses batch size times towers examples.
        sync_every_epoch: set all towers equal at each epoch's end, also the
            variables that a tower changes by itself (moving statistics).
        updates: ``"once"``: tower 0 updates the weights and hands them out;
            ``"each"``: every tower updates its own copy. None: ``"once"``
            where the towers share memory, ``"each"`` otherwise.
        packer: a ``GradientPacker`` that puts gradients into few buffers before
            they are summed, True for one with its defaults, False for none.
            None: one on accelerators, none on CPUs.

    Attributes:
        mode: the mode that runs.
        num_towers: the number of towers of this process.
        num_replicas: the number of towers of all processes.
        first_tower: the number of this process's first one among them.
        transport: what connects the processes; here there is one.

    Raises:
        TowerError: devices, modes or other arguments that do not exist.

    Example:
        >>> model = keras.models.load_model("my_model.keras")
        >>> with keras_towers.TowerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    reduces_first = True
    adopts_models = True
    asynchronous = False
    transport: Transport = SingleProcess()
    exchange: reduction_lib.Exchange = staticmethod(reduction_lib.exact)
    replicas_are_called = "tower"
    # Set where Strategy.run does not run the steps of Keras's methods: what
    # calls such a method, and what makes its epoch iterators.
    call: Callable | None = None
    epoch_iterator: Callable | None = None

    def __init__(
        self,
        towers: int | Sequence[int | str] | None = None,
        mode: str | None = None,
        average: bool = True,
        batches: str = "split",
        sync_every_epoch: bool = True,
        updates: str | None = None,
        packer: reduction_lib.GradientPacker | bool | None = None,
    ):
        _one_of("batches", batches, ("split", "each"))
        _one_of("updates", updates, ("once", "each", None))
        if not isinstance(average, (bool, np.bool_)):
            raise TowerError(
                f"average={average!r} is not allowed: give True for a loss "
                "that is a mean over the batch, or False for one that is a sum."
            )
        names = devices_lib.resolve(towers)
        choice = modes.choose(names, mode, packer)
        on_host = devices_lib.all_on_host(names)
        self.updates = updates or ("once" if on_host else "each")
        self.average = bool(average)
        self.batches = batches
        self.sync_every_epoch = bool(sync_every_epoch)
        self.num_towers = len(names)
        self.num_replicas = self.num_towers * self.transport.size
        self.first_tower = self.num_towers * self.transport.rank
        self.prefetches_to_towers = not on_host and self.transport.size == 1
        self.reduction: Callable = choice.reduce
        exact: Callable = choice.reduce
        if self.transport.size > 1:
            self.reduction = reduction_lib.across_processes(
                choice.reduce, self.transport, self.exchange
            )
            exact = reduction_lib.across_processes(
                choice.reduce, self.transport
            )
        self._choice = choice
        self._collective_key_base = next(_collective_key_bases)
        self.lockstep = lockstep.Lockstep(self.transport)
        self._make_extended(
            names,
            # Only gradients may be compressed.
            reduction_lib.ReductionCrossDeviceOps(exact, self.transport),
        )
        self.adoption = adoption.Adoption(self)
        self._entered: contextlib.ExitStack | None = None

    def _make_extended(
        self, devices: list[str], cross_device_ops: tf.distribute.CrossDeviceOps
    ) -> None:
        super().__init__(devices, cross_device_ops=cross_device_ops)

    @property
    def entered(self) -> bool:
        """Whether it is entered as ``with strategy:``."""
        return self._entered is not None

    @property
    def mode(self) -> str:
        """The mode that runs."""
        return self._choice.name

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers everywhere; 1 inside a step of ``fit``.

        There the strategy itself averages over the towers, and a loss must not
        be divided once more. ``tf.distribute.get_replica_context()`` tells the
        number of towers everywhere.
        """
        inside = tower_lib.current() is not None
        return 1 if inside else self.num_replicas

    def describe(self) -> str:
        """Say on which towers what runs, and why.

        Example:
            >>> print(TowerStrategy(4).describe())
            TowerStrategy: 4 towers (/device:CPU:0 to /device:CPU:3)
              mode "cpu": all towers are on the host, ...
        """
        devices = self.extended.worker_devices
        names = [tower_lib.short_name(device) for device in devices]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return "\n".join(
            [
                f"{type(self).__name__}: {self.num_towers} "
                f"tower{'s' * (self.num_towers > 1)} ({span})",
                *self._described(),
            ]
        )

    def _described(self) -> list[str]:
        """What ``describe`` says below its first line."""
        updates = {
            "once": "weights are updated on tower 0 and handed out",
            "each": "every tower updates its own weights",
            "shared": "trained weights exist once, updated where they are",
        }[self.updates]
        data = {
            "split": "the global batch is split over the towers",
            "each": "every tower draws a whole batch",
        }[self.batches]
        gradients = "averaged over examples" if self.average else "summed"
        return [
            f'  mode "{self.mode}": {self._choice.reason}',
            f"  gradients are {gradients}; {updates}",
            f"  {data}",
        ]

    @contextlib.contextmanager
    def scope(self) -> Iterator[TowerStrategy]:
        """Make this strategy the current one, as for any strategy.

        A model that is built inside lives on the towers for good.
        """
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy() and current is not self:
            raise TowerError(
                f"{type(self).__name__} cannot be entered inside the scope of "
                f"another strategy ({type(current).__name__}): leave that one "
                "first."
            )
        with hooks.installed(), super().scope():
            yield self

    def __enter__(self) -> TowerStrategy:
        if self._entered is not None:
            raise TowerError(
                f"this {type(self).__name__} has been entered already: a "
                "strategy can be entered once at a time."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.scope())
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._entered = self._entered, None
        try:
            if error[0] is None and self.transport.size > 1:
                self.adoption.equalise()
            stack.__exit__(*error)
        finally:
            # An impatient second Ctrl-C would leave a model half on towers.
            with interrupts.deferred():
                self.adoption.release()

    def adopt(self, model: keras.Model) -> None:
        """Put a built model on the towers now, not at its first ``fit``.

        Raises:
            TowerError: the model lives on another strategy.
        """
        if self.num_replicas > 1:
            self.adoption.claim(model)
            with self.scope():
                self.adoption.bind(model)

    def sum_gradients(
        self, rows: reduction_lib.Gradients, variables: Sequence[Any]
    ) -> list[list[reduction_lib.Gradient]]:
        """Sum the towers' gradients.

        Args:
            rows: K lists of N gradients.
            variables: the N variables that they belong to.

        Returns:
            K lists of N sums, over all towers of all processes.
        """
        return self.reduction(rows, self.extended.worker_devices)

    def run(self, fn, args=(), kwargs=None, options=None):
        """Run ``fn`` on every tower, as ``tf.distribute.Strategy.run``."""
        session = session_lib.current()
        if session is None or not session.is_step(fn, args):
            return super().run(fn, args, kwargs, options)
        return step.run(self, super().run, session, fn, args[0])


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise TowerError(
            f"{name}={value!r} is not allowed: give one of "
            f"{', '.join(map(repr, allowed))}."
        )
