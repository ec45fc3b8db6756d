"""One order of shuffled data on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.context import patches
from keras_towers.fit.contract import FitStart
from keras_towers.rendezvous import rank_checks
from keras_towers.rendezvous.rank_checks import Peers


class ShuffleOrder:
    """Makes Keras shuffle identically on all ranks.

    Ranks with equal seeds draw the same orders anyway, as one process would.
    Otherwise all ranks shuffle with a seed drawn by rank 0. If ``fit`` resumes
    at a position ``start``, orders depend only on its seed and on the epoch.
    """

    def __init__(self, peers: Peers, start: FitStart | None = None):
        state = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
        drawn = random.SystemRandom().getrandbits(31)
        local = compat.global_seed(), state, drawn
        ranks = rank_checks.gather(peers, local, "begins to shuffle")
        seeds, states, draws = zip(*ranks, strict=True)
        self._seed = draws[0] if start is None else start.seed
        self._tensorflow_agrees = len(set(seeds)) == 1 and None not in seeds
        self._python_agrees = len(set(states)) == 1
        # The first iterator increments it.
        self._number = -1 if start is None else start.epoch - 1
        self._epoch: tf.Variable | None = None

    def of_sequences(self) -> contextlib.AbstractContextManager[None]:
        """Shuffle ``PyDataset`` batches identically during ``fit``."""
        seeded = {"random": random.Random(self._seed)}
        ours = {} if self._python_agrees else seeded
        return patches.shadowed(compat.py_dataset_module, ours)

    def of_arrays(self) -> contextlib.AbstractContextManager[None]:
        """Shuffle examples identically in datasets created inside."""
        if self._tensorflow_agrees:
            return contextlib.nullcontext()
        self._epoch = compat.hidden_variable("CPU:0", self._number)
        return patches.shadowed(tf.random, {"shuffle": self._shuffle})

    def _shuffle(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return tf.random.experimental.stateless_shuffle(  # pyright: ignore[reportAttributeAccessIssue]
            value, tf.stack([self._seed, self._epoch])
        )

    def next_epoch(self) -> None:
        """Use a new order for the next iterator."""
        if self._epoch is not None:
            self._epoch.assign_add(1)
