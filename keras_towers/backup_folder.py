"""The folder of a call's backups, of which one is complete at any moment.

Each backup is a checkpoint of TensorFlow with notes beside it. TensorFlow's own
file ``checkpoint``, which is written last, names the one that is complete:

    backup/checkpoint                   names ckpt-3
    backup/ckpt-3.json                  the notes
    backup/ckpt-3.index
    backup/ckpt-3.data-00000-of-00002   of rank 0
    backup/ckpt-3.data-00001-of-00002   of rank 1

The folder may be any that ``tf.io.gfile`` reaches.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from keras_towers import settings, system
from keras_towers._types import JsonObject
from keras_towers.errors import TowerError, shorten
from keras_towers.fit.weights import checkpoint
from keras_towers.fit.weights.checkpoint import Part
from keras_towers.rendezvous.store import wait_for

gfile: Any = tf.io.gfile
_NAME = "backup"
_MARKER = "checkpoint"
_CHECKPOINT = "ckpt-{}"
_RANK = ".rank-"
_NOTES = ".json"
_PARTIAL = ".in-progress"
_FAILED = ".failed"
_TOKEN = ".seen-by-rank-0-{}"
_ADVICE = "give Backup another one."


def resolve(folder: str | os.PathLike[str]) -> str:
    """Return a folder as it is meant in the working directory."""
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
        with _token_in(folder):
            pass
    except (tf.errors.OpError, OSError) as error:
        raise system.UnusableFolder(
            f"cannot write to the folder {folder} ({shorten(error)}): {_ADVICE}"
        ) from error


@contextlib.contextmanager
def _token_in(folder: str) -> Iterator[str]:
    """Keep a file in a folder in this block; yield its name, a random one."""
    name = _TOKEN.format(secrets.token_hex(8))
    path = posixpath.join(folder, name)
    with gfile.GFile(path, "wb") as file:
        file.write(b"\n")
    try:
        yield name
    finally:
        with contextlib.suppress(tf.errors.OpError):
            gfile.remove(path)


def find_blind_ranks(
    folder: str, rank: int, exchange: Callable[[Any], list[Any]]
) -> list[int]:
    """Return the ranks that do not see the folder of rank 0. Collective.

    Args:
        folder: its path on this rank.
        rank: this rank.
        exchange: gathers values from all ranks.
    """
    if rank == 0:
        with _token_in(folder) as name:
            exchange(name)
            seen = exchange(True)
    else:
        path = posixpath.join(folder, exchange("")[0])
        sees = False
        # A file that another host has just made may take a moment.
        with contextlib.suppress(TimeoutError):
            sees = wait_for(
                lambda: gfile.exists(path) or None, settings.SEES_FILE_S
            )
        seen = exchange(sees)
    return [rank for rank, sees in enumerate(seen) if not sees]


def calls_in(folder: str) -> list[CallFolder]:
    """Return the calls of ``fit`` with a complete backup in a folder."""
    names = gfile.listdir(folder) if gfile.isdir(folder) else []
    found = (
        CallFolder(posixpath.join(folder, name.rstrip("/")))
        for name in sorted(names)
        if re.fullmatch(rf"{_NAME}(-\d+)?/?", name)
    )
    return [call for call in found if call.exists()]


def only_call_in(folder: str) -> CallFolder:
    """Return the call whose backup a folder has, or whose folder it is.

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

    @classmethod
    def of(cls, folder: str, number: int) -> CallFolder:
        """Return that of a call, by its number, in a folder of several."""
        name = f"{_NAME}-{number}" if number else _NAME
        return cls(posixpath.join(folder, name))

    @property
    def _marker(self) -> str:
        return posixpath.join(self.path, _MARKER)

    def prefix(self, name: str) -> str:
        """Return where the files of a checkpoint are, by its name."""
        return posixpath.join(self.path, name)

    def exists(self) -> bool:
        """Whether it has a complete backup."""
        return bool(gfile.exists(self._marker))

    def written_ns(self) -> int:
        """When the last backup was completed, in nanoseconds."""
        return int(gfile.stat(self._marker).mtime_nsec)

    def find(self) -> str:
        """Return the name of the complete checkpoint.

        Raises:
            TowerError: it is damaged.
        """
        with self.refusing_damage():
            state = tf.train.get_checkpoint_state(self.path)
            name = posixpath.basename(state.model_checkpoint_path)
            tf.compat.v1.train.NewCheckpointReader(self.prefix(name))
        return name

    def read_notes(self, name: str) -> JsonObject:
        """Return the notes of a checkpoint.

        Raises:
            TowerError: they are damaged.
        """
        with self.refusing_damage():
            path = self.prefix(name) + _NOTES
            with gfile.GFile(path, "rb") as file:
                notes = json.loads(file.read())
            if not isinstance(notes, dict):
                raise ValueError("no notes")
        return notes

    def write_part(self, name: str, rank: int, parts: Sequence[Part]) -> str:
        """Write what a rank has; return the name of its files.

        Args:
            name: that of the checkpoint, of which this is a part.
            rank: this rank.
            parts: what it has.
        """
        own = f"{name}{_RANK}{rank}"
        gfile.makedirs(self.path)
        checkpoint.write(self.prefix(own), parts)
        self._sync(own)
        return own

    def complete(
        self, name: str, written: Sequence[str], notes: JsonObject
    ) -> None:
        """Make a backup the complete one, and delete the one before.

        Args:
            name: that of its checkpoint.
            written: the names of the files of all ranks.
            notes: what goes with it, as JSON has it.
        """
        checkpoint.merge([*map(self.prefix, written)], self.prefix(name))
        encoded = json.dumps(notes, default=_plain).encode()
        self._write(name + _NOTES, encoded)
        self._sync(name)
        marker = (
            f'model_checkpoint_path: "{name}"\n'
            f'all_model_checkpoint_paths: "{name}"\n'
        )
        self._write(_MARKER, marker.encode())
        self.delete_rest(name)

    def delete_rest(self, name: str, later: bool = False) -> None:
        """Delete what is left of other checkpoints.

        Args:
            name: that of the one to keep; empty: none.
            later: whether to delete those after it, too, which other ranks may
                have begun to write.
        """
        own = number_of(name)
        for other in gfile.listdir(self.path) if gfile.isdir(self.path) else []:
            number = number_of(other)
            is_part = other.startswith((f"{name}{_RANK}", _MARKER + _PARTIAL))
            is_other = 0 < number < own or (later and number > own)
            if is_part or is_other:
                self._remove(other)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(tf.errors.NotFoundError):
            gfile.remove(self.prefix(name))

    def _write(self, name: str, content: bytes) -> None:
        """Replace a file once the new one is complete."""
        path = self.prefix(name)
        with gfile.GFile(path + _PARTIAL, "wb") as file:
            file.write(content)
        self._sync(name + _PARTIAL)
        gfile.rename(path + _PARTIAL, path, overwrite=True)

    def _sync(self, beginning: str) -> None:
        """Make files last whose names begin so, if the machine loses power."""
        if not _is_remote(self.path):
            for file in os.scandir(self.path):
                if file.name.startswith(beginning):
                    _sync_file(file.path)
            _sync_file(self.path)

    def delete(self) -> None:
        """Delete it. What is left, if this process is killed, is no backup."""
        self._remove(_MARKER)
        if gfile.isdir(self.path):
            gfile.rmtree(self.path)

    def set_aside(self) -> str:
        """Rename it, so that nothing goes on from it; return the new path."""
        kept = self.path + _FAILED
        if gfile.isdir(kept):
            gfile.rmtree(kept)
        if gfile.isdir(self.path):
            gfile.rename(self.path, kept)
        return kept

    @contextlib.contextmanager
    def refusing_damage(self) -> Iterator[None]:
        """Say what to do about files that cannot be read in this block."""
        try:
            yield
        except TowerError:
            raise
        # Each of these files meets the errors of whatever parses it.
        except Exception as error:
            raise TowerError(
                f"{self.path} is not a backup of keras_towers, or damaged "
                f"({shorten(error)}): delete it to train from the beginning."
            ) from error


def name_of(number: int) -> str:
    """Return the name of a call's checkpoint."""
    return _CHECKPOINT.format(number)


def number_of(name: str) -> int:
    """Return the number of a checkpoint by its name, or by that of a file.

    It is 1 or more; 0 for other files.
    """
    found = re.match(_CHECKPOINT.format(r"(\d+)"), name)
    return int(found[1]) if found else 0


def _sync_file(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _plain(value: ArrayLike) -> object:
    """Turn a value of a ``History`` into what JSON has."""
    return np.asarray(value, float).tolist()
