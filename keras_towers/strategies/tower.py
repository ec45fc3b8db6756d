"""A replica of the model on every tower of one machine, kept equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from keras_towers.fit.contract import Batches
from keras_towers.reduction import GradientPacker
from keras_towers.strategies.all_reduce import AllReduceStrategy
from keras_towers.strategies.modes import ModeName


class TowerStrategy(AllReduceStrategy):
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
        mode: ModeName | None = None,
        average: bool = True,
        batches: Batches = "split",
        sync_every_epoch: bool = True,
        updates: Literal["once", "each"] | None = None,
        packer: GradientPacker | bool | None = None,
    ):
        super().__init__(
            towers,
            mode=mode,
            updates=updates,
            packer=packer,
            average=average,
            batches=batches,
            sync_every_epoch=sync_every_epoch,
        )
