"""Saves each file once, although every rank runs the whole script.

Ranks that write one file at the same time would corrupt it. So the first rank
that saves to a path writes it, by a function of Keras or of TensorFlow. The
others wait until then, and give it their parts of the weights meanwhile. A rank
that saves to a path of its own writes it itself.

Ranks tell one another what they save and have saved (``Save``), and the first
one to claim a path writes it. How they tell it depends on where they are. In a
callback, and where each has a part of the weights, they meet. Elsewhere, they
use the job's store, where rank 0, which may be alone, waits for nobody.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from keras_towers.fit import components
from keras_towers.fit.calls import tower_call
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.joint_access import access_of
from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.system import absolute
from keras_towers.jobs.rendezvous import activity, failed_calls, watch
from keras_towers.jobs.rendezvous.rank_environment import seconds
from keras_towers.jobs.rendezvous.store import Store, store_of_job

# All functions that write a model or a dataset, as owner and name: those of
# Keras, and those through which TensorFlow's checkpoints, their managers and
# SavedModels go.
_WRITERS: tuple[tuple[object, str], ...] = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
    (keras.saving, "save_model"),
    (keras.saving, "save_weights"),
    (keras.models, "save_model"),
    (tf.train.Checkpoint, "_write"),
    (compat.saved_model, "save_and_return_nodes"),
    (tf.data.Dataset, "save"),
)
# The names of the path in these functions.
_PATHS = ("filepath", "file_prefix", "export_dir", "path")
_REMEDY = (
    "One rank writes what several save. Save the same path on every rank, or "
    "put saves of other ranks into `with kt.save_on_every_rank():`."
)

_on_every_rank: ThreadLocal[bool] = ThreadLocal()
# Whether another rank has written the files of what this thread does.
_elsewhere: ThreadLocal[bool] = ThreadLocal()


# How ranks tell what they save.
_Ranks: TypeAlias = "_RanksThatMeet | _RanksOfStore"
# The ranks of this process's job, if it has a store.
_job: _RanksOfStore | None = None


@contextlib.contextmanager
def save_on_every_rank() -> Iterator[None]:
    """Let every rank write the files that it saves in this block.

    Outside of this block, if ranks save to one path with a function of Keras or
    TensorFlow, one of them writes the files, and the others wait for it.

    Example:
        >>> with kt.save_on_every_rank():
        ...     model.save("/local/disk/of/each/machine/model.keras")
    """
    with _on_every_rank.holding(True):
        yield


def let_one_rank_write(rank: int) -> None:
    """From now on, let one rank write each file that several ranks save.

    Args:
        rank: the rank of this process.
    """
    global _job
    store = store_of_job()
    if store is not None and (_job is None or _job.rank != rank):
        _job = _RanksOfStore(rank, store)


def go_on(in_loop: bool) -> None:
    """Note that this rank begins a call; it saves no more before the call.

    Args:
        in_loop: whether such calls follow one another.
    """
    if _job is not None:
        _job.go_on(in_loop)


def _save(original: patches.Original, *args: Any, **kwargs: Any) -> object:
    """Call a saving function of Keras or TensorFlow once for all ranks."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        where = next(given[name] for name in _PATHS if name in given)
    except (TypeError, StopIteration):
        # The function reports the wrong arguments.
        return original(*args, **kwargs)
    saved = next(iter(given.values()))
    parts = _parts_of(saved)
    for part in parts:
        if isinstance(part, keras.Model):
            _refuse_apart(part)
    if isinstance(saved, tf.train.Checkpoint):
        given["options"] = _at_once(given.get("options"))
    write = functools.partial(original, *bound.args, **bound.kwargs)
    ranks: _Ranks | None = _job
    joint = access_of(*parts)
    if joint is not None:
        ranks = _RanksThatMeet(joint.rank, joint.meet)
    # In a nested call of these functions, the outer call decides. Objects that
    # are no paths are local to each rank.
    is_path = isinstance(where, str | os.PathLike)
    if _on_every_rank.get() or ranks is None or not is_path:
        return write()
    path = os.path.normpath(absolute(where))
    call = tower_call.current()
    if call is not None and call.config.transport.size > 1:
        ranks = _RanksThatMeet(ranks.rank, call.meeting.meet)
    with contextlib.ExitStack() as stack:
        # Ranks sum these when they read them, which is no work of one of them.
        for part in parts:
            if isinstance(part, compat.SyncOnReadVariable):
                read = functools.partial(tf.identity, part.read_value())
                own = {"_get_cross_replica": read}
                stack.enter_context(patches.shadowed(part, own))
        stack.enter_context(save_on_every_rank())
        stack.enter_context(thread_state.keeping_shards.holding(True))
        save = ranks.save_of(path)
        failure = _turn(ranks, save)
        if failure is None:
            return _write(ranks, save, write)
        if failure:
            raise TowerError(failure)
        if not isinstance(saved, tf.train.Checkpoint):
            return None
        # It numbers and counts its files on every rank.
        with _elsewhere.holding(True):
            return write()


def _turn(ranks: _Ranks, save: Save) -> str | None:
    """Wait until this rank can write a path, or another one has.

    Returns:
        None: this rank writes it; else why the other one could not; empty: it
        could.
    """
    for told in ranks.told(save):
        done = {s[:2]: s.failure for s in told.values() if s.is_over}
        if save[:2] in done:
            return done[save[:2]]
        # One after another: this path may be the next of the one before.
        if not done and next(iter(told)) == ranks.rank:
            break
    return None


def _write(ranks: _Ranks, save: Save, write: Callable[[], object]) -> object:
    """Write a path, and tell the other ranks how that ended."""
    failure = "it was interrupted"
    try:
        result, failure = write(), ""
        return result
    except Exception as error:
        failure = shorten(error)
        raise
    finally:
        if failure:
            failure = f"rank {ranks.rank} could not save {save.path}: {failure}"
        ranks.tell(save._replace(failure=failure))


def _parts_of(saved: Any) -> list[Any]:
    """Return the saved objects: a model, or all parts of a trackable."""
    if isinstance(saved, compat.Trackable) and not isinstance(
        saved, keras.Model
    ):
        return tf.train.TrackableView(saved).descendants()
    return [saved]


def _refuse_apart(model: keras.Model) -> None:
    strategy = components.tower_strategy_of(model)
    if strategy is not None and strategy._adoption.are_apart(model):
        raise TowerError(
            f"model {model.name!r} cannot be saved here: with sync_every, "
            "ranks have the same weights only at the end of an epoch or of "
            'the block. Save it there (save_freq="epoch"), or give fit a '
            "kt.Backup(every=...)."
        )


def _at_once(options: Any) -> Any:
    """Return checkpoint options that write in this thread.

    In other threads, ranks would write at different times, and could not agree
    on who writes.
    """
    is_later = getattr(options, "experimental_enable_async_checkpoint", False)
    if _job is None or not is_later:
        return options
    options = copy.copy(options)
    options.experimental_enable_async_checkpoint = False
    return options


def _save_numbered(
    original: patches.Original,
    checkpoint: tf.train.Checkpoint,
    file_prefix: object,
    options: Any = None,
) -> object:
    """Save like ``tf.train.Checkpoint.save``, in this thread."""
    return original(checkpoint, file_prefix, _at_once(options))


def _write_values(
    original: patches.Original,
    saver: object,
    file_prefix: object,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Write the values of a checkpoint, if no other rank has."""
    if _elsewhere.get():
        return file_prefix
    return original(saver, file_prefix, *args, **kwargs)


def _manage(original: patches.Original, *args: Any, **kwargs: Any) -> object:
    """Write or delete a file of checkpoints, unless another rank does."""
    return None if _elsewhere.get() else original(*args, **kwargs)


def _watch_preemption(
    original: patches.Original, *args: Any, **kwargs: Any
) -> None:
    """Make a handler of TensorFlow's, which knows no ranks of other engines."""
    strategy = components.active_strategy()
    if _job is not None or (strategy and strategy._config.job.size > 1):
        raise TowerError(
            "PreemptionCheckpointHandler cannot agree with other ranks on a "
            "step after which all save and end. Give fit a kt.Backup instead, "
            "or save a tf.train.CheckpointManager in your loop."
        )
    original(*args, **kwargs)


_CHECKPOINTS = compat.checkpoint_management
PATCHES: tuple[patches.Patch, ...] = (
    *((owner, name, _save) for owner, name in _WRITERS),
    (tf.train.Checkpoint, "save", _save_numbered),
    (compat.TrackableSaver, "save", _write_values),
    (_CHECKPOINTS, "update_checkpoint_state_internal", _manage),
    (_CHECKPOINTS, "_delete_file_if_exists", _manage),
    (
        tf.distribute.experimental.PreemptionCheckpointHandler,
        "__init__",
        _watch_preemption,
    ),
)
"""Replaces the writers of Keras and TensorFlow, and one that cannot work."""


class Save(NamedTuple):
    """What a rank tells the others of a path that it saves.

    Attributes:
        path: the path; empty: it saves no more before its next call.
        number: how often the rank has saved it before, since the last call.
        failure: None: it is about to write it; empty: it has; else why it could
            not.

    The first two are equal on all ranks that save the same.
    """

    path: str
    number: int = 0
    failure: str | None = None

    def __str__(self) -> str:
        return f"{'has saved' if self.is_over else 'saves'} {self.path!r}"

    @property
    def is_over(self) -> bool:
        return self.failure is not None


class _RanksThatMeet:
    """Ranks that meet, and exchange which paths they save.

    Args:
        rank: the rank of this process.
        meet: tells what this rank does; returns what each of them does.
    """

    save_of = Save

    def __init__(self, rank: int, meet: Callable[[Save], list[object]]):
        self.rank = rank
        self._meet = meet

    def tell(self, save: Save) -> dict[int, Save]:
        """Tell the others of a save; return what they tell, by their ranks."""
        all_do = enumerate(self._meet(save))
        return {r: Save(*does) for r, does in all_do if isinstance(does, tuple)}

    def told(self, save: Save) -> Iterator[dict[int, Save]]:
        """Yield what ranks tell, in one order, while this one waits to save."""
        while True:
            yield self.tell(save)


class _RanksOfStore:
    """Ranks that tell what they save between two calls in a store.

    Rank 0 lists there what it has saved, and at last that it goes on. Only then
    can another rank have a path of its own: the first one to claim it.
    """

    def __init__(self, rank: int, store: Store):
        self.rank = rank
        self._store = store
        self._call = -1
        if rank == 0:
            atexit.register(self._go_on_at_exit)

    def _begin(self) -> None:
        """Begin another list if ranks have made a call since."""
        if self._call != failed_calls.calls.number:
            self._call = failed_calls.calls.number
            self._saved: collections.Counter[str] = collections.Counter()
            # What rank 0 has listed, as far as this rank has told or read it.
            self._list: list[Save] = []

    def go_on(self, in_loop: bool) -> None:
        """On rank 0, announce that it saves no more before its next call.

        In a loop of short calls it does so only if it has saved.
        """
        self._begin()
        if self.rank == 0 and (self._saved or not in_loop):
            self.tell(Save(""))

    def _go_on_at_exit(self) -> None:
        # Python sets it before it ends with an error.
        if getattr(sys, "last_value", None) is None:
            self.go_on(in_loop=False)

    def save_of(self, path: str) -> Save:
        self._begin()
        self._saved[path] += 1
        return Save(path, self._saved[path])

    def tell(self, save: Save) -> None:
        key = self._key_of(len(self._list) if self.rank == 0 else save[:2])
        if self.rank == 0:
            self._list.append(save)
        # The store may be gone.
        with contextlib.suppress(OSError):
            self._store.put(key, save)

    def told(self, save: Save) -> Iterator[dict[int, Save]]:
        if self.rank == 0:
            yield {0: save}
        for index in itertools.count():
            if index == len(self._list):
                told = self._hear(0, save.path, self._key_of(index))
                if told is None:
                    break
                self._list.append(told)
            if not self._list[index].path:
                break
            yield {0: self._list[index]}
        key, writer = self._key_of(save[:2]), self.rank
        # The store may have been beside rank 0, and have ended with it.
        with contextlib.suppress(OSError):
            writer = self._store.setdefault(f"writer-{key}", writer)
        yield {writer: save}
        told = self._hear(writer, save.path, key)
        failure = f"rank {writer} has not saved {save.path}"
        yield {writer: told or save._replace(failure=failure)}

    def _key_of(self, told: object) -> str:
        """Return the key of a message of rank 0, by its index, or of a save."""
        named = repr((self._call, told)).encode()
        return f"saves-{hashlib.sha256(named).hexdigest()[:16]}"

    def _hear(self, rank: int, path: str, key: str) -> Save | None:
        """Wait for a message of a rank; None if the rank no longer sends it."""
        limit_s = seconds(
            settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S
        )
        given_up = threading.Event()
        waits = f"waits for rank {rank} to save {path}"
        try:
            with (
                activity.within(f"a save of {path}", waits=True),
                activity.doing(f"{waits} ({_REMEDY})"),
                activity.this_rank.exchanges.running(activity.SAVE),
                activity.refusing_by(TowerError),
            ):
                told = watch.wait_for_ranks(
                    lambda: self._store.wait(key, limit_s or math.inf, given_up)
                )
                return Save(*json.loads(told))
        except TimeoutError:
            raise TowerError(
                f"rank {self.rank} has waited {limit_s} s: it {waits}. "
                f"{_REMEDY}"
            ) from None
        except (TowerError, OSError):
            # It has ended, or waits in something else for this rank.
            return None
        finally:
            given_up.set()
