"""A replica of the model on each tower of one process, kept in sync."""

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

    Each tower holds a replica of the model and computes gradients on its share
    of the batch. The gradients are all-reduced, and the optimizer then does
    what it would do on one device, so the weights are those of one device, up
    to float rounding. It is a real ``tf.distribute.Strategy`` and also works as
    ``with strategy.scope():`` and in custom training loops.

    Ports tensorpack's ``SyncMultiGPUTrainerReplicated`` (``mode="nccl"``,
    ``"cpu"``, ``"hierarchical"``, ``"collective"``) and
    ``SyncMultiGPUTrainer``.

    Args:
        towers: number of devices, a list of GPU ids, a list of device names,
            or None for all visible GPUs, or all logical CPUs if there are none.
        mode: how gradients are summed: ``"nccl"``, ``"collective"``
            (TensorFlow's collective ops: ring on CPUs, NCCL on GPUs),
            ``"hierarchical"`` (two groups; needs an even number of towers),
            ``"gpu"`` (on the towers in turn), ``"cpu"`` (on the host), or None
            to choose automatically. A mode that cannot run falls back to
            another, and the reason is logged.
        average: True if the loss is a mean over the batch (Keras's default):
            gradients are averaged over examples. False sums the towers'
            gradients, for a custom ``train_step`` whose loss is a sum.
        batches: ``"split"``: the global batch is split over the towers.
            ``"each"``: in ``fit`` every tower draws a whole batch, so that the
            global batch is the batch size times the number of towers.
        sync_every_epoch: synchronize all towers at the end of each epoch,
            including variables that towers change individually (moving
            statistics).
        updates: ``"once"``: tower 0 updates the weights and distributes them;
            ``"each"``: every tower updates its own copy. None: ``"once"`` if
            the towers share memory, else ``"each"``.
        packer: a ``GradientPacker``, which packs gradients into a few buffers
            before they are summed; True for one with default settings, False
            for none. None: pack on accelerators but not on CPUs.

    Attributes:
        mode: the mode that runs.
        num_towers: the number of towers of this process.
        num_replicas: the number of towers of all processes.
        first_tower: the index of this process's first tower among all.
        transport: connects the processes; here there is only one.

    Raises:
        TowerError: unknown devices or modes, or other invalid arguments.

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
        """Assemble the strategy, possibly spanning several processes.

        Args:
            towers: as for the class.
            mode: as for the class.
            updates: as for the class.
            packer: as for the class.
            transport: connects the processes.
            exchange: how gradients are exchanged between them.
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
