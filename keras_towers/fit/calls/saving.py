"""Saving each file once, although every rank runs the whole script.

Under ``keras-towers run --strategy NAME`` a script written for one process
calls ``model.save("model.keras")`` on all ranks, with the same path. Rank 0
writes the file, and the other ranks wait until it is written. Before rank 0
overwrites a file it waits for ranks that may still be reading it; but only for
a limited time, since it may be the only rank that saves. If rank 0 goes on to
save other files, the first of the ranks that wait for a file writes it. Whoever
writes has claimed the file: no two ranks write it at the same time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_towers import settings
from keras_towers.errors import TowerError, shorten
from keras_towers.fit.calls import tower_call
from keras_towers.fit.context import patches
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.joint_access import (
    JointAccess,
    access_of,
)
from keras_towers.rendezvous.liveness import wait_loop
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.rendezvous.store import Store, wait_for
from keras_towers.system import absolute

logger: logging.Logger = logging.getLogger("keras_towers")

# How many saves rank 0 has ended.
_TOTAL = "saves"
# All functions of Keras that write a model, as owner and name.
_WRITERS: tuple[tuple[Any, str], ...] = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
    (keras.export.ExportArchive, "write_out"),
    (keras.saving, "save_model"),
    (keras.saving, "save_weights"),
    (keras.models, "save_model"),
)
_REMEDY = "Put saves of one rank into `with kt.save_on_every_rank():`."

_rank_0_saves = False
_on_every_rank: ThreadLocal[bool] = ThreadLocal()


@contextlib.contextmanager
def save_on_every_rank() -> Iterator[None]:
    """Let every rank write the files that it saves in this block.

    Use it in scripts that run with ``keras-towers run --strategy``. There, if
    all ranks save to the same path, only rank 0 writes. Elsewhere every rank
    writes anyway.

    Example:
        >>> with kt.save_on_every_rank():
        ...     model.save("/local/disk/of/each/machine/model.keras")
    """
    with _on_every_rank.holding(True):
        yield


@contextlib.contextmanager
def on_rank_0_only(rank: int, size: int, store: Store) -> Iterator[None]:
    """Let only rank 0 write the files that Keras saves in this block."""
    global _rank_0_saves
    save = _Saves(rank, size, store).save
    _rank_0_saves, before = True, _rank_0_saves
    try:
        with patches.replaced(*((owner, n, save) for owner, n in _WRITERS)):
            yield
    finally:
        _rank_0_saves = before


def rank_0_saves() -> bool:
    """Whether only rank 0 writes the files that all ranks save."""
    return _rank_0_saves


class _Saves:
    """The files that this rank saves, with a count for each path."""

    def __init__(self, rank: int, size: int, store: Store):
        self._rank = rank
        self._others = range(1, size)
        self._store = store
        self._counts: collections.Counter[str] = collections.Counter()
        # Ranks that do not save at a path where rank 0 does.
        self._absent: set[tuple[int, str]] = set()

    def save(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Save like ``original``, but once for all ranks."""
        try:
            bound = inspect.signature(original).bind(*args, **kwargs)
            where = bound.arguments["filepath"]
        except (TypeError, KeyError):
            # Keras reports the wrong arguments.
            return original(*args, **kwargs)
        # In a nested call of these functions, the outer call decides.
        known = isinstance(where, str | os.PathLike)
        if _on_every_rank.get() or not known:
            return original(*args, **kwargs)
        path = os.path.normpath(absolute(where))
        call = tower_call.current()
        if call is not None and not call.meet(f"save {path}", None):
            # In a callback, of some ranks only.
            with save_on_every_rank():
                return original(*args, **kwargs)
        model = _model_of(bound)
        joint = None if model is None else access_of(model)
        if model is not None and joint is not None:

            def write() -> Any:
                with save_on_every_rank():
                    return original(*args, **kwargs)

            return self._save_together(joint, path, write)
        self._counts[path] += 1
        act = self._wait_or_write if self._rank else self._write
        with save_on_every_rank():
            return act(
                path, self._counts[path], lambda: original(*args, **kwargs)
            )

    def _save_together(
        self, joint: JointAccess, path: str, write: Callable[[], Any]
    ) -> Any:
        """Write on rank 0 what the others have rows of, which serve it."""
        failure, result = "", None
        if self._rank == 0:
            try:
                result = write()
            except Exception as error:
                failure = shorten(error)
                raise
            finally:
                joint.serve(f"saves {path}", failure)
            return result
        failure = joint.serve(f"saves {path}")
        if failure:
            raise TowerError(f"{path} was not saved: {failure}")
        return None

    def _write(self, path: str, count: int, write: Callable[[], Any]) -> Any:
        """Write as rank 0."""
        if count > 1:
            self._wait_for_readers(path, count)
        self._store.put(_key("saves", path, count), True)
        writer = self._claim(path, count)
        if writer != self._rank:
            logger.warning(
                "rank %d has begun to save %s, since rank 0 saved other files "
                "before: rank 0 saves it again behind rank %d. %s",
                writer,
                path,
                writer,
                _REMEDY,
            )
            saved, limit_s = _key("saved", path, count), _limit_s()
            try:
                wait_for(functools.partial(self._store.get, saved), limit_s)
            except TimeoutError:
                raise TowerError(
                    f"rank 0 has waited {limit_s} s for rank {writer} to save "
                    f"{path}. {_REMEDY}"
                ) from None
        try:
            return self._write_for_all(path, count, write)
        finally:
            self._store.put(_TOTAL, self._counts.total())

    def _claim(self, path: str, count: int) -> int:
        """Return which rank writes: this one, if it is the first to ask."""
        key = _key("writer", path, count)
        return int(self._store.setdefault(key, self._rank))

    def _write_for_all(
        self, path: str, count: int, write: Callable[[], Any]
    ) -> Any:
        """Write, and tell the ranks that wait for it."""
        error: str | None = "it was interrupted"
        try:
            result, error = write(), None
            return result
        except Exception as failure:
            error = shorten(failure)
            raise
        finally:
            outcome = {"rank": self._rank, "error": error}
            self._store.put(_key("saved", path, count), outcome)

    def _wait_for_readers(self, path: str, count: int) -> None:
        """Wait for ranks that may still be reading the previous file."""
        until = time.monotonic() + settings.SAVE_WAIT_S
        for rank in self._others:
            if (rank, path) in self._absent:
                continue
            left_s = until - time.monotonic()
            try:
                read = functools.partial(
                    self._store.get, _key(f"saves-{rank}", path, count)
                )
                wait_for(read, left_s)
            except TimeoutError:
                self._absent.add((rank, path))
                logger.warning(
                    "rank %d does not save %s again, but rank 0 does, and no "
                    "longer waits for rank %d. %s",
                    rank,
                    path,
                    rank,
                    _REMEDY,
                )

    def _wait_or_write(
        self, path: str, count: int, write: Callable[[], Any]
    ) -> Any:
        """Wait for rank 0 to write a file, or write it if rank 0 does not."""
        self._store.put(_key(f"saves-{self._rank}", path, count), True)
        since: float | None = None
        limit_s = _limit_s()
        for waited_s in wait_loop(limit_s, settings.POLL_S):
            if waited_s:
                logger.warning(
                    "rank %d has waited %.0f s for rank 0 to save %s. %s",
                    self._rank,
                    waited_s,
                    path,
                    _REMEDY,
                )
            outcome = self._store.get(_key("saved", path, count))
            if outcome is not None:
                if outcome["error"] is not None:
                    raise TowerError(
                        f"rank {outcome['rank']} could not save {path}: "
                        f"{outcome['error']}"
                    )
                return None
            if not self._store.get(_key("saves", path, count)):
                # Rank 0 is past this save if it has ended enough other saves.
                done = self._store.get(_TOTAL) or 0
                if done >= self._counts.total():
                    since = since or time.monotonic()
                    if (
                        time.monotonic() > since + settings.SAVE_OWN_S
                        and self._claim(path, count) == self._rank
                    ):
                        return self._write_for_all(path, count, write)
        raise TowerError(
            f"rank {self._rank} has waited {limit_s} s for rank 0 to save "
            f"{path}. {_REMEDY}"
        )


def _model_of(bound: inspect.BoundArguments) -> keras.Model | None:
    """Return the model that a function of Keras writes, if it gets one."""
    first = next(iter(bound.arguments.values()))
    return first if isinstance(first, keras.Model) else None


def _limit_s() -> float | None:
    """The seconds for which a rank waits for another; None: for ever."""
    limit_s = seconds(settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S)
    return limit_s or None


def _key(what: str, path: str, count: int) -> str:
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()
    return f"{what}-{digest[:16]}-{count}"
