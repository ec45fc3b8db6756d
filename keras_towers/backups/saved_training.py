"""The state of training in a backup: the position of ``fit`` and the model.

``backup_choice.py`` chooses the backup to resume from. Each rank writes the
rows of variables that it alone has, and rank 0 the rest. The batches before the
position are skipped in ``fit/data/epoch_iterator.py``.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import functools
import os
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.backups import backup_choice, backup_folder
from keras_towers.backups.backup_folder import CallFolder, WrittenPart
from keras_towers.backups.saved_state import (
    Position,
    SavedState,
    leaves_of,
    of_hook,
    rank_sum_now,
    ranks_now,
    shapes_of,
    trained_in,
)
from keras_towers.fit.places import ALONE
from keras_towers.fit.ranks import plain_settings
from keras_towers.fit.ranks.plain_settings import ModelSettings
from keras_towers.fit.weights import checkpoint, model_state as state_lib
from keras_towers.fit.weights.checkpoint import Part
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import JsonObject
from keras_towers.jobs.rendezvous import commits, rank_checks
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.reduction.rank_sum import SavedStates
from keras_towers.transport import Transport

KEPT = 2
"""How many backups are kept by default."""
_METRICS = "metrics"


@dataclasses.dataclass
class _Calls:
    """The calls of ``fit`` in this process with backups in a folder.

    Attributes:
        begun: how many have begun.
        failed: backups of those that have failed since the last one began.
    """

    begun: int = 0
    failed: list[CallFolder] = dataclasses.field(default_factory=list)


_calls: collections.defaultdict[str, _Calls] = collections.defaultdict(_Calls)


@dataclasses.dataclass
class _Begun:
    """A backup that has begun, and is not complete.

    Attributes:
        name: that of its checkpoint.
        written: this rank's part, once it is written.
        ranks: those that write parts; this one if rank 0 writes all.
        notes: of rank 0.
        position: the position of ``fit``: an epoch and a batch.
    """

    name: str
    written: Future[WrittenPart | None]
    ranks: Transport
    notes: JsonObject
    position: list[int]


class SavedTraining:
    """The position of ``fit`` and the state of a model, in a folder.

    Args:
        folder: the folder, of which each call has its own; None: nothing is
            kept.
        notes: returns bytes to keep with each backup.
        keep: how many backups to keep.

    Attributes:
        position: that of the last backup, or of the next one.
        metrics: the metrics in the middle of an epoch.
    """

    metrics: list[np.ndarray]

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        notes: Callable[[], bytes] = bytes,
        keep: int = KEPT,
    ):
        self.is_kept: bool = folder is not None
        self.folder: str = backup_folder.resolve(folder) if folder else ""
        self.position: Position = Position()
        self._call = CallFolder(self.folder)
        self._notes, self._keep = notes, keep
        self._rank, self._number = 0, 0
        self._writes = False
        # Whether the backup is this call's, and not what it may yet refuse.
        self._has_backup = False
        self._model: Any = None
        self._settings: ModelSettings | None = None
        self._found: SavedState | None = None
        self._data: dict[str, str] = {}
        self._begun: _Begun | None = None
        self._hook_states = SavedStates([], [])

    def read(self, peers: Peers, model: keras.Model, first: int) -> None:
        """Read the backup on rank 0; without one, begin with the first epoch.

        Args:
            peers: all ranks.
            model: the model that is trained.
            first: the first epoch.

        Raises:
            TowerError: the backup is damaged, or another model's; or a rank
                that has to write its part does not see the folder of rank 0.
        """
        # Call k of a script is always call k, however calls before it ended.
        calls = _calls[self.folder]
        number, failed = calls.begun, calls.failed
        calls.begun, calls.failed, self._has_backup = number + 1, [], False
        self._rank, self._number = peers.rank, 0
        self._writes = self.is_kept and peers.rank == 0
        self._call = CallFolder.of(self.folder, number)
        self.position = Position(
            first,
            seed=secrets.randbits(31),
            random_state=random.getstate(),
            begun=calls.begun,
        )
        self.metrics, self._hook_states = [], SavedStates([], [])
        self._found, self._data = None, {}
        name = ""
        if self.is_kept:
            chosen = backup_choice.choose(
                self._call, self.folder, peers, failed
            )
            name, self._number = chosen.name, chosen.last_number
        if self._writes:
            self._settings = plain_settings.ModelSettings(
                keras.__version__, plain_settings.of_model(model), peers.size
            )

        def opened() -> tuple[Any, ...]:
            if self._writes:
                self._open(name)
                # The position of a damaged backup is unknown.
                if backup_folder.number_of(name) == self._number:
                    commits.check_last(self._call.path, self._place)
            state = self._found and dataclasses.astuple(self._found)
            position = dataclasses.asdict(self.position)
            return position, state, self.metrics, self._hook_states.layout

        (position, found, self.metrics, layout), *_ = rank_checks.gather_result(
            peers, opened, "reads the backup"
        )
        self.position = Position(**position)
        self._found = found and SavedState(*found)
        self._hook_states = SavedStates(layout, self._hook_states.values)
        # Calls in callbacks of earlier epochs are not made again.
        calls.begun = self.position.begun

    def _open(self, name: str) -> None:
        """Read a backup on rank 0; refuse that of another model."""
        if not name:
            return
        facts = self._call.read_notes(name)
        with self._call.refusing_damage():
            self.position = Position(**facts["position"])
            variables, trained = facts["variables"], facts["trained"]
            self._found = SavedState(name, variables, facts["shapes"], trained)
            self.metrics = [
                self._read(f"{_METRICS}/{n:03d}", dtype).numpy()
                for n, dtype in enumerate(facts["metrics"])
            ]
            layout = facts["hook"]
            dtypes = [d for _, d, _ in leaves_of(layout)]
            self._hook_states = SavedStates(
                layout,
                [
                    [
                        self._read(of_hook(rank, n), dtype).numpy()
                        for n, dtype in enumerate(dtypes)
                    ]
                    for rank in range(facts["ranks"])
                ],
            )
            settings = ModelSettings(**facts["settings"])
            self._data = dict(facts["data"])
        assert self._settings is not None
        between = not self.position.batch
        settings.refuse_other(self._settings, self._call.path, between)

    def _read(self, name: str, dtype: str | tf.DType) -> tf.Tensor:
        assert self._found is not None
        prefix = self._call.prefix(self._found.name)
        return checkpoint.read(prefix, name, dtype)

    @property
    def _place(self) -> list[int]:
        """The epoch and the batch, as the job's store knows them."""
        return [self.position.epoch, self.position.batch]

    def read_notes(self) -> bytes | None:
        """Return the notes of the folder's last backup, if there is one."""
        calls = backup_folder.calls_in(self.folder) if self.is_kept else []
        if not calls:
            return None
        last = max(calls, key=CallFolder.written_ns)
        facts = last.read_notes(last.find())
        with last.refusing_damage():
            return base64.b64decode(facts["notes"], validate=True)

    def attach(self, model: keras.Model) -> None:
        """Restore a model from the backup, and write its state from now on."""
        self._model = model
        if self._found is not None:
            metrics = self.metrics if self.position.batch else None
            self._found.restore(model, self._call, metrics)
            self._has_backup = True
            self._restore_hook()
            self._found = None
        if self._writes:
            commits.report_resumes(True)

    def compare_data(self, data: dict[str, str]) -> None:
        """Warn if the data of ``fit`` differ from those of the backup.

        Args:
            data: describes the data, by names.
        """
        both = [self._data, data]
        differing = rank_checks.differing_settings(both if all(both) else [])
        if differing:
            logger.warning(
                "%s was made with other data: %s. fit leaves out as many "
                "batches as are done (%d of epoch %d), and trains on the rest",
                self._call.path,
                plain_settings.describe_changes(differing),
                self.position.batch,
                self.position.epoch + 1,
            )
        self._data = data

    def _restore_hook(self) -> None:
        """Give each rank its state of the communication hook. Collective."""
        saved, rank_sum = self._hook_states, rank_sum_now()
        self._hook_states = SavedStates([], [])
        if rank_sum is not None:
            rank_sum.restore(self._optimizers, saved)
        elif saved.values:
            logger.warning(
                "%s has the state of a communication hook, which is not used: "
                "there are no other ranks to exchange gradients with",
                self._call.path,
            )

    @property
    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        return state_lib.collect(self._model).optimizers

    def commit(self, asynchronous: bool = False) -> None:
        """Write a backup: each rank its own parts, rank 0 all the rest.

        Collective.

        Args:
            asynchronous: whether to return before it is written; ``finish``
                then completes it.

        Raises:
            TowerError: a rank could not write this one or the one before it.
                The last complete one is still there.
        """
        if not self.is_kept:
            return
        self.finish()
        hook, rank_sum = SavedStates([], []), rank_sum_now()
        if rank_sum is not None:
            hook = rank_sum.save(self._optimizers)
        variables = checkpoint.named_variables(self._model)
        # Equal on all ranks, as is what they have in shards.
        self._number += 1
        name = backup_folder.name_of(self._number)
        parts = [
            part
            for own, variable in variables.items()
            for part in checkpoint.parts_here(own, variable, self._rank)
        ]
        notes: JsonObject = {}
        if self._writes:
            parts += self._parts_of_rank_0(hook)
            notes = self._describe(variables, hook)
        are_divided = any(map(spans_ranks, variables.values()))
        ranks = ranks_now() if are_divided else ALONE
        parts = checkpoint.read_now(parts)
        pool = ThreadPoolExecutor(1, "keras-towers-backup")
        written = pool.submit(self._call.write_part, name, self._rank, parts)
        pool.shutdown(wait=False)
        self._begun = _Begun(name, written, ranks, notes, self._place)
        if not asynchronous:
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its part of a backup."""
        return self._begun is not None and not self._begun.written.done()

    def finish(self) -> None:
        """Complete the backup that has begun, if there is one. Collective.

        Raises:
            TowerError: a rank could not write. The backup before is complete.
        """
        begun = self._begun
        if begun is None:
            return
        wait([begun.written])
        self._begun = None
        written = rank_checks.gather_result(
            begun.ranks,
            self._refusing_failure()(begun.written.result),
            "has written its part of the backup",
        )
        if self._writes:
            parts = [part for part in written if part is not None]
            complete = self._refusing_failure()(self._call.complete)
            complete(begun.name, parts, begun.notes, self._keep)
            commits.report_last(self._call.path, begun.position)
        self._has_backup = True

    @contextlib.contextmanager
    def _refusing_failure(self) -> Iterator[None]:
        """Say what to do if this rank cannot write in this block."""
        try:
            yield
        except Exception as error:
            own = f"rank {self._rank} " if ranks_now().size > 1 else ""
            before = "There is no backup yet"
            if self._has_backup:
                before = "The backup before it is complete"
            raise TowerError(
                f"{own}cannot write to {self._call.path} ({shorten(error)}). "
                f"{before}: make room, and start the script again."
            ) from error

    def _parts_of_rank_0(self, hook: SavedStates) -> list[Part]:
        """Return the metrics, and the states of the hook of all ranks."""
        tensors = {f"{_METRICS}/{n:03d}": v for n, v in enumerate(self.metrics)}
        for rank, values in enumerate(hook.values):
            for n, value in enumerate(values):
                tensors[of_hook(rank, n)] = value
        return [
            Part(name, checkpoint.WHOLE, functools.partial(tf.constant, value))
            for name, value in tensors.items()
        ]

    def _describe(
        self, variables: dict[str, keras.Variable], hook: SavedStates
    ) -> JsonObject:
        """Return the notes of a backup, besides its tensors."""
        assert self._settings is not None
        self.position.begun = _calls[self.folder].begun
        return {
            "settings": dataclasses.asdict(self._settings),
            "position": dataclasses.asdict(self.position),
            "data": self._data,
            "variables": [*variables],
            "shapes": shapes_of([*variables.values()]),
            "trained": trained_in(self._model),
            "metrics": [str(value.dtype) for value in self.metrics],
            "ranks": len(hook.values),
            "hook": hook.layout,
            "notes": base64.b64encode(self._notes()).decode(),
        }

    def end(self, delete: bool) -> None:
        """End a call of ``fit``, with or without its backup."""
        self.close()
        if delete and self._writes:
            commits.report_last(self._call.path, [])
            self._call.delete()
            self._has_backup = False

    def fail(self) -> None:
        """Record that ``fit`` has failed, in case the script continues."""
        if self._has_backup:
            _calls[self.folder].failed.append(self._call)

    def close(self) -> None:
        """Write no more, since ``fit`` has ended or failed."""
        if self._begun is not None:
            # Without the other ranks it cannot become complete.
            wait([self._begun.written])
            self._begun = None
        if self._writes:
            commits.report_resumes(False)
