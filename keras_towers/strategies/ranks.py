"""The options that strategies of several processes have in common."""

from __future__ import annotations

from keras_towers.devices import Towers
from keras_towers.fit.contract import Batches, Extent, Updates
from keras_towers.reduction import Exchange, GradientPacker
from keras_towers.reduction.compression import CompressionName
from keras_towers.strategies.modes import ModeName
from keras_towers.strategies.processes import ProcessStrategy, exchange_of
from keras_towers.transport import Transport


class RankStrategy(ProcessStrategy):
    """Base of the strategies that connect this process when they are made.

    A subclass only says how: ``_connect``.
    """

    def __init__(
        self,
        average: bool = True,
        compression: CompressionName | Exchange | None = None,
        sync_every_epoch: bool = True,
        batches: Batches = "split",
        towers: Towers = 1,
        *,
        exact: bool = False,
        batch_norm: Extent | None = None,
        random: Extent | None = None,
        mode: ModeName | None = None,
        updates: Updates | None = None,
        packer: GradientPacker | bool | None = None,
    ):
        """Connect this process with the others.

        Args:
            average: True if the loss is a mean over the batch (Keras's
                default). False sums the gradients of the towers.
            compression: how gradients are exchanged. None: without loss, in
                the way that this strategy prefers. ``"none"``: without loss,
                always by its engine. ``"fp16"``, ``"fp16-shards"``,
                ``"bf16"``, ``"fp16-feedback"``, ``"bf16-feedback"`` or a
                function: see ``keras_towers.reduction.compression``. Sparse
                gradients, metrics and statistics are never compressed.
            sync_every_epoch: at the end of each epoch, average moving
                statistics and broadcast all state from rank 0 again.
            batches: ``"split"``: all ranks get the same data, and each takes
                its share of every batch. ``"each"``: every rank reads its own
                data, and the ranks' batches together are the global batch; the
                number of batches may differ between ranks.
            towers: devices of this process: a number, GPU ids or device names.
                On a machine with GPUs, a number is of those that are the
                rank's by its local rank, if the launcher (Ray does) has not
                assigned them.
            exact: as for ``TowerStrategy``.
            batch_norm: as for ``TowerStrategy``.
            random: as for ``TowerStrategy``.
            mode: as for ``TowerStrategy``, for several towers in a process.
            updates: as for ``TowerStrategy``, likewise. ``"sharded"`` shares
                the update among the towers of all processes.
            packer: as for ``TowerStrategy``, likewise.
        """
        transport, towers = self._connect(towers)
        super().__init__(
            transport,
            exchange=self._exchange(compression, transport, towers),
            towers=towers,
            average=average,
            sync_every_epoch=sync_every_epoch,
            batches=batches,
            exact=exact,
            batch_norm=batch_norm,
            random=random,
            mode=mode,
            updates=updates,
            packer=packer,
        )

    def _connect(self, towers: Towers) -> tuple[Transport, Towers]:
        """Connect this process; return also the devices that are its own."""
        raise NotImplementedError

    def _exchange(
        self,
        compression: CompressionName | Exchange | None,
        transport: Transport,
        towers: Towers,
    ) -> Exchange:
        """How gradients travel between the processes."""
        return exchange_of(compression, transport, towers)
