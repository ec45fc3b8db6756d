"""Saving each file once, although every rank runs the whole script.

Ranks that write one file at a time would spoil it. So the first rank that saves
to a path writes it, whether by a function of Keras or of TensorFlow. The others
wait until it has written the same path, and give it their parts of the weights
meanwhile. A path of one rank is that rank's. How ranks find out depends on
where they are: in a callback, in which all ranks meet; with weights in parts,
where they serve rank 0's reads; or else by the job's store, for which rank 0,
which may be alone, waits for nobody.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import hashlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import keras
import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.errors import TowerError, shorten
from keras_towers.fit import components
from keras_towers.fit.calls import tower_call
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.joint_access import access_of
from keras_towers.rendezvous import activity, failed_calls, rank_checks, watch
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.rendezvous.store import Store, store_of_job, wait_for
from keras_towers.system import absolute

# All functions that write a model, as owner and name: those of Keras, and those
# through which TensorFlow's checkpoints, their managers and SavedModels go.
_WRITERS: tuple[tuple[object, str], ...] = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
    (keras.export.ExportArchive, "write_out"),
    (keras.saving, "save_model"),
    (keras.saving, "save_weights"),
    (keras.models, "save_model"),
    (tf.train.Checkpoint, "_write"),
    (compat.saved_model, "save_and_return_nodes"),
)
# What these functions call the path.
_PATHS = ("filepath", "file_prefix", "export_dir")
_REMEDY = (
    "One rank writes what several save. Save the same path on every rank, or "
    "put saves of other ranks into `with kt.save_on_every_rank():`."
)

_on_every_rank: ThreadLocal[bool] = ThreadLocal()
# Whether another rank writes the files of what this thread does.
_elsewhere: ThreadLocal[bool] = ThreadLocal()


class _Ranks(Protocol):
    """The ranks of a job, where one of them has saved."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    def writer(self, path: str) -> int:
        """Return the rank that writes a path which this rank saves."""
        ...

    def end_save(self, path: str, failure: str) -> str:
        """Tell, as the writer, how a save has ended; or else wait for that.

        Args:
            path: what is saved.
            failure: why it could not be; empty: it could.

        Returns:
            The failure of the writer.
        """
        ...


# The key under which rank 0 says how many calls it has begun; and all of them.
_LEFT, _AFTER_ALL = "left-saves", 2**62
_T = TypeVar("_T")

# Those of this process's job, if it has a store.
_job: _RanksOfStore | None = None


@contextlib.contextmanager
def save_on_every_rank() -> Iterator[None]:
    """Let every rank write the files that it saves in this block.

    Without this block, only the first rank of a job that saves to a path writes
    it, by a function of Keras or TensorFlow, and the others wait until then.

    Example:
        >>> with kt.save_on_every_rank():
        ...     model.save("/local/disk/of/each/machine/model.keras")
    """
    with _on_every_rank.holding(True):
        yield


def leave(in_loop: bool) -> None:
    """Note that this rank makes a call, and saves nothing before it any more.

    Args:
        in_loop: whether such calls follow one another.
    """
    if _job is not None:
        _job.leave(in_loop)


def let_rank_0_write(rank: int) -> None:
    """Let one rank of a job write what several save, from now on.

    Args:
        rank: the rank of this process.
    """
    global _job
    store = store_of_job()
    if store is not None and (_job is None or _job.rank != rank):
        _job = _RanksOfStore(rank, store)


def _save(
    original: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Save like a function of Keras, but once for all ranks."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        where = next(given[name] for name in _PATHS if name in given)
    except (TypeError, StopIteration):
        # The function reports the wrong arguments.
        return original(*args, **kwargs)
    first = next(iter(bound.arguments.values()))
    joint = None
    for model in _models_of(first):
        _refuse_apart(model)
        joint = joint or access_of(model)
    ranks: _Ranks | None = joint or _job
    # In a nested call of these functions, the outer call decides. Objects that
    # are no paths are local to each rank.
    is_path = isinstance(where, str | os.PathLike)
    if _on_every_rank.get() or ranks is None or not is_path:
        return original(*args, **kwargs)
    path = os.path.normpath(absolute(where))
    call = tower_call.current()
    if call is not None and call.config.transport.size > 1:
        ranks = _RanksInCallback(call)
    with save_on_every_rank(), thread_state.keeping_parts.holding(True):
        writer = ranks.writer(path)
        if writer == ranks.rank:
            failure = "it was interrupted"
            try:
                result, failure = original(*args, **kwargs), ""
                return result
            except Exception as error:
                failure = shorten(error)
                raise
            finally:
                ranks.end_save(path, failure)
        failure = ranks.end_save(path, "")
        if failure:
            raise TowerError(f"rank {writer} could not save {path}: {failure}")
        return _written_elsewhere(first, given)


def _models_of(saved: object) -> list[keras.Model]:
    """Return the models that are saved as a part of something, or as it."""
    parts = [saved]
    if isinstance(saved, tf.train.Checkpoint):
        parts = compat.parts_of_checkpoint(saved)
    return [part for part in parts if isinstance(part, keras.Model)]


def _written_elsewhere(saved: object, given: Mapping[str, Any]) -> object:
    """Do and return what a function does but write, as another rank does."""
    if not isinstance(saved, tf.train.Checkpoint):
        return None
    prefix = os.fspath(given["file_prefix"])
    options = given.get("options")
    callbacks = getattr(options, "experimental_write_callbacks", None) or ()
    with _elsewhere.holding(True):
        for callback in callbacks:
            # Those of TensorFlow count and number checkpoints.
            if callback.__module__.startswith("tensorflow."):
                callback(prefix)
    return prefix


def _unless_elsewhere(
    original: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Write or delete a file, if not another rank does."""
    return None if _elsewhere.get() else original(*args, **kwargs)


def _refuse_apart(model: keras.Model) -> None:
    strategy = components.tower_strategy_of(model)
    if strategy is not None and strategy._adoption.are_apart(model):
        raise TowerError(
            f"model {model.name!r} cannot be saved here: with sync_every, "
            "ranks have the same weights only at the end of an epoch or of "
            'the block. Save it there (save_freq="epoch"), or give fit a '
            "kt.Backup(every=...)."
        )


_CHECKPOINTS = compat.checkpoint_management
PATCHES: tuple[patches.Patch, ...] = (
    *((owner, name, _save) for owner, name in _WRITERS),
    (_CHECKPOINTS, "update_checkpoint_state_internal", _unless_elsewhere),
    (_CHECKPOINTS, "_delete_file_if_exists", _unless_elsewhere),
)
"""Replaces the writers of Keras and TensorFlow."""


class _RanksInCallback:
    """Ranks that save in a callback of a call, where they can meet."""

    def __init__(self, call: TowerCall):
        self._call = call
        self._size: int = call.config.transport.size
        self.rank: int = call.config.transport.rank
        # Those that save the same.
        self._ranks: Sequence[int] = ()

    def writer(self, path: str) -> int:
        self._ranks = self._call.meet(f"save {path}", None)
        return self._ranks[0]

    def end_save(self, path: str, failure: str) -> str:
        if len(self._ranks) == 1:
            return failure
        # Meanwhile the other ranks take part in the reads of the first.
        ends, saved = f"save {path} to its end", f"have saved {path}"
        while self._ranks[0] not in self._call.meet(ends, None):
            pass
        if len(self._ranks) < self._size:
            # The others do something else, so that these only compare.
            done = f"could not save {path}" if failure else saved
            ranks = self._call.meet(done, None)
            return "" if self._ranks[0] in ranks else "its error says why"
        transport = self._call.config.transport
        return rank_checks.gather(transport, failure, "ends a save")[0]


class _RanksOfStore:
    """Ranks that learn from the store what rank 0 has saved."""

    def __init__(self, rank: int, store: Store):
        self.rank = rank
        self._store = store
        # How often each path was saved since the last call of all ranks.
        self._counts: collections.Counter[tuple[str, int]] = (
            collections.Counter()
        )
        if rank == 0:
            atexit.register(self._leave, _AFTER_ALL)

    def leave(self, in_loop: bool) -> None:
        """Tell, as rank 0, that it makes the next call and saves no more.

        Args:
            in_loop: whether calls follow one another, with saves rarely.
        """
        number = failed_calls.calls.number
        saved = any(at == number - 1 for _, at in self._counts)
        if self.rank == 0 and (saved or not in_loop):
            self._leave(number)

    def _leave(self, number: int) -> None:
        # The store may be gone.
        with contextlib.suppress(OSError):
            self._store.put(_LEFT, number)

    def writer(self, path: str) -> int:
        position = path, failed_calls.calls.number
        self._counts[position] += 1
        if self.rank == 0:
            return 0
        key, number = self._key(path), failed_calls.calls.number

        def read() -> int | None:
            if self._store.get(key) is not None:
                return 0
            if (self._store.get(_LEFT) or 0) <= number:
                return None
            # Rank 0 may have done so just before it left.
            return 0 if self._store.get(key) is not None else -1

        if self._wait(path, read, ended=-1) == 0:
            return 0
        return int(self._store.setdefault(f"writer-{key}", self.rank))

    def end_save(self, path: str, failure: str) -> str:
        key = self._key(path)
        writer = self._store.get(f"writer-{key}") or 0
        if self.rank == writer:
            self._store.put(key, failure)
            return failure
        return self._wait(path, lambda: self._store.get(key), ended="it ended")

    def _key(self, path: str) -> str:
        position = path, failed_calls.calls.number
        named = "\n".join(map(str, (*position, self._counts[position])))
        digest = hashlib.sha256(named.encode(errors="surrogateescape"))
        return f"saved-{digest.hexdigest()[:16]}"

    def _wait(self, path: str, read: Callable[[], _T | None], ended: _T) -> _T:
        """Wait for another rank; return ``ended`` if it saves no more."""
        limit_s = seconds(
            settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S
        )
        has_ended = threading.Event()

        def look() -> _T | None:
            if has_ended.is_set():
                return ended
            try:
                return read()
            except OSError:
                # The store was beside rank 0, and has ended with it.
                return ended

        waits = f"waits for rank 0 to save {path}"
        try:
            with (
                activity.within(f"a save of {path}", waits=True),
                activity.doing(f"{waits} ({_REMEDY})"),
                activity.exchanges.running(activity.SAVE, is_counted=False),
            ):
                return watch.wait_for_ranks(
                    lambda: wait_for(look, limit_s or None)
                )
        except TimeoutError:
            raise TowerError(
                f"rank {self.rank} has waited {limit_s} s: it {waits}. "
                f"{_REMEDY}"
            ) from None
        except (watch.RanksEnded, TowerError):
            # It has ended, or waits in something else for this rank.
            return ended
        finally:
            has_ended.set()
