"""Saving once where every rank runs the whole script.

Under ``keras-towers run --strategy NAME`` a script that knows of no ranks calls
``model.save("model.keras")`` on all of them, at one path. Rank 0 writes the
file, and the others wait until it is there. Before rank 0 writes at a path
again it waits for the others, which may still read what is there; otherwise it
waits for nobody, since it may be the only one that saves.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_towers.errors import TowerError
from keras_towers.rendezvous import Rendezvous

_POLL_S = 0.05
# Everything in Keras that writes a model, and its argument that says where.
_WRITERS: tuple[tuple[Any, str], ...] = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
    (keras.export.ExportArchive, "write_out"),
    (keras.saving, "save_model"),
    (keras.saving, "save_weights"),
    (keras.models, "save_model"),
)

_active = False
_on_every_rank: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "on_every_rank", default=False
)


@contextlib.contextmanager
def every_rank() -> Iterator[None]:
    """Let every rank write what it saves in this block.

    For scripts that run with ``keras-towers run --strategy``, in which
    otherwise only rank 0 writes what Keras saves at a path that is the same on
    all ranks. Elsewhere every rank writes anyway.

    Example:
        >>> with kt.every_rank():
        ...     model.save("/local/disk/of/each/machine/model.keras")
    """
    token = _on_every_rank.set(True)
    try:
        yield
    finally:
        _on_every_rank.reset(token)


@contextlib.contextmanager
def once(
    rank: int,
    size: int,
    server: Rendezvous,
    mark: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Let only rank 0 write what Keras saves in this block.

    Where ranks save at different paths each writes its own.

    Args:
        rank: this process.
        size: number of processes.
        server: the job's rendezvous server.
        mark: told what this rank waits for.
    """
    saves = _Saves(rank, size, server, mark)
    with contextlib.ExitStack() as undo:
        undo.callback(_set_active, _active)
        _set_active(True)
        for owner, name in _WRITERS:
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, saves.of(original))
        yield


def is_once() -> bool:
    """Whether rank 0 alone writes what all ranks save."""
    return _active


def _set_active(value: bool) -> None:
    global _active
    _active = value


class _Saves:
    """What the ranks save, by number: the n-th of each is one and the same."""

    def __init__(
        self,
        rank: int,
        size: int,
        server: Rendezvous,
        mark: Callable[[str], None],
    ):
        self._rank = rank
        self._size = size
        self._written: set[str] = set()
        self._server = server
        self._mark = mark
        self._number = 0

    def of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that saves as ``original`` does, once."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            try:
                where = signature.bind(*args, **kwargs).arguments["filepath"]
            except (TypeError, KeyError):
                where = None  # Keras says what is missing.
            # One of these may call another one.
            known = isinstance(where, str | os.PathLike)
            if _on_every_rank.get() or not known:
                return original(*args, **kwargs)
            path = os.path.abspath(os.fspath(where))
            with every_rank():
                return self._save(path, lambda: original(*args, **kwargs))

        return save

    def _save(self, path: str, write: Callable[[], Any]) -> Any:
        self._number += 1
        if self._rank == 0:
            return self._write(path, write)
        key = f"saved-{self._number}"
        self._server.put(f"saves-{self._rank}", str(self._number).encode())
        self._mark(f"the saving of {path} by rank 0")
        while (told := self._server.get(key)) is None:
            time.sleep(_POLL_S)
        self._mark("")
        there, error = json.loads(told)
        if there != path:
            return write()
        if error is not None:
            raise TowerError(f"rank 0 could not save {path}: {error}")
        return None

    def _write(self, path: str, write: Callable[[], Any]) -> Any:
        if path in self._written:
            self._mark(f"the saving of {path} again")
            for rank in range(1, self._size):
                while self._number > int(
                    self._server.get(f"saves-{rank}") or 0
                ):
                    time.sleep(_POLL_S)
            self._mark("")
        self._written.add(path)
        error: str | None = "it was interrupted"
        try:
            result, error = write(), None
            return result
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            told = json.dumps([path, error]).encode()
            self._server.put(f"saved-{self._number}", told)
