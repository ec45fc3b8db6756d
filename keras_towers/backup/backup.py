"""Backups of training on disk, from which an interrupted ``fit`` resumes."""

from __future__ import annotations

import collections
import json
import os
import random
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_towers import compat
from keras_towers.backup.resuming import FitPosition, ResumingCallback
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.contract import Start
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.rendezvous import check
from keras_towers.rendezvous.check import Peers
from keras_towers.system import make_writable

_NAME = "backup{}.npz"
_FACTS = ("epoch", "batch", "seed", "epochs", "history")
# The number of finished calls of fit with a backup in each folder.
_ended: collections.Counter[Path] = collections.Counter()


class Backup(ResumingCallback):
    """Backs up training, ends it cleanly on a signal, and resumes it.

    For jobs that may be stopped and restarted: Slurm's ``--requeue``,
    Kubernetes, spot machines. At every epoch's end, after every ``every``
    batches, and when SIGTERM or SIGUSR1 arrives, rank 0 writes the weights, the
    optimizer's state, random states, metrics and the position in the data.
    After a signal all ranks end after the current batch, with exit code 75. The
    same script, started again, resumes after that batch: weights and
    ``History`` are as in an undisturbed run. When ``fit`` has ended, the backup
    is deleted.

    A script that calls ``fit`` several times can use one folder: each call has
    its own file. Calls that had ended run again.

    ``keras.callbacks.BackupAndRestore`` resumes at the beginning of an epoch,
    and ignores signals.

    Args:
        folder: where to write; every process that may become rank 0 needs
            access.
        every: batches between two backups; None: one at every epoch's end.
        delete: whether to delete the backup when ``fit`` has ended.

    Raises:
        TowerError: ``every`` is not positive; ``fit`` runs outside of a
            strategy's block; ``folder`` cannot be written to when ``fit``
            begins; or the backup is another model's.

    Example:
        >>> with kt.TowerStrategy():
        ...     model.fit(x, y, epochs=90, callbacks=[kt.Backup("backup")])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        delete: bool = True,
    ):
        self._file = BackupFile(Path(folder))
        super().__init__(self._file, every)
        self._delete = delete

    def find_start(self, peers: Peers) -> Start:
        self._file.read(peers)
        return super().find_start(peers)

    def on_train_begin(self, logs: Any = None) -> None:
        if contract.active_strategy() is None:
            raise TowerError(
                "Backup works inside a strategy's block only, because plain "
                "Keras cannot resume in the middle of an epoch: use `with "
                "kt.TowerStrategy(1):`, or keras.callbacks.BackupAndRestore."
            )
        self._file.attach(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        _ended[self._file.folder] += 1
        if self._delete and self._file.writes:
            self._file.path.unlink(missing_ok=True)


class BackupFile(FitPosition):
    """Position of ``fit`` and state of a model, in a NumPy file of rank 0."""

    outlives_process = True

    def __init__(self, folder: Path):
        self.folder: Path = folder.absolute()
        self.path: Path = self.folder
        self.writes: bool = False
        self._variables: list[keras.Variable] = []
        self._values: list[np.ndarray] | None = None
        self._shapes: list[str] = []

    @property
    def _facts(self) -> dict[str, Any]:
        """The position, without weights and metrics."""
        return {name: getattr(self, name) for name in _FACTS}

    def read(self, peers: Peers) -> None:
        """Read the file; without a file, begin with the first epoch."""
        self.writes = peers.rank == 0
        if self.writes:
            make_writable(self.folder, "give Backup another one.")
        # Number the calls of fit: a restarted script repeats them in order.
        number = _ended[self.folder]
        self.path = self.folder / _NAME.format(f"-{number}" if number else "")
        self.epoch = self.batch = 0
        self.seed = compat.global_seed() or random.SystemRandom().getrandbits(
            31
        )
        self.epochs, self.history, self.metrics = [], {}, []
        self._values = None
        if self.path.exists():
            self._load()
        if peers.size > 1:
            values = self._facts, self.metrics
            of_rank_0 = check.gather(peers, values, "reads the backup")[0]
            facts, self.metrics = of_rank_0
            vars(self).update(facts)

    def _load(self) -> None:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                encoded, *arrays = file.values()
                facts = json.loads(str(encoded))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise TowerError(
                f"{self.path} is not a backup of keras_towers, or damaged "
                f"({error}): delete it to train from the beginning."
            ) from error
        self._shapes = facts.pop("variables")
        count = len(self._shapes)
        self._values, self.metrics = arrays[:count], arrays[count:]
        vars(self).update(facts)

    def attach(self, model: keras.Model) -> None:
        """Restore a model from the file, and write its state from now on."""
        state = state_lib.collect(model)
        self._variables = [
            *state.seeds,
            *state.weights,
            *state.optimizer_variables,
        ]
        if self._values is None:
            return
        if self._shapes != _shapes(self._variables):
            raise TowerError(
                f"{self.path} is the backup of another model, or of one that "
                f"was compiled differently from {model.name!r}: use another "
                "folder, or delete it."
            )
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        self._values = None

    def commit(self) -> None:
        # The old file is replaced only once the new one is complete.
        if not self.writes:
            return
        values = [_numpy(v) for v in self._variables]
        facts = {**self._facts, "variables": _shapes(self._variables)}
        encoded = np.array(json.dumps(facts, default=float))
        descriptor, name = tempfile.mkstemp(dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(
                    file, encoded, *values, *self.metrics, allow_pickle=False
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _numpy(variable: keras.Variable) -> np.ndarray:
    value = np.asarray(variable)
    # NumPy's files do not support bfloat16.
    return value.astype("float32") if value.dtype.kind == "V" else value


def _shapes(variables: Sequence[keras.Variable]) -> list[str]:
    return [f"{list(v.shape)} {v.dtype}" for v in variables]
