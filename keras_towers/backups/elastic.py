"""Training that continues when processes are lost, and hosts come or go.

``keras-towers run --min-np 2 --max-np 4 --host-discovery-script hosts.sh
train.py`` starts all processes again when one is lost or the hosts change.
``train.py`` declares the state from which they resume, with any strategy for
several processes:

    state = kt.elastic.State(model)

    @kt.elastic.run
    def train(state):
        with kt.HorovodStrategy():
            model.fit(x, y, epochs=10, callbacks=[kt.elastic.Commit(state)])

    train(state)

A commit of a ``State`` is a backup, like those of ``kt.Backup``. A commit of an
``ObjectState`` is a signed file with its objects. The launcher chooses the
folder for both. All processes resume from the last commit. A global batch does
not depend on the number of ranks, so the final weights are those of a job
without a loss.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras

from keras_towers.backups.backup import END_SIGNALS, Backup
from keras_towers.backups.saved_training import KEPT, SavedTraining
from keras_towers.fit.given_values import check_arguments
from keras_towers.foundation.errors import EndOfJob, TowerError
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import Logs
from keras_towers.foundation.system import (
    handle_signals,
    make_writable,
    replace_file,
)
from keras_towers.jobs.rendezvous import commits

__all__ = ["Commit", "ObjectState", "State", "run"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="KeptObjects")

_POSITION = "_position"
_COMMIT = "commit-{}"
# A script that starts again makes its states in the same order.
_numbers = itertools.count()


class KeptObjects:
    """Objects that all ranks of a job take from rank 0 when they start.

    Args:
        **objects: objects that can be pickled; each becomes an attribute.

    Raises:
        TowerError: a name is one that the state needs itself.
    """

    def __init__(self, **objects: object):
        taken = [n for n in objects if n.startswith("_") or n in dir(self)]
        if taken:
            raise TowerError(
                f"{type(self).__name__} uses the name {taken[0]!r} itself: "
                "give your object another name."
            )
        vars(self).update(objects)
        self._names = tuple(objects)
        self._name = f"state-{next(_numbers)}"
        self._reset_callbacks: list[Callable[[], None]] = []
        common = commits.folder()
        self._folder: Path | None = common and common / self._name
        if self._folder is None and commits.has_other_ranks():
            logger.warning(
                "commits of kt.elastic are not kept: they need `keras-towers "
                "run --restarts N` or --min-np N. Under other launchers, give "
                "kt.Backup(folder) to fit."
            )

    def register_reset_callbacks(
        self, callbacks: list[Callable[[], None]]
    ) -> None:
        """Add functions to call when the job has started again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the functions for a job that has started again."""
        for callback in self._reset_callbacks:
            callback()

    def sync(self) -> None:
        """Give the objects of rank 0 to all ranks."""
        own = _pickled(self._contents())
        self._take(pickle.loads(self._of_rank_0(own)))

    def resume(self) -> None:
        """Load the last commit, if the job has started again."""
        content = self._read() if self._is_rank_0 else None
        if content is not None:
            self._take(pickle.loads(content))
        if self._of_rank_0(b"" if content is None else b"resumes"):
            self.on_reset()
        self.sync()

    def _contents(self) -> dict[str, object]:
        """Return the contents of a commit."""
        return {name: getattr(self, name) for name in self._names}

    def _take(self, contents: dict[str, Any]) -> None:
        """Set the contents of a commit."""
        vars(self).update(contents)

    def _read(self) -> bytes | None:
        """Return the content of the last commit, on rank 0."""
        raise NotImplementedError

    @property
    def _is_rank_0(self) -> bool:
        return commits.is_rank_0()

    def _of_rank_0(self, content: bytes) -> bytes:
        """Return rank 0's content on all ranks."""
        return commits.share(content)

    @property
    def _signals(self) -> tuple[int, ...]:
        """The signals after which the next commit ends the process."""
        return ()

    def _record(self, number: int) -> None:
        """Record a signal."""


class ObjectState(KeptObjects):
    """Objects that survive the loss of processes.

    Args:
        **objects: objects that can be pickled. Each becomes an attribute, and
            part of a commit. When ranks start again, all take it from rank 0's
            last commit.

    Example:
        >>> state = kt.elastic.ObjectState(epoch=0)
    """

    def __init__(self, **objects: object):
        super().__init__(**objects)
        self._told = False
        self._commits = 0
        self._saved: dict[str, object] = {}
        self.save()

    def save(self) -> None:
        """Keep the current values in memory, for ``restore``."""
        self._saved = self._everything()

    def restore(self) -> None:
        """Go back to the values that were saved or committed last."""
        self._take(self._saved)

    def sync(self) -> None:
        """Give the objects of rank 0 to all ranks."""
        super().sync()
        self.save()

    def commit(self) -> None:
        """Save, and write a file on rank 0, from which the job resumes.

        If SIGTERM or SIGUSR1 has arrived, as when hosts come or go, the process
        then ends with exit code 75.
        """
        self.save()
        self._commits += 1
        contents = self._to_commit() if self._folder else {}
        if self._folder is not None and self._is_rank_0:
            signed = commits.sign(_pickled(contents))
            make_writable(self._folder, "give --commits another one.")
            path = self._folder / _COMMIT.format(self._commits)
            replace_file(path, lambda file: file.write(signed))
            commits.report_last(str(self._folder), [self._commits])
            for old in self._files()[:-KEPT]:
                old.unlink()
        if self._should_end():
            raise EndOfJob

    def _everything(self) -> dict[str, object]:
        """Return the objects to save, and those that a subclass adds."""
        return self._contents()

    def _to_commit(self) -> dict[str, object]:
        """Return the content of a commit's file. Collective."""
        return {**self._saved}

    def _files(self) -> list[Path]:
        """Return the files of commits, oldest first."""
        assert self._folder is not None
        files = self._folder.glob(_COMMIT.format("*[0-9]"))
        return sorted(files, key=_number_of)

    def _read(self) -> bytes | None:
        if self._folder is None:
            return None
        files, content = self._files(), None
        self._commits = _number_of(files[-1]) if files else 0
        commits.check_last(str(self._folder), [self._commits])
        for file in reversed(files):
            try:
                content = commits.verify(file.read_bytes())
                break
            except TowerError:
                if file == files[0]:
                    raise
                logger.warning("%s is damaged: the one before is used", file)
        return content

    @property
    def _signals(self) -> tuple[int, ...]:
        return () if self._folder is None else END_SIGNALS

    def _record(self, number: int) -> None:
        self._told = True

    def _should_end(self) -> bool:
        """Whether a signal has told this process to end."""
        return self._told


class State(KeptObjects):
    """The state of ``fit``, which survives the loss of processes.

    Args:
        model: the Keras model.
        **extra: other objects that can be pickled. Each becomes an attribute,
            and part of a commit. When ranks start again, all of them load it
            from rank 0's last commit.

    Raises:
        TowerError: ``model`` is not a Keras model.

    Example:
        >>> state = kt.elastic.State(model, best=float("inf"))
    """

    def __init__(self, model: keras.Model, **extra: object):
        if not isinstance(model, keras.Model):
            raise TowerError(
                f"kt.elastic.State takes a Keras model first, not a "
                f"{type(model).__name__}; for objects only, use "
                "kt.elastic.ObjectState."
            )
        super().__init__(**extra)
        self.model = model
        self._backup: SavedTraining = SavedTraining(
            self._folder, self._make_notes
        )

    @property
    def epoch(self) -> int:
        """The epoch of the last commit, from 0."""
        return self._backup.position.epoch

    @property
    def batch(self) -> int:
        """The number of global batches of this epoch before the commit."""
        return self._backup.position.batch

    def _contents(self) -> dict[str, object]:
        return {**super()._contents(), _POSITION: (self.epoch, self.batch)}

    def _take(self, contents: dict[str, Any]) -> None:
        objects = dict(contents)
        position = self._backup.position
        position.epoch, position.batch = objects.pop(_POSITION)
        super()._take(objects)

    def _make_notes(self) -> bytes:
        return commits.sign(_pickled(self._contents()))

    def _read(self) -> bytes | None:
        notes = self._backup.read_notes()
        return None if notes is None else commits.verify(notes)


def _number_of(file: Path) -> int:
    """Return the number of a commit, given the name of its file."""
    return int(file.name.rpartition("-")[2])


def _pickled(contents: dict[str, object]) -> bytes:
    """Return the content of a commit as bytes."""
    try:
        return pickle.dumps(contents)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TowerError(
            f"a state can keep only objects that can be pickled ({error}): "
            "leave out functions and open files."
        ) from error


def run(
    function: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Make a function resume from the last commit.

    Args:
        function: its first argument is a state. It makes its own strategy.

    Returns:
        A function that returns what ``function`` returns.
    """

    @functools.wraps(function)
    def run_from_commit(state: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with handle_signals(
            state._signals, lambda number, _: state._record(number)
        ):
            state.resume()
            reports = state._signals and state._is_rank_0
            if reports:
                commits.report_resumes(True)
            try:
                return function(state, *args, **kwargs)
            finally:
                # The script may survive an error, and makes no commits then.
                if reports:
                    commits.report_resumes(False)

    return run_from_commit


class Commit(Backup):
    """Commits a ``State`` in ``fit``, and makes ``fit`` resume from it.

    ``fit`` starts in the state's epoch, after the batches that are done.
    ``History`` has all epochs, including those before a process was lost. If a
    commit should include the work of another callback at the end of an epoch,
    put that callback before this one.

    Args:
        state: the state.
        every: commit after this many batches, and at each epoch's end.
        asynchronous: whether steps go on while a commit is written, as for
            ``kt.Backup``.

    Raises:
        TowerError: an argument is not allowed, or ``state`` is not a ``State``
            of the model that is trained.

    Example:
        >>> model.fit(x, y, callbacks=[kt.elastic.Commit(state, every=50)])
    """

    def __init__(
        self, state: State, every: int = 100, asynchronous: bool = False
    ):
        check_arguments(Commit, asynchronous=asynchronous)
        if not isinstance(state, State):
            raise TowerError(
                "kt.elastic.Commit takes a kt.elastic.State, not a "
                f"{type(state).__name__}."
            )
        self._resume_by(state._backup, every, False, asynchronous)
        self._state = state

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: D102
        if self.model is not self._state.model:
            raise TowerError(
                f"kt.elastic.Commit has the state of model "
                f"{self._state.model.name!r}, but fit trains "
                f"{self.model.name!r}."
            )
        super().on_train_begin(logs)
