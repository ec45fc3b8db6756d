"""``kt.Backup``: training that resumes where an earlier run stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_towers.backups import backup_folder
from keras_towers.backups.saved_state import ranks_now, shapes_of
from keras_towers.backups.saved_training import KEPT, SavedTraining
from keras_towers.fit import components
from keras_towers.fit.calls import tower_call
from keras_towers.fit.calls.callback_effects import NEVER_STOPS
from keras_towers.fit.calls.callback_roles import ResumesFit
from keras_towers.fit.components import FitStart
from keras_towers.fit.given_values import check_arguments
from keras_towers.fit.weights import checkpoint, model_state as state_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.foundation.errors import EndOfJob, TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Logs
from keras_towers.foundation.system import handle_signals
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.reduction.rank_sum import sum_over_ranks

END_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after which training ends with a backup."""


def _describe_data(steps: int | None) -> dict[str, str]:
    """Describe the data of the running ``fit``, as far as they are known.

    Args:
        steps: how many batches an epoch has; None: unknown.
    """
    call = tower_call.current()
    if call is None or call.epoch_iterator is None:
        return {}
    data = call.epoch_iterator.data_adapter
    last = None
    # A ``PyDataset`` does not know it.
    with contextlib.suppress(NotImplementedError):
        last = data.partial_batch_size
    return {
        "batch_size": str(data.batch_size),
        "batches in an epoch": str(steps),
        "examples of the last batch": str(last),
        "shuffle": str(call.keras_call.arguments.get("shuffle", True)),
    }


def _adoption() -> Adoption:
    """Return the models on the towers; plain Keras has been refused."""
    strategy = components.active_strategy()
    assert strategy is not None
    return strategy._adoption


class Backup(ResumesFit):
    """Backs up training, ends it cleanly on a signal, and resumes it.

    Use it for jobs that may be stopped and restarted: Slurm's ``--requeue``,
    Kubernetes, spot machines. It writes a backup at the end of every epoch,
    after every ``every`` batches, and when SIGTERM or SIGUSR1 arrives. A backup
    contains the weights, the optimizer's state, random states, metrics, the
    position in the data, and the state of each rank's communication hook
    (``StatefulHook``). If ranks hold shards of a variable, each rank writes its
    shards; rank 0 writes everything else. Any number of ranks and towers can
    resume from it, with or without shards.

    After a signal, all ranks end after the current batch, with exit code 75.
    Start the same script again, and it resumes after that batch, with the
    weights and ``History`` of an uninterrupted run. When ``fit`` ends, it
    deletes the backup.

    ``keras-towers run`` starts the script again if you give ``--restarts``, or
    in an elastic job, whose number of ranks may change.

    If a script calls ``fit`` several times, for example for trials or folds,
    the calls can use one folder: each call has a numbered subfolder. If you
    start the script again, it must make the same calls in the same order. All
    calls before the last one run again, even those that failed with an error
    that the script caught. If the script repeats a call after an error, this
    counts as the next call: it begins in its first epoch, with the model as it
    is. The backup of the failed call stays in the same folder, as ``.failed``.
    To resume from that backup, let the process end, and start it again; in a
    notebook, restart the kernel.

    ``fit`` refuses the backup of another model. It compares the shapes of
    variables, and the numbers and texts in the settings of layers (with their
    regularizers, constraints and dtypes), optimizers, losses and metrics.
    Names, seeds, the first values of weights, and the metrics at an epoch's end
    may differ. If the number of ranks has changed, the learning rate may
    differ, too: training then uses the backup's rate, and logs it. If the batch
    size, the number of batches or ``shuffle`` differ, ``fit`` logs that. It
    does not compare the data, Python code, the connections of layers, or
    settings that no ``get_config()`` returns.

    A backup is a TensorFlow checkpoint. ``tf.train.load_checkpoint`` reads it,
    and ``kt.load_backup`` loads its weights into a model. Even if a process is
    killed while it saves, or the disk is full, the last complete backup
    remains. Before ``fit`` resumes, it checks all files: if the last backup is
    damaged, ``fit`` logs that, and resumes from the one before it. If all are
    damaged, it ends with an error, and leaves them as they are.

    ``keras.callbacks.BackupAndRestore`` resumes at the beginning of an epoch,
    and ignores signals.

    Args:
        folder: any folder that ``tf.io.gfile`` reaches, such as
            ``gs://bucket/backup``. Every process that may become rank 0 needs
            access; with shards over ranks, every rank needs it.
        every: batches between two backups; None: back up only at the end of
            every epoch.
        delete: whether to delete the backup when ``fit`` ends.
        asynchronous: whether steps go on while a rank writes a backup.
            Meanwhile, the CPU memory has a copy of the data that the rank
            writes.
            The next backup waits until this one is written. So do the end
            after a signal and the end of ``fit``. If writing fails, a later
            batch raises the error.
        keep: how many complete backups to keep. While ``fit`` writes another
            one, the folder has one more.

    Raises:
        TowerError: an argument is not allowed; ``fit`` runs outside of a
            strategy's block; when ``fit`` begins, ``folder`` cannot be written
            to, or a rank that needs it does not see it; a backup cannot be
            written, belongs to another model, or is damaged.

    Example:
        >>> with kt.TowerStrategy():
        ...     model.fit(x, y, epochs=90, callbacks=[kt.Backup("backup")])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        delete: bool = True,
        asynchronous: bool = False,
        keep: int = KEPT,
    ):
        check_arguments(
            Backup,
            folder=folder,
            delete=delete,
            asynchronous=asynchronous,
            keep=keep,
        )
        if keep < 1:
            raise TowerError(f"keep={keep} backups: give 1 or more.")
        saved = SavedTraining(folder, keep=keep)
        self._resume_by(saved, every, delete, asynchronous)

    def _resume_by(
        self,
        saved: SavedTraining,
        every: int | None,
        delete: bool,
        asynchronous: bool = False,
    ) -> None:
        super().__init__()
        check_arguments(Backup, every=every)
        if every is not None and every < 1:
            raise TowerError(f"every={every} batches: give 1 or more.")
        self._saved, self._every, self._delete = saved, every, delete
        self._asynchronous = asynchronous
        self._skipped = 0
        self._signals: list[int] = []

    def find_start(
        self, peers: Peers, model: keras.Model, first: int
    ) -> FitStart:
        self._saved.read(peers, model, first)
        return self._saved.position

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._signals.clear()
        numbers = END_SIGNALS if self._saved.is_kept else ()
        with handle_signals(
            numbers, lambda number, _: self._signals.append(number)
        ):
            try:
                yield
            except Exception:
                self._saved.fail()
                raise
            finally:
                self._saved.close()

    def on_train_begin(self, logs: Logs = None) -> None:
        if components.active_strategy() is None:
            raise TowerError(
                "Backup works only inside a strategy's block, because plain "
                "Keras cannot resume in the middle of an epoch: use `with "
                "kt.TowerStrategy(1):`, or keras.callbacks.BackupAndRestore."
            )
        self._saved.attach(self.model)
        self._saved.compare_data(_describe_data(self.params.get("steps")))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._skipped = self._saved.position.batch
        if self._skipped and self._counts_for_all():
            saved = self._saved.metrics
            for variable, value in zip(self._metrics(), saved, strict=True):
                variable.assign(value)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        done = self._skipped + batch + 1
        if done == self.params.get("steps"):
            return  # The epoch's end is next.
        ends = self._should_end()
        due = self._every and done - self._saved.position.batch >= self._every
        if ends or due:
            call = tower_call.current()
            if call is not None:
                # Asynchronous towers may still train on earlier batches.
                call.wait_for_steps(trains=True)
            self._saved.position.batch = done
            self._saved.metrics = self._gather_metrics()
            self._saved.commit(self._asynchronous)
        if ends:
            self._end(
                f"after batch {done} of epoch {self._saved.position.epoch + 1}"
            )

    setattr(on_train_batch_end, NEVER_STOPS, True)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        saved, position = self._saved, self._saved.position
        position.epoch, position.batch, saved.metrics = epoch + 1, 0, []
        position.epochs.append(epoch)
        # Validation may be in some epochs only.
        for name, value in (logs or {}).items():
            position.history.setdefault(name, []).append(value)
        saved.commit(self._asynchronous)
        if self._should_end():
            self._end(f"after epoch {epoch + 1}")

    def on_train_end(self, logs: Logs = None) -> None:
        self._saved.finish()
        position = self._saved.position
        history = self.model.history or keras.callbacks.History()
        history.epoch = list(position.epochs)
        history.history = {k: list(v) for k, v in position.history.items()}
        self.model.history = history
        if not self._delete:
            # Another callback may have ended fit before the last epoch, or
            # changed weights since. There is nothing left to do.
            position.epoch = max(position.epoch, self.params["epochs"])
            self._saved.commit()
        self._saved.end(self._delete)

    def _metrics(self) -> list[keras.Variable]:
        return state_lib.collect(self.model).metrics

    def _counts_for_all(self) -> bool:
        """Whether this rank continues with the metrics of all ranks."""
        # With ``sync_every``, each rank counts its own examples.
        is_first = ranks_now().rank == 0
        return is_first or not _adoption().ranks_diverge(self.model)

    def _gather_metrics(self) -> list[np.ndarray]:
        """Return the metrics of all ranks, and gather the model (collective).

        With ``sync_every``, ranks end their round and continue with rank 0's
        optimizer, as they do after reading the backup.
        """
        adoption = _adoption()
        adoption.end_rounds()
        local = [v.numpy() for v in self._metrics()]
        if not adoption.ranks_diverge(self.model):
            return local
        adoption.broadcast(self.model)
        adoption.sum_metrics(self.model)
        total = [v.numpy() for v in self._metrics()]
        for variable, value in zip(self._metrics(), local, strict=True):
            variable.assign(value)
        return total

    def _should_end(self) -> bool:
        """Whether any rank has received a signal.

        It also completes a backup that all ranks have written by now.
        """
        saved = self._saved
        if not saved.is_kept:
            return False
        counts = [len(self._signals), int(saved.is_writing)]
        ranks = ranks_now()
        if ranks.size > 1:
            ranks.note_wait("the end of a batch")
            (total,) = sum_over_ranks(ranks, [tf.constant(counts)])
            counts = total.numpy().tolist()
        signals, writing = counts
        if not writing:
            saved.finish()
        return signals > 0

    def _end(self, where: str) -> None:
        self._saved.finish()
        # The launcher ends all ranks as soon as one has ended.
        rank_checks.gather(ranks_now(), None, "waits for rank 0 to commit")
        logger.warning(
            "fit of model %r ends %s, because of a signal. Start the script "
            "again to resume from there.",
            self.model.name,
            where,
        )
        raise EndOfJob


def load_backup(model: keras.Model, folder: str | os.PathLike[str]) -> None:
    """Load the weights of a backup into a model.

    This reads one variable at a time. If variables are in shards over ranks,
    each rank keeps only its shards. If the last backup is damaged, the one
    before it is loaded, which is logged.

    Args:
        model: any Keras model with the same weights, in the same order; it need
            not be compiled.
        folder: the folder of ``Backup``. If several calls of ``fit`` share it,
            the folder of one: ``backup/backup-2``.

    Raises:
        TowerError: there is no backup, or there are several; all of a call are
            damaged; or they have other weights. The model is left as it was.

    Example:
        >>> kt.load_backup(model, "backup")
    """
    call = backup_folder.only_call_in(backup_folder.resolve(folder))
    name = call.find(
        lambda parts: [part for part in parts if checkpoint.is_weight(part[0])]
    )
    facts = call.read_notes(name)
    with call.refusing_damage():
        saved = dict(zip(facts["variables"], facts["shapes"], strict=True))
    saved = {n: shape for n, shape in saved.items() if checkpoint.is_weight(n)}
    weights = state_lib.collect(model).weights
    own = [
        (_last_name(w.path), shape)
        for w, shape in zip(weights, shapes_of(weights), strict=True)
    ]
    wanted = [(_last_name(n), shape) for n, shape in saved.items()]
    for given, found in itertools.zip_longest(wanted, own):
        if given != found:
            raise TowerError(
                f"{call.path} is the backup of a model with other weights than "
                f"{model.name!r}: where it has {_described(given)}, the model "
                f"has {_described(found)}. Make the model as it was trained, "
                "and build it."
            )
    prefix = call.prefix(name)
    for variable, of_file in zip(weights, saved, strict=True):
        with call.refusing_damage():
            checkpoint.read_into(prefix, of_file, variable)


def _last_name(path: str) -> str:
    return path.rpartition("/")[2]


def _described(weight: tuple[str, str] | None) -> str:
    return "none" if weight is None else " ".join(weight)
