"""Places: where the steps of a call compute, and with whom.

A step is divided over *ranks* (processes), *towers* (the rows of the mesh of a
process), *micro-batches* (of each tower) and *columns* (of the mesh). Ranks,
towers and micro-batches have examples of their own. Columns divide weights, and
so do towers and ranks if weights are in shards. Which ranks take part depends
on the purpose, and on the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.partition.ir.axes import (
    AT_ROOT,
    MICRO_BATCHES,
    ONCE,
    TOWERS,
    Axes,
)
from keras_towers.transport import SingleProcess, Transport

ALONE: Transport = SingleProcess()


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The groups of ranks in a call; each has all processes, or only this one.

    Attributes:
        job: those that train together, for exchanges between steps.
        batch: those that have parts of a batch: examples are numbered in the
            order of their ranks.
        step: those that a step exchanges with.
        shards: those over whose towers weights in shards are divided.
        in_lockstep: whether there are others, and all begin each step of the
            call together, whether or not it exchanges anything.
    """

    job: Peers = ALONE
    batch: Peers = ALONE
    step: Transport = ALONE
    shards: Peers = ALONE
    in_lockstep: bool = False

    @property
    def share_step(self) -> bool:
        """Whether all ranks with rows of a batch compute one step of it."""
        return self.step.size == self.batch.size

    @property
    def replicate_shards(self) -> bool:
        """Whether each of several ranks has all shards of a weight."""
        return self.shards.size < self.step.size

    @property
    def is_first_replica(self) -> bool:
        """Whether no rank before this one has the same shards."""
        return not self.replicate_shards or self.step.rank == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """The places at which the steps of a call compute: ranks, towers, columns.

    Attributes:
        ranks: the processes.
        mesh: for each of K towers of this process, the devices of its columns.
        micro_batches: the number of micro-batches of each tower.
    """

    ranks: Ranks
    mesh: Sequence[Sequence[str]]
    micro_batches: int = 1

    @property
    def towers(self) -> int:
        """The number of towers of this process."""
        return len(self.mesh)

    @property
    def columns(self) -> int:
        """The number of devices of each tower."""
        return len(self.mesh[0])

    @property
    def axes(self) -> Axes:
        """The axes along which there are several places, and towers."""
        micro_batches = MICRO_BATCHES if self.micro_batches > 1 else ONCE
        ranks = AT_ROOT if self.ranks.step.size > 1 else ONCE
        return TOWERS | micro_batches | ranks

    @property
    def replicas(self) -> int:
        """The number of towers, in all ranks, that divide a batch."""
        return self.towers * self.ranks.batch.size

    @property
    def first_tower(self) -> int:
        """The index of this process's first tower among the replicas."""
        return self.towers * self.ranks.batch.rank

    def alone(self) -> Places:
        """Return the same places without the other ranks."""
        return dataclasses.replace(self, ranks=Ranks())
