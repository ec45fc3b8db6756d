"""A replica of the model on every tower of one machine, kept equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.fit.contract import Batches, Update
from keras_towers.fit.update.reduce import UpdateEach, UpdateOnce
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy, Rooms, one_of
from keras_towers.transport import Transport


class TowerStrategy(BaseStrategy):
    """Trains an existing Keras model on several devices of one machine.

    Every tower has a replica of the model and computes gradients on its part
    of the batch; these are all-reduced, and the optimizer then does what it
    would do on one device, so that the weights are those of one device, float
    rounding apart. It is a real ``tf.distribute.Strategy``: it can also be
    used as ``with strategy.scope():`` and in a custom loop.

    It ports tensorpack's ``SyncMultiGPUTrainerReplicated`` (``mode="nccl"``,
    ``"cpu"``, ``"hierarchical"``, ``"collective"``) and
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

    def __init__(
        self,
        towers: int | Sequence[int | str] | None = None,
        mode: modes.ModeName | None = None,
        average: bool = True,
        batches: Batches = "split",
        sync_every_epoch: bool = True,
        updates: Literal["once", "each"] | None = None,
        packer: reduction_lib.GradientPacker | bool | None = None,
    ):
        self._on_towers(
            towers,
            mode=mode,
            updates=updates,
            packer=packer,
            average=average,
            batches=batches,
            sync_every_epoch=sync_every_epoch,
        )

    def _on_towers(
        self,
        towers: int | Sequence[int | str] | None,
        mode: modes.ModeName | None = None,
        updates: Literal["once", "each"] | None = None,
        packer: reduction_lib.GradientPacker | bool | None = None,
        transport: Transport | None = None,
        exchange: reduction_lib.Exchange = reduction_lib.exact,
        **options: Any,
    ) -> None:
        """Put the pieces together: towers here, and maybe other processes.

        Args:
            towers: as for the class.
            mode: as for the class.
            updates: as for the class.
            packer: as for the class.
            transport: connects the processes.
            exchange: how gradients travel between them.
            **options: for ``BaseStrategy``.
        """
        one_of("updates", updates, ("once", "each", None))
        devices = devices_lib.resolve(towers)
        self._mode = modes.choose(devices, mode, packer)
        reduction = all_reduce = self._mode.reduce
        if transport is not None and transport.size > 1:
            # Only gradients may be compressed.
            across = reduction_lib.across_ranks
            reduction = across(self._mode.reduce, transport, exchange)
            all_reduce = across(self._mode.reduce, transport)
        if updates is None:
            on_host = devices_lib.all_on_host(devices)
            updates = "once" if on_host else "each"
        kind = {"once": UpdateOnce, "each": UpdateEach}[updates]

        def update(rooms: Rooms) -> Update:
            return kind(rooms.config, rooms.spread, rooms.order, reduction)

        BaseStrategy.__init__(
            self,
            devices,
            update,
            all_reduce,
            transport=transport,
            **options,
        )

    @property
    def mode(self) -> str:
        """The mode that runs."""
        return self._mode.name

    def _described(self) -> list[str]:
        return [
            f'mode "{self.mode}": {self._mode.reason}',
            *super()._described(),
        ]
