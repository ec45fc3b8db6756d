"""A replica of the model on each tower of one process, kept in sync."""

from __future__ import annotations

from keras_towers.devices import Towers
from keras_towers.fit.contract import Batches, Extent, Updates
from keras_towers.reduction import GradientPacker
from keras_towers.strategies.all_reduce import AllReduceStrategy
from keras_towers.strategies.modes import ModeName


class TowerStrategy(AllReduceStrategy):
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
            or None for those that ``virtual_towers`` made; without it, for
            all visible GPUs, or all logical CPUs if there are none.
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
            ``"each"``: every tower updates its own copy; ``"sharded"``: every
            tower updates its share of the weights and holds the optimizer's
            state for that share only, as in stage 1 of ZeRO. None: ``"once"``
            if the towers share memory, else ``"each"``.
        packer: a ``GradientPacker``, which packs gradients into a few buffers
            before they are summed; True for one with default settings, False
            for none. None: pack on accelerators but not on CPUs.
        exact: sets both ``batch_norm`` and ``random`` to ``"global"``, and has
            Keras's losses and layers that couple the examples of a batch
            (``Dice``, ``Circle``, ``MixUp``, ...) computed from the global one.
        batch_norm: ``"tower"``: BatchNormalization normalizes with the
            statistics of its tower's share of the batch (None: this).
            ``"global"``: with those of the global batch, as one device does.
        random: ``"tower"``: Dropout and other random layers draw an own stream
            on each tower (None: this). ``"global"``: each tower gets its rows
            of the draw that one device would have made.

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
        towers: Towers | None = None,
        mode: ModeName | None = None,
        average: bool = True,
        batches: Batches = "split",
        sync_every_epoch: bool = True,
        updates: Updates | None = None,
        packer: GradientPacker | bool | None = None,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
    ):
        super().__init__(
            towers,
            mode=mode,
            updates=updates,
            packer=packer,
            exact=exact,
            batch_norm=batch_norm,
            random=random,
            average=average,
            batches=batches,
            sync_every_epoch=sync_every_epoch,
        )
