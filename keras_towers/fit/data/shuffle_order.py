"""Shuffles data in the same order on all ranks."""

from __future__ import annotations

import contextlib
import random
import secrets
import types

import tensorflow as tf

from keras_towers.fit.components import FitStart
from keras_towers.fit.context import patches
from keras_towers.foundation import compat
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers


class ShuffleOrder:
    """Makes Keras shuffle identically on all ranks, and after a restart.

    Ranks with equal seeds draw the same orders anyway, as one process would.
    Otherwise all ranks shuffle with a seed drawn by rank 0. If ``fit`` can
    resume, ``start`` decides how it shuffles each epoch.
    """

    def __init__(self, peers: Peers, start: FitStart | None = None):
        drawn = secrets.randbits(31)
        local = compat.global_seed(), random.getstate(), drawn
        ranks = rank_checks.gather(peers, local, "begins to shuffle")
        seeds, states, draws = zip(*ranks, strict=True)
        self._seed = draws[0] if start is None else start.seed
        self._tensorflow_agrees = len(set(seeds)) == 1 and None not in seeds
        same = all(state == states[0] for state in states)
        self._python_agrees = same and start is None
        # After a restart the state of Python's own generator is another one.
        self._generator = random.Random()
        version, numbers, gauss = start.random_state if start else states[0]
        self._generator.setstate((version, tuple(numbers), gauss))
        self._epochs_before = 0
        self._epoch: tf.Variable | None = None

    def begin_with(self, epoch: int) -> None:
        """Use the order of an epoch, from 0, for the next iterator."""
        self._epochs_before = epoch
        if self._epoch is not None:
            self._epoch.assign(epoch - 1)

    def of_sequences(self) -> contextlib.AbstractContextManager[None]:
        """Shuffle ``PyDataset`` batches identically during ``fit``."""
        # A Keras that shuffles by the number of the epoch takes random.Random.
        names = {**vars(random), "shuffle": self._shuffle_list}
        seeded = {"random": types.SimpleNamespace(**names)}
        ours = {} if self._python_agrees else seeded
        return patches.shadowed(compat.py_dataset_module, ours)

    def _shuffle_list(self, values: list[object]) -> None:
        for _ in range(self._epochs_before):
            self._generator.shuffle(list(values))
        self._epochs_before = 0
        self._generator.shuffle(values)

    def of_arrays(self) -> contextlib.AbstractContextManager[None]:
        """Shuffle examples identically in datasets created inside."""
        if self._tensorflow_agrees:
            return contextlib.nullcontext()
        # The first iterator increments it.
        self._epoch = compat.hidden_variable(-1, tf.int64)
        return patches.shadowed(tf.random, {"shuffle": self._shuffle_tensor})

    def _shuffle_tensor(
        self, value: object, *args: object, **kwargs: object
    ) -> tf.Tensor:
        return tf.random.experimental.stateless_shuffle(  # pyright: ignore[reportAttributeAccessIssue]
            value, tf.stack([self._seed, self._epoch])
        )

    def next_epoch(self) -> None:
        """Use a new order for the next iterator."""
        if self._epoch is not None:
            self._epoch.assign_add(1)
