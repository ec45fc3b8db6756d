"""Random numbers of steps that run eagerly, the same on all ranks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from keras_towers import compat
from keras_towers.rendezvous import rank_checks
from keras_towers.transport import Transport


class EagerDraws:
    """Makes steps that run eagerly draw the same numbers on all ranks.

    Each rank computes the step on the global batch. If the ranks have no common
    TensorFlow seed, they use rank 0's, or one that rank 0 draws.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._agreed = False
        self._seed: int | None = None
        self._steps = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Draw the same numbers as on all other ranks in a block."""
        if not self._agreed:
            local = compat.global_seed(), random.SystemRandom().getrandbits(31)
            where = "begins a step that runs eagerly"
            states = rank_checks.gather(self._transport, local, where)
            seeds = [seed for seed, _ in states]
            if None in seeds or len(set(seeds)) > 1:
                self._seed = states[0][1] if seeds[0] is None else seeds[0]
            self._agreed = True
        if self._seed is None:
            yield
            return
        # Between steps, ranks may draw different numbers of values.
        with compat.global_seed_of(self._seed + self._steps):
            self._steps += 1
            yield
