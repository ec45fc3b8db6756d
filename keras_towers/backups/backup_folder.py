"""The folder of a call's backups: written atomically, and pruned.

Each backup is a checkpoint of TensorFlow with notes beside it. The notes get
their name last, when everything else is written: a checkpoint with notes is
complete. Their checksum is that of the index, too, and the index has those of
the tensors: so files of two backups are not taken for one.

    backup/checkpoint                   names ckpt-3, for TensorFlow's own tools
    backup/ckpt-3.json                  the notes
    backup/ckpt-3.index
    backup/ckpt-3.data-00000-of-00002   of rank 0
    backup/ckpt-3.data-00001-of-00002   of rank 1

A process that is killed while it writes or deletes a checkpoint leaves files
whose names show it: those of one rank's part, or of notes in progress. A
checkpoint without such files and without notes has lost its notes.

The folder may be any that ``tf.io.gfile`` reaches. ``backup_choice.py`` chooses
the backup from which all ranks resume.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import posixpath
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_towers.fit.weights import checkpoint
from keras_towers.fit.weights.checkpoint import Part
from keras_towers.foundation import system
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.notices import logger
from keras_towers.foundation.object_types import JsonObject

gfile: Any = tf.io.gfile
_NAME = "backup"
_MARKER = "checkpoint"
_CHECKPOINT = "ckpt-{}"
_IN_MARKER = rb'"ckpt-(\d+)"'
_RANK = ".rank-"
_NOTES = ".json"
_INDEX = ".index"
_CHECKSUM = "crc32"
_PARTIAL = ".in-progress"
_FAILED = ".failed"
_TOKEN = ".seen-by-rank-0-{}"
_ADVICE = "give Backup another one."

PartName: TypeAlias = tuple[str, str]
"""The name of a tensor, and where a part lies in it (``checkpoint.Part``)."""
WrittenPart: TypeAlias = tuple[str, list[PartName]]
"""The name of the files of a rank, and what they have."""
Picks: TypeAlias = Callable[[list[PartName]], Sequence[PartName]]
"""Returns some of the parts of a backup."""


def resolve(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder, from the working directory."""
    given = os.fspath(folder)
    return given if _is_remote(given) else str(system.absolute(given))


def _is_remote(path: str) -> bool:
    return "://" in path


def make_writable(folder: str) -> None:
    """Make a folder that can be written to, or raise ``UnusableFolder``."""
    if not _is_remote(folder):
        system.make_writable(Path(folder), _ADVICE)
        return
    try:
        gfile.makedirs(folder)
        with token_in(folder):
            pass
    except (tf.errors.OpError, OSError) as error:
        raise system.UnusableFolder(
            f"cannot write to the folder {folder} ({shorten(error)}): {_ADVICE}"
        ) from error


@contextlib.contextmanager
def token_in(folder: str) -> Iterator[str]:
    """Keep a file with a random name in a folder in this block; yield it."""
    name = _TOKEN.format(secrets.token_hex(8))
    path = posixpath.join(folder, name)
    with gfile.GFile(path, "wb") as file:
        file.write(b"\n")
    try:
        yield name
    finally:
        with contextlib.suppress(tf.errors.OpError):
            gfile.remove(path)


def calls_in(folder: str) -> list[CallFolder]:
    """Return the calls of ``fit`` with backups in a folder."""
    names = gfile.listdir(folder) if gfile.isdir(folder) else []
    calls = (
        CallFolder(posixpath.join(folder, name.rstrip("/")))
        for name in sorted(names)
        if re.fullmatch(rf"{_NAME}(-\d+)?/?", name)
    )
    return [call for call in calls if call.exists()]


def only_call_in(folder: str) -> CallFolder:
    """Return the only call in a folder, which may be the folder of that call.

    Raises:
        TowerError: there is none, or there are several.
    """
    own = CallFolder(folder)
    calls = [own] if own.exists() else calls_in(folder)
    if not calls:
        raise TowerError(
            f"there is no complete backup in {folder}: give the folder of "
            "Backup. When fit ends, Backup deletes it, unless delete=False."
        )
    if len(calls) > 1:
        raise TowerError(
            f"{folder} has the backups of {len(calls)} calls of fit: give one "
            f"of {', '.join(call.path for call in calls)}."
        )
    return calls[0]


class CallFolder:
    """The folder of the backups of one call of ``fit``.

    Args:
        path: where it is.
    """

    def __init__(self, path: str):
        self.path: str = path
        # The last backups that this process has read or written.
        self._intact: list[str] = []

    @classmethod
    def of(cls, folder: str, number: int) -> CallFolder:
        """Return the folder of a call in a folder of several, by its number."""
        name = f"{_NAME}-{number}" if number else _NAME
        return cls(posixpath.join(folder, name))

    def prefix(self, name: str) -> str:
        """Return the path prefix of a checkpoint's files, by its name."""
        return posixpath.join(self.path, name)

    def _files(self) -> dict[str, set[str]]:
        """Return the names of the files of each checkpoint, oldest first."""
        files = collections.defaultdict[int, set[str]](set)
        for file in gfile.listdir(self.path) if gfile.isdir(self.path) else []:
            files[number_of(file)].add(file)
        return {name_of(n): files[n] for n in sorted(files) if n}

    def names(self) -> list[str]:
        """Return the names of all backups, oldest first.

        Raises:
            TowerError: the files of all backups are lost.
        """
        names = {n for n, own in self._files().items() if not _is_left(n, own)}
        if not names and gfile.exists(self.prefix(_MARKER)):
            raise TowerError(
                f"the backups in {self.path} are lost: give them back, or "
                "delete it to train from the beginning."
            )
        return sorted(names | self._marked(), key=number_of)

    def _marked(self) -> set[str]:
        """Return the names of the backups that were kept, lost ones too."""
        try:
            with gfile.GFile(self.prefix(_MARKER), "rb") as file:
                found = re.findall(_IN_MARKER, file.read())
        except tf.errors.OpError:  # It is lost itself.
            return set()
        return {name_of(int(number)) for number in found}

    def exists(self) -> bool:
        """Whether it has a backup, or had one that is lost."""
        return bool(gfile.exists(self.prefix(_MARKER)) or self.names())

    def written_ns(self) -> int:
        """Return when the last backup was completed, in nanoseconds."""
        files = map(self.prefix, gfile.listdir(self.path))
        return max(int(gfile.stat(file).mtime_nsec) for file in files)

    def find(self, picks: Picks = list) -> str:
        """Return the name of the last intact backup.

        Args:
            picks: returns those of a backup's parts that are needed.

        Raises:
            TowerError: all are damaged.
        """
        names, damage = self.names(), lambda name: self.damage(name, picks)
        return self.last_intact(names, damage)

    def last_intact(
        self,
        names: Sequence[str],
        damage: Callable[[str], str],
        says: bool = True,
    ) -> str:
        """Return the name of the last intact backup.

        Args:
            names: those of all backups; empty: there is none.
            damage: says what of a backup is damaged.
            says: whether to log that others are.

        Raises:
            TowerError: all are damaged.
        """
        damaged: list[str] = []
        for name in reversed(names):
            why = damage(name)
            if not why:
                if damaged and says:
                    logger.warning(
                        "%s is damaged (%s): %s, the backup before it, is used",
                        self.path,
                        "; ".join(damaged),
                        name,
                    )
                return name
            damaged.append(f"{name}: {why}")
        if damaged:
            raise self._is_damaged("; ".join(damaged))
        return ""

    def damage(self, name: str, picks: Picks = list) -> str:
        """Return which files of a backup are damaged; empty if none is.

        It reads one part after another, since TensorFlow compares checksums
        when it reads.

        Args:
            name: that of its checkpoint.
            picks: returns those of its parts that are read.
        """
        try:
            facts = self._decode(name)
            prefix = self.prefix(name)
            reader = tf.compat.v1.train.NewCheckpointReader(prefix)
            dtypes = reader.get_variable_to_dtype_map()
            for part, where in picks(facts["parts"]):
                checkpoint.read(prefix, part, dtypes[part], where)
        # Each of these files meets the errors of whatever parses it.
        except Exception as error:
            return shorten(error)
        return ""

    def read_notes(self, name: str) -> JsonObject:
        """Return the notes of a checkpoint.

        Raises:
            TowerError: they are damaged.
        """
        with self.refusing_damage():
            return self._decode(name)

    def _decode(self, name: str) -> JsonObject:
        with gfile.GFile(self.prefix(name) + _NOTES, "rb") as file:
            notes = json.loads(file.read())
        if notes.pop(_CHECKSUM) != self._checksum(name, notes):
            raise ValueError(f"{_NOTES} and {_INDEX} are not of one backup")
        return dict(notes)

    def _checksum(self, name: str, notes: JsonObject) -> int:
        """Return the checksum of notes, and of the index that they go with.

        The index has checksums of the tensors.
        """
        own = json.dumps([name, notes], sort_keys=True).encode()
        with gfile.GFile(self.prefix(name) + _INDEX, "rb") as file:
            return zlib.crc32(file.read(), zlib.crc32(own))

    def write_part(
        self, name: str, rank: int, parts: Sequence[Part]
    ) -> WrittenPart | None:
        """Write this rank's part of a backup, if it has one.

        Args:
            name: that of the checkpoint, of which this is a part.
            rank: this rank.
            parts: what it has.
        """
        if not parts:
            return None
        own = f"{name}{_RANK}{rank}"
        gfile.makedirs(self.path)
        checkpoint.write(self.prefix(own), parts)
        self._sync(own)
        return own, [(part.name, part.where) for part in parts]

    def complete(
        self,
        name: str,
        written: Sequence[WrittenPart],
        notes: JsonObject,
        keep: int,
    ) -> None:
        """Complete a backup, and delete the oldest ones.

        Args:
            name: that of its checkpoint.
            written: what all ranks have written.
            notes: what goes with it, as JSON has it.
            keep: how many to keep.
        """
        notes = {**notes, "parts": [p for _, parts in written for p in parts]}
        # As they are read.
        notes = json.loads(json.dumps(notes, default=_plain))
        # Until the notes are whole, this shows that they are in progress.
        self._write(name + _NOTES, "")
        checkpoint.merge(
            [self.prefix(own) for own, _ in written], self.prefix(name)
        )
        self._sync(name)
        notes[_CHECKSUM] = self._checksum(name, notes)
        self._write(name + _NOTES, json.dumps(notes))
        self._put_in_place(name + _NOTES)
        self._intact = [*self._intact, name][-keep:]
        lines = [f'model_checkpoint_path: "{name}"']
        lines += [f'all_model_checkpoint_paths: "{n}"' for n in self._intact]
        self._write(_MARKER, "\n".join([*lines, ""]))
        self._put_in_place(_MARKER)
        self._delete_before(self._intact[0])

    def go_on_from(self, name: str) -> None:
        """Delete the files that killed processes have left beside a backup.

        Args:
            name: that of its checkpoint; empty: there is none.
        """
        self._intact = [name] if name else []
        for other, files in self._files().items():
            if _is_left(other, files):
                self._discard(other, files)

    def _delete_before(self, name: str) -> None:
        """Delete the checkpoints before one that is kept."""
        for other, files in self._files().items():
            if number_of(other) < number_of(name):
                self._discard(other, files)

    def _discard(self, name: str, files: Collection[str]) -> None:
        """Delete a checkpoint, which is in progress until it is gone."""
        notes = name + _NOTES
        if notes in files:
            self._rename(notes, notes + _PARTIAL)
        for file in {*files} - {notes, notes + _PARTIAL}:
            self._remove(file)
        self._remove(notes + _PARTIAL)

    def _remove(self, name: str) -> None:
        """Delete a file, or a folder in its place."""
        path = self.prefix(name)
        with contextlib.suppress(tf.errors.NotFoundError):
            (gfile.rmtree if gfile.isdir(path) else gfile.remove)(path)

    def _rename(self, name: str, new: str) -> None:
        if gfile.isdir(self.prefix(new)):
            self._remove(new)
        gfile.rename(self.prefix(name), self.prefix(new), overwrite=True)

    def _write(self, name: str, content: str) -> None:
        """Write a file that ``_put_in_place`` will rename."""
        with gfile.GFile(self.prefix(name) + _PARTIAL, "wb") as file:
            file.write(content.encode())
        self._sync(name + _PARTIAL)

    def _put_in_place(self, name: str) -> None:
        """Give a written file its final name."""
        self._rename(name + _PARTIAL, name)
        self._sync(name)

    def _sync(self, beginning: str) -> None:
        """Write files to disk that begin so, in case power is lost."""
        if not _is_remote(self.path):
            for file in os.scandir(self.path):
                if file.name.startswith(beginning):
                    _sync_file(file.path)
            _sync_file(self.path)

    def delete(self) -> None:
        """Delete the folder.

        If this process is killed meanwhile, the files that remain are no
        backup.
        """
        self._remove(_MARKER)
        for name, files in self._files().items():
            self._discard(name, files)
        if gfile.isdir(self.path):
            gfile.rmtree(self.path)

    def set_aside(self) -> str:
        """Rename the folder, so that no call resumes; return the new path."""
        kept = self.path + _FAILED
        if gfile.isdir(kept):
            gfile.rmtree(kept)
        if gfile.isdir(self.path):
            gfile.rename(self.path, kept)
        return kept

    @contextlib.contextmanager
    def refusing_damage(self) -> Iterator[None]:
        """In this block, explain errors of files that cannot be read."""
        try:
            yield
        except TowerError:
            raise
        # Each of these files meets the errors of whatever parses it.
        except Exception as error:
            raise self._is_damaged(shorten(error)) from error

    def _is_damaged(self, why: str) -> TowerError:
        return TowerError(
            f"{self.path} is not a backup of keras_towers, or damaged ({why}): "
            "delete it to train from the beginning."
        )


def _is_left(name: str, files: Collection[str]) -> bool:
    """Whether a process was killed while it wrote or deleted a checkpoint."""
    notes = name + _NOTES
    return notes not in files and any(
        file == notes + _PARTIAL or file.startswith(name + _RANK)
        for file in files
    )


def name_of(number: int) -> str:
    """Return the name of a checkpoint, given its number."""
    return _CHECKPOINT.format(number)


def number_of(name: str) -> int:
    """Return the number of a checkpoint, given its name or that of a file.

    It is 1 or more; 0 for other files.
    """
    match = re.match(_CHECKPOINT.format(r"(\d+)(\.|$)"), name)
    return int(match[1]) if match else 0


def _sync_file(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _plain(value: ArrayLike) -> object:
    """Convert a value of a ``History`` to JSON."""
    return np.asarray(value, float).tolist()
