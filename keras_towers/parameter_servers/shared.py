"""What all processes know by its name, on a parameter server."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from typing import Any

import tensorflow as tf

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.parameter_servers.remote import run, traced

_NOTES = "keras_towers/notes"
# Tells a note with an empty text from one that is not there.
_SET = "="


def ask(function: Any, device: str, *arguments: tf.Tensor) -> list[Any]:
    """Run a concrete function that has nothing to wait for, on one server.

    Raises:
        TowerError: the server does not answer.
        tf.errors.OpError: it cannot be reached.
    """
    try:
        return run(function, settings.ANSWER_S, arguments=arguments)
    except TimeoutError:
        spec = tf.DeviceSpec.from_string(device)
        raise TowerError(
            f"{spec.job} {spec.task} can be reached, but has not answered for "
            f"{settings.ANSWER_S:g} s: its process was stopped, or its machine "
            "hangs. Let it go on, or start all tasks of the job again, from a "
            "backup."
        ) from None


class Note:
    """A text that every process can write, read, and wait for.

    What is written stays for as long as the server lives, and no process that
    dies takes anything with it. Notes differ in data only, so that a server
    keeps two functions of each process for all of them.

    Args:
        name: of the note, the same in all processes.
        device: where it is.

    Example:
        >>> Note("best", device).set("7")  # in one process
        >>> Note("best", device).wait()  # in any other
        '7'
    """

    def __init__(self, name: str, device: str):
        # TensorFlow has no table of strings by strings.
        digest = hashlib.sha256(name.encode()).digest()
        self._number = int.from_bytes(digest[:8], signed=True)
        self._device = device

    def set(self, text: str = "") -> None:
        """Write it; the last text counts.

        Raises:
            TowerError: the server does not answer.
            tf.errors.OpError: it cannot be reached.
        """
        number = tf.constant(self._number, tf.int64)
        written = tf.constant(_SET + text)
        ask(_notes(self._device).write, self._device, number, written)

    def get(self) -> str | None:
        """Read it; None if nobody has written it.

        Raises:
            TowerError: the server does not answer.
            tf.errors.OpError: it cannot be reached.
        """
        number = tf.constant(self._number, tf.int64)
        (found,) = ask(_notes(self._device).read, self._device, number)
        return text_of(found)

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until somebody has written it, and read it.

        Raises:
            TimeoutError: nobody has.
            TowerError: the server does not answer.
            tf.errors.OpError: it cannot be reached.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause_s = settings.FIRST_PAUSE_S
        while (text := self.get()) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"not written after {timeout_s} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, settings.POLL_S)
        return text

    def read(self) -> tf.Tensor:
        """Read it as part of a function; see ``text_of``."""
        with tf.device(self._device):
            return _read(tf.constant(self._number, tf.int64))


def text_of(read: Any) -> str | None:
    """The text of a note, from what ``Note.read`` has returned."""
    found: str = read.numpy().decode()
    return found[len(_SET) :] if found else None


class _Notes:
    """The functions that write and read notes on one device."""

    def __init__(self, device: str):
        number = tf.TensorSpec((), tf.int64)
        text = tf.TensorSpec((), tf.string)
        self.write: Any = traced(_write, device, number, text)
        self.read: Any = traced(_read, device, number)


_notes = functools.cache(_Notes)


def _write(number: tf.Tensor, text: tf.Tensor) -> None:
    tf.raw_ops.LookupTableInsertV2(
        table_handle=_table(), keys=[number], values=[text]
    )


def _read(number: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.LookupTableFindV2(
        table_handle=_table(), keys=number, default_value=tf.constant("")
    )


def _table() -> Any:
    return tf.raw_ops.MutableHashTableV2(
        key_dtype=tf.int64, value_dtype=tf.string, shared_name=_NOTES
    )


class Event:
    """Something that happens once, and that any process can wait for.

    Args:
        name: of the event, the same in all processes.
        device: where it is noted.
    """

    def __init__(self, name: str, device: str):
        self._note = Note(name, device)

    def set(self) -> None:
        """Let it happen; nothing if it has happened."""
        self._note.set()

    @property
    def happened(self) -> bool:
        """Whether it has happened."""
        return self._note.get() is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has happened.

        Raises:
            TimeoutError: it has not.
            tf.errors.OpError: the server cannot be reached.
        """
        self._note.wait(timeout_s)


class Table:
    """Texts by number.

    Args:
        name: the same in all processes.
        device: where it is.
        size: numbers are less than this, and at least -1.
    """

    def __init__(self, name: str, device: str, size: int):
        self._notes = {
            number: Note(f"{name}[{number}]", device)
            for number in range(-1, size)
        }

    def __getitem__(self, number: int) -> Note:
        return self._notes[number]

    def insert(self, number: int, text: str) -> None:
        """Set the text of a number."""
        self._notes[number].set(text)

    def get(self, number: int) -> str | None:
        """The text of a number, if there is one."""
        return self._notes[number].get()

    def items(self) -> dict[int, str]:
        """All that have been set."""
        found = {number: note.get() for number, note in self._notes.items()}
        return {n: text for n, text in found.items() if text is not None}
