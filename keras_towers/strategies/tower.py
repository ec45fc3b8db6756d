"""``TowerStrategy``: the towers of one process divide each step."""

from __future__ import annotations

from typing import Unpack

from keras_towers.fit.options import AllReduceKeywords, options_of
from keras_towers.strategies.base import BaseStrategy
from keras_towers.transport import devices as devices_lib


class TowerStrategy(BaseStrategy):
    """Trains a model on several devices of one machine.

    Towers divide the step of one device: each computes its share of the batch.
    They sum their gradients, and the optimizer then runs as on one device. For
    any model, weights, losses and metrics equal those of one device, up to
    float rounding. This includes BatchNormalization, random layers and losses
    over the whole batch. After the first step, ``describe`` lists the exchanges
    of the towers, and the operations that one device computes for all.

    This is a ``tf.distribute.Strategy``, so ``with strategy.scope():`` and
    custom training loops also work.

    Ports tensorpack's ``SyncMultiGPUTrainerReplicated``, with its modes.

    Args:
        towers: a number of devices, a list of GPU ids, or a list of device
            names. None: the devices that ``virtual_towers`` made, else all
            visible GPUs, else all logical CPUs.
        average: True: gradients are the same as on one device. False: they are
            multiplied by the number of replicas, as in tensorpack.
        batches: ``"split"``: the towers share every batch. ``"each"``: every
            tower takes a whole batch.
        sync_every_epoch: synchronize all variables at the end of each epoch.
        batch_norm: ``"global"``: BatchNormalization uses the statistics of the
            global batch. ``"tower"``: those of each tower's examples.
        micro_batches: the number of parts into which each tower divides its
            examples, to save memory; None: as few as memory allows;
            ``"auto"``: the same where the memory of devices is unknown.
        remat: True: towers compute activations again in the backward pass
            instead of keeping them, to save memory; a number: at most this part
            of the step's work; None: as little as a device needs to fit.
        mode: how towers exchange tensors: ``"nccl"``, ``"collective"``,
            ``"hierarchical"``, ``"towers"``, ``"host"``, or None to choose.
        updates: ``"once"``: one tower updates the weights; ``"each"``: every
            tower updates its copy; ``"sharded"``: every tower updates its
            share; None to choose, by memory if it is short.
        weights: ``"sharded"``: every tower holds a part (a shard) of each large
            weight, for models that do not fit on one device; ``"whole"``: all
            of it; None: in shards if memory requires it.
        gather_bytes: with ``weights="sharded"``: how many bytes of gathered
            weights a tower holds at a time, such as ``"256MiB"``.
        packer: packs tensors for an exchange into a few buffers: a
            ``GradientPacker``, True, False, or None to choose.
        **options: ``StrategyOptions`` describes these options in more detail.

    Attributes:
        mode: the mode that runs.
        num_towers: the number of towers of this process.
        num_replicas: the number of towers of all processes.
        first_tower: the index of this process's first tower among all.

    Raises:
        TowerError: unknown devices or modes, or other invalid arguments.

    Example:
        >>> model = keras.models.load_model("my_model.keras")
        >>> with keras_towers.TowerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        **options: Unpack[AllReduceKeywords],
    ):
        checked = options_of(self, AllReduceKeywords, options)
        super().__init__(devices_lib.devices_of(towers), checked)
        self._compose()
