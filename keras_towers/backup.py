"""``kt.Backup``: training that resumes where an earlier run stopped."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.errors import EXIT_AGAIN, EndOfJob, TowerError, shorten
from keras_towers.fit import contract, model_settings, rank_agreement
from keras_towers.fit.calls import tower_call
from keras_towers.fit.calls.callback_effects import NEVER_STOPS
from keras_towers.fit.calls.callback_roles import ResumesFit
from keras_towers.fit.contract import FitStart
from keras_towers.fit.options import check_arguments
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.fit.weights.model_state import shared_variables, trained_by
from keras_towers.fit.weights.shards import is_over_ranks
from keras_towers.reduction import RankSum, SavedStates, sum_over_ranks
from keras_towers.rendezvous import commits, rank_checks
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.system import (
    absolute,
    handle_signals,
    make_writable,
    replace_file,
)
from keras_towers.transport import SingleProcess, Transport

logger: logging.Logger = logging.getLogger("keras_towers")

END_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after which training ends with a backup."""
_NAME = "backup{}.npz"
_PARTIAL = ".backup-in-progress"
_NOTES = "notes"
_POSITION = (
    *("epoch", "batch", "seed", "random_state", "epochs", "history"),
    "begun",
)
_FAILED = ".failed"
# How many differences an error shows.
_SHOWN_SETTINGS = 3


@dataclasses.dataclass
class _Calls:
    """The calls of ``fit`` in this process with backups in a folder.

    Attributes:
        begun: how many have begun.
        failed: backups of those that have failed since the last one began.
    """

    begun: int = 0
    failed: list[Path] = dataclasses.field(default_factory=list)


_calls: collections.defaultdict[Path, _Calls] = collections.defaultdict(_Calls)


def _adoption() -> Adoption | None:
    """The adoption of the current strategy's models, if there is one."""
    strategy = contract.active_strategy()
    return None if strategy is None else strategy._adoption


def _rank_sum() -> RankSum | None:
    """What sums gradients over the ranks, if there are several."""
    strategy = contract.active_strategy()
    return None if strategy is None else strategy._update.rank_sum


def _transport() -> Transport | None:
    """The transport to other ranks; None if there are none."""
    strategy = contract.active_strategy()
    if strategy is None:
        return None
    transport = strategy._config.transport
    return transport if transport.size > 1 else None


class Backup(ResumesFit):
    """Backs up training, ends it cleanly on a signal, and resumes it.

    For jobs that may be stopped and restarted: Slurm's ``--requeue``,
    Kubernetes, spot machines. At every epoch's end, after every ``every``
    batches, and when SIGTERM or SIGUSR1 arrives, rank 0 writes the weights, the
    optimizer's state, random states, metrics, the position in the data, and the
    state of each rank's communication hook (``StatefulHook``).
    After a signal all ranks end after the current batch, with exit code 75. The
    same script, started again, resumes after that batch: weights and
    ``History`` are as in an undisturbed run. When ``fit`` has ended, the backup
    is deleted.

    ``keras-towers run`` starts the script again with ``--restarts``, and in an
    elastic job, whose number of ranks may change.

    A script that calls ``fit`` several times, as for trials or folds, can use
    one folder: each call has its own file, by its number. Started again, a
    script makes the same calls in the same order. Those before the last one run
    again, whether they had ended or failed with an error that the script
    survived. A call that the script repeats after an error is the next one: it
    begins in its first epoch, with the model as it is; the backup of the failed
    one is kept beside it, as ``.npz.failed``. To go on from the backup, let the
    process end, and start it again; in a notebook, restart the kernel.

    A backup knows its model: the layers and how they are connected, their
    settings, and what the model was compiled with. It is refused for another
    one. Names, seeds and the first values of weights may differ, as may the
    metrics at an epoch's end, and a learning rate if the number of ranks has
    changed: training then goes on with that of the backup, and says so. Not
    compared are the data, the arguments of ``fit``, Python code, and what no
    ``get_config()`` returns.

    ``keras.callbacks.BackupAndRestore`` resumes at the beginning of an epoch,
    and ignores signals.

    Args:
        folder: where to write; every process that may become rank 0 needs
            access.
        every: batches between two backups; None: one at every epoch's end.
        delete: whether to delete the backup when ``fit`` has ended.

    Raises:
        TowerError: an argument is not allowed; ``fit`` runs outside of a
            strategy's block; ``folder`` cannot be written to when ``fit``
            begins; or the backup is another model's, damaged, or of an
            earlier version.

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
        check_arguments(Backup, folder=folder, delete=delete)
        self._resume_by(BackupFile(Path(folder)), every, delete)

    def _resume_by(
        self, file: BackupFile, every: int | None, delete: bool
    ) -> None:
        super().__init__()
        check_arguments(Backup, every=every)
        if every is not None and every < 1:
            raise TowerError(f"every={every} batches: give 1 or more.")
        self._file, self._every, self._delete = file, every, delete
        self._skipped = 0
        self._signals: list[int] = []

    def find_start(
        self, peers: Peers, model: keras.Model, first: int
    ) -> FitStart:
        file = self._file
        file.read(peers, model, first)
        return FitStart(
            file.epoch,
            len(file.epochs),
            file.batch,
            file.seed,
            file.random_state,
        )

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        self._signals.clear()
        numbers = END_SIGNALS if self._file.is_kept else ()
        with handle_signals(
            numbers, lambda number, _: self._signals.append(number)
        ):
            try:
                yield
            except Exception:
                self._file.fail()
                raise
            finally:
                self._file.close()

    def on_train_begin(self, logs: Any = None) -> None:
        if contract.active_strategy() is None:
            raise TowerError(
                "Backup works inside a strategy's block only, because plain "
                "Keras cannot resume in the middle of an epoch: use `with "
                "kt.TowerStrategy(1):`, or keras.callbacks.BackupAndRestore."
            )
        self._file.attach(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._skipped = self._file.batch
        if self._file.batch and self._counts_for_all():
            saved = self._file.metrics
            for variable, value in zip(self._metrics(), saved, strict=True):
                variable.assign(value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = self._skipped + batch + 1
        if done == self.params.get("steps"):
            return  # The epoch's end is next.
        ends = self._should_end()
        due = self._every and done - self._file.batch >= self._every
        if ends or due:
            call = tower_call.current()
            if call is not None:
                # Asynchronous towers may still train on earlier batches.
                call.wait_for_steps(trains=True)
            self._file.batch = done
            self._file.metrics = self._gather_metrics()
            self._file.commit()
        if ends:
            self._end(f"after batch {done} of epoch {self._file.epoch + 1}")

    setattr(on_train_batch_end, NEVER_STOPS, True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        position = self._file
        position.epoch, position.batch, position.metrics = epoch + 1, 0, []
        position.epochs = [*position.epochs, epoch]
        # Validation may be in some epochs only.
        for name, value in (logs or {}).items():
            position.history.setdefault(name, []).append(value)
        position.commit()
        if self._should_end():
            self._end(f"after epoch {epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        history = self.model.history or keras.callbacks.History()
        history.epoch = list(self._file.epochs)
        history.history = {k: list(v) for k, v in self._file.history.items()}
        self.model.history = history
        if not self._delete:
            # Another callback may have ended fit before the last epoch, or
            # changed weights since. There is nothing left to do.
            self._file.epoch = max(self._file.epoch, self.params["epochs"])
            self._file.commit()
        self._file.end(self._delete)

    def _metrics(self) -> list[keras.Variable]:
        return state_lib.collect(self.model).metrics

    def _ranks_train_separately(self) -> bool:
        """Whether each rank counts its own examples, as with ``sync_every``."""
        adoption = _adoption()
        return adoption is not None and adoption.ranks_diverge(self.model)

    def _counts_for_all(self) -> bool:
        """Whether this rank continues with the metrics of all ranks."""
        transport = _transport()
        first = transport is None or transport.rank == 0
        return first or not self._ranks_train_separately()

    def _gather_metrics(self) -> list[np.ndarray]:
        """Return the metrics of all ranks, and gather the model (collective).

        With ``sync_every``, ranks end their round and continue with rank 0's
        optimizer, as they do after reading the backup.
        """
        adoption = _adoption()
        if adoption is not None:
            adoption.end_rounds()
        local = [v.numpy() for v in self._metrics()]
        if adoption is None or not self._ranks_train_separately():
            return local
        adoption.broadcast(self.model)
        adoption.sum_metrics(self.model)
        total = [v.numpy() for v in self._metrics()]
        for variable, value in zip(self._metrics(), local, strict=True):
            variable.assign(value)
        return total

    def _should_end(self) -> bool:
        """Whether any rank has received a signal."""
        if not self._file.is_kept:
            return False
        signals = len(self._signals)
        transport = _transport()
        if transport is not None:
            transport.note_wait("the end of a batch")
            (total,) = sum_over_ranks(transport, [tf.constant(signals)])
            signals = int(total)
        return signals > 0

    def _end(self, where: str) -> None:
        transport = _transport()
        if transport is not None:
            # The launcher ends all ranks as soon as one has ended.
            rank_checks.gather(transport, None, "waits for rank 0 to commit")
        logger.warning(
            "fit of model %r ends %s, because of a signal. Start it again to "
            "resume from there; the exit code is %d.",
            self.model.name,
            where,
            EXIT_AGAIN,
        )
        raise EndOfJob


class BackupFile:
    """Position of ``fit`` and state of a model, in a NumPy file of rank 0.

    Args:
        folder: its folder; None: nothing is kept.
        notes: returns bytes to keep with each backup.

    Attributes:
        epoch: the epoch of the last backup, from 0.
        batch: the number of global batches of this epoch before it.
        begun: how many calls of ``fit`` with this folder had begun then.
    """

    epoch: int = 0
    batch: int = 0
    seed: int
    random_state: Sequence[Any]
    epochs: list[int]
    history: dict[str, list[Any]]
    begun: int
    metrics: list[np.ndarray]

    def __init__(self, folder: Path | None, notes: Callable[[], bytes] = bytes):
        self.is_kept: bool = folder is not None
        self.folder: Path = absolute(folder) if folder else Path()
        self.path: Path = self.folder
        self._notes = notes
        self._writes = False
        # Whether the file is this call's, and not what it may yet refuse.
        self._has_file = False
        self._model: Any = None
        self._settings: dict[str, Any] = {}
        # What the file has, until the model has it.
        self._resumes = False
        self._values: list[np.ndarray] = []
        self._shapes: list[str] = []
        self._trained: list[list[int]] = []
        self._hook_states = SavedStates([], [])

    @property
    def _position(self) -> dict[str, Any]:
        """The position, without weights and metrics."""
        return {name: getattr(self, name) for name in _POSITION}

    def _move_to(
        self,
        epoch: int,
        batch: int,
        seed: int,
        random_state: Sequence[Any],
        epochs: list[int],
        history: dict[str, list[Any]],
        begun: int,
    ) -> None:
        self.epoch, self.batch = epoch, batch
        self.seed, self.random_state = seed, random_state
        self.epochs, self.history = epochs, history
        self.begun = begun

    def read(self, peers: Peers, model: keras.Model, first: int) -> None:
        """Read the file on rank 0; without it, begin with the first epoch."""
        # Call k of a script is always call k, however calls before it ended.
        calls = _calls[self.folder]
        number, failed = calls.begun, calls.failed
        calls.begun, calls.failed, self._has_file = number + 1, [], False
        self._writes = self.is_kept and peers.rank == 0
        if self._writes:
            make_writable(self.folder, "give Backup another one.")
            # A process that was killed while it wrote has left it.
            for partial in self.folder.glob(f"*{_PARTIAL}"):
                partial.unlink(missing_ok=True)
            for path in failed:
                _set_aside(path)
        self.path = self.folder / _NAME.format(f"-{number}" if number else "")
        seed, state = secrets.randbits(31), random.getstate()
        self._move_to(first, 0, seed, state, [], {}, calls.begun)
        self.metrics, self._hook_states = [], SavedStates([], [])
        self._shapes, self._trained, self._values = [], [], []
        self._resumes = self._writes and self.path.exists()
        refusal = ""
        if self._writes:
            self._settings = {
                **model_settings.describe(model),
                "ranks": peers.size,
            }
        if self._resumes:
            refusal = self._compare(self._load())
        if self._writes:
            commits.check_last(self.path, [self.epoch, self.batch])
        if peers.size > 1:
            states = self._hook_states
            contents = self._resumes, self._shapes, self._trained, self.metrics
            values = refusal, self._position, contents, states.layout
            of_rank_0 = rank_checks.gather(peers, values, "reads the backup")[0]
            refusal, position, contents, layout = of_rank_0
            self._move_to(**position)
            self._resumes, self._shapes, self._trained, self.metrics = contents
            self._hook_states = SavedStates(layout, states.values)
        if refusal:
            raise TowerError(refusal)
        # Calls in callbacks of earlier epochs are not made again.
        calls.begun = self.begun

    def _load(self) -> dict[str, Any]:
        """Read the file; return the settings of its model."""
        with _refusing_damage(self.path):
            with np.load(self.path, allow_pickle=False) as file:
                named = dict(file)
            named.pop(_NOTES, None)
            encoded, *arrays = named.values()
            facts = json.loads(str(encoded))
            if "position" in facts and "settings" not in facts:
                raise TowerError(
                    f"{self.path} is the backup of an earlier version of "
                    "keras_towers, which did not note of which model: go on "
                    "with that version, or delete it to train from the "
                    "beginning."
                )
            self._move_to(**facts["position"])
            self._shapes, layout = facts["variables"], facts["hook"]
            self._trained, settings = facts["trained"], facts["settings"]
            ranks = facts["ranks"]
        values = iter(arrays)
        self._values = list(itertools.islice(values, len(self._shapes)))
        self._hook_states = SavedStates.of(layout, ranks, values)
        self.metrics = list(values)
        return settings

    def _compare(self, saved: dict[str, Any]) -> str:
        """Return why the backup is not that of this model; empty if it is."""
        own = self._settings
        differing = model_settings.differing(saved, own)
        if not self.batch:
            for name in model_settings.METRICS:
                differing.pop(name, None)
        shown = [
            f"{name} ({was} in the backup, {now} now)"
            for name, (was, now) in differing.items()
        ]
        if not shown:
            return ""
        listed = "; ".join(shown[:_SHOWN_SETTINGS])
        if saved["ranks"] != own["ranks"] and all(
            map(model_settings.is_rate, differing)
        ):
            logger.warning(
                "the number of ranks has changed, and so has %s: training goes "
                "on with what is in the backup",
                listed,
            )
            return ""
        return (
            f"{self.path} is the backup of another model, or of one that was "
            f"compiled differently: {listed}. Make and compile the model as it "
            "was then, give Backup another folder, or delete the file to train "
            "from the beginning."
        )

    def read_notes(self) -> bytes | None:
        """Return the notes of the folder's last backup, if there is one."""
        if not self.is_kept:
            return None
        files = [*self.folder.glob(_NAME.format("*"))]
        if not files:
            return None
        last = max(files, key=os.path.getmtime)
        with _refusing_damage(last), last.open("rb") as opened:
            return bytes(np.load(opened)[_NOTES])

    def attach(self, model: keras.Model) -> None:
        """Restore a model from the file, and write its state from now on.

        Rank 0 does; the others get its values.
        """
        self._model = model
        if self._resumes:
            self._restore()
        if self._writes:
            commits.report_resumes(True)

    def _restore(self) -> None:
        self._resumes = False
        call = tower_call.current()
        if call is not None:
            call.prepare()
        self._build_optimizers()
        self._restore_variables()
        self._restore_hook()

    def _build_optimizers(self) -> None:
        """Make the slots of optimizers that a step of the model would build."""
        strategy, weights = contract.active_strategy(), self._weights
        # What has other optimizers or weights is refused later.
        pairs = zip(self._optimizers, self._trained, strict=False)
        for optimizer, numbers in pairs:
            trained = [weights[n] for n in numbers if n < len(weights)]
            if strategy is not None and trained and not optimizer.built:
                strategy._update.make_ready(optimizer, trained)

    def _restore_variables(self) -> None:
        model = self._model
        saved = [*self._shapes, *_shapes(self.metrics)]
        metrics = state_lib.collect(model).metrics if self.batch else []
        if saved != _shapes([*self._variables, *metrics]):
            raise TowerError(
                f"{self.path} is the backup of another model, or of one that "
                f"was compiled differently from {model.name!r}: use another "
                "folder, or delete it."
            )
        values = [variable._value for variable in self._variables]
        transport = _transport() or SingleProcess()
        rank_agreement.broadcast(transport, values, given=self._values)
        self._values, self._has_file = [], True

    def _restore_hook(self) -> None:
        """Give each rank its state of the communication hook. Collective."""
        saved, rank_sum = self._hook_states, _rank_sum()
        self._hook_states = SavedStates([], [])
        if rank_sum is not None:
            rank_sum.restore(self._optimizers, saved)
        elif saved.values:
            logger.warning(
                "%s has the state of a communication hook, which is dropped: "
                "there are no other ranks to exchange gradients with",
                self.path,
            )

    @property
    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        return state_lib.collect(self._model).optimizers

    @property
    def _weights(self) -> list[keras.Variable]:
        return state_lib.collect(self._model).weights

    @property
    def _variables(self) -> list[keras.Variable]:
        """All variables but metrics, those of optimizers last."""
        return shared_variables(self._model)

    def _find_trained(self) -> list[list[int]]:
        """Return the numbers of the weights that each optimizer updates."""
        numbers = {id(w): n for n, w in enumerate(self._weights)}
        return [
            [numbers[id(w)] for w in trained_by(o) if id(w) in numbers]
            for o in self._optimizers
        ]

    def commit(self) -> None:
        """Write the file on rank 0. Collective."""
        hook, rank_sum = SavedStates([], []), _rank_sum()
        if rank_sum is not None:
            hook = rank_sum.save(self._optimizers)
        variables = self._variables
        if not self._writes:
            # Rank 0 reads these with the others.
            for variable in filter(is_over_ranks, variables):
                variable.numpy()
            return
        values = [_numpy(v) for v in variables]
        self.begun = _calls[self.folder].begun
        facts = {
            "settings": self._settings,
            "position": self._position,
            "variables": _shapes(variables),
            "trained": self._find_trained(),
            "ranks": len(hook.values),
            "hook": hook.layout,
        }
        values = [*values, *itertools.chain(*hook.values), *self.metrics]
        encoded = np.array(json.dumps(facts, default=_plain))
        notes = {_NOTES: np.frombuffer(self._notes(), np.uint8)}

        def write(file: IO[bytes]) -> None:
            np.savez(file, encoded, *values, allow_pickle=False, **notes)

        replace_file(self.path, _PARTIAL, write)
        self._has_file = True
        commits.report_last(self.path, [self.epoch, self.batch])

    def end(self, delete: bool) -> None:
        """End a call of ``fit``, with or without its backup."""
        self.close()
        if delete and self._writes:
            commits.report_last(self.path, [])
            self.path.unlink(missing_ok=True)
            self._has_file = False

    def fail(self) -> None:
        """Note that ``fit`` has failed, in case the script survives that."""
        if self._has_file:
            _calls[self.folder].failed.append(self.path)

    def close(self) -> None:
        """Write no more, as ``fit`` has ended or failed."""
        if self._writes:
            commits.report_resumes(False)


def _set_aside(path: Path) -> None:
    """Keep a backup that nothing goes on from, as its call has failed.

    Started again, the script repeats the call from its beginning, and so fails
    or ends as it would have without a backup.
    """
    kept = path.with_name(f"{path.name}{_FAILED}")
    logger.warning(
        "an earlier call of fit has failed; its backup is kept as %s",
        kept,
    )
    commits.report_last(path, [])
    with contextlib.suppress(FileNotFoundError):
        path.replace(kept)


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    """Say what to do about a file that cannot be read in this block."""
    try:
        yield
    except TowerError:
        raise
    # Whatever reads it meets its own errors, and MemoryError where a damaged
    # header declares a huge array.
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise TowerError(
                f"cannot read {path}: {error.strerror}."
            ) from error
        too_large = isinstance(error, MemoryError)
        raise TowerError(
            f"{path} is not a backup of keras_towers, or damaged"
            f"{', or too large for this process' if too_large else ''} "
            f"({shorten(error)}): delete it to train from the beginning."
        ) from error


def _plain(value: Any) -> Any:
    """Turn a value of a ``History`` into what JSON has."""
    return np.asarray(value, float).tolist()


def _numpy(variable: keras.Variable) -> np.ndarray:
    value = np.asarray(variable)
    # NumPy's files do not support bfloat16.
    return value.astype("float32") if value.dtype.kind == "V" else value


def _shapes(variables: Sequence[Any]) -> list[str]:
    return [f"{list(v.shape)} {v.dtype}" for v in variables]
