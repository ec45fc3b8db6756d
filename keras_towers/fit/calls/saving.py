"""Saving each file once, by rank 0, although every rank runs the whole script.

Ranks that write one file at a time would spoil it. Rank 0 writes what it saves,
with others or alone. The other ranks wait until it has written the same path,
and give it their parts of the weights meanwhile. How they wait depends on where
they are: in a callback, in which all ranks meet; with weights in parts, where
they serve rank 0's reads; or else by the job's store, for which rank 0, which
may be alone, waits for nobody.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import inspect
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import keras

from keras_towers import settings
from keras_towers.errors import TowerError, shorten
from keras_towers.fit import components
from keras_towers.fit.calls import tower_call
from keras_towers.fit.calls.tower_call import TowerCall
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.joint_access import access_of
from keras_towers.rendezvous import activity, failed_calls, rank_checks, watch
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.rendezvous.store import Store, store_of_job
from keras_towers.system import absolute

# All functions of Keras that write a model, as owner and name.
_WRITERS: tuple[tuple[object, str], ...] = (
    (keras.Model, "save"),
    (keras.Model, "save_weights"),
    (keras.Model, "export"),
    (keras.export.ExportArchive, "write_out"),
    (keras.saving, "save_model"),
    (keras.saving, "save_weights"),
    (keras.models, "save_model"),
)
_REMEDY = (
    "Only rank 0 writes what Keras saves. Save the same path on every rank, or "
    "on rank 0 alone, or put saves of other ranks into "
    "`with kt.save_on_every_rank():`."
)

_on_every_rank: ThreadLocal[bool] = ThreadLocal()


class _Ranks(Protocol):
    """The ranks of a job, where one of them has saved."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        ...

    def end_save(self, path: str, failure: str) -> str:
        """Tell, as rank 0, how a save has ended; or else wait for that.

        Args:
            path: what rank 0 saves.
            failure: why it could not; empty: it could.

        Returns:
            The failure of rank 0.
        """
        ...


# Those of this process's job, if it has a store.
_job: _RanksOfStore | None = None


@contextlib.contextmanager
def save_on_every_rank() -> Iterator[None]:
    """Let every rank write the files that it saves in this block.

    Without this block, only rank 0 of a job writes the files that Keras saves,
    and the other ranks wait until rank 0 has written the same path.

    Example:
        >>> with kt.save_on_every_rank():
        ...     model.save("/local/disk/of/each/machine/model.keras")
    """
    with _on_every_rank.holding(True):
        yield


def let_rank_0_write(rank: int) -> None:
    """Let only rank 0 of a job write what Keras saves, from now on.

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
        where = bound.arguments["filepath"]
    except (TypeError, KeyError):
        # Keras reports the wrong arguments.
        return original(*args, **kwargs)
    first = next(iter(bound.arguments.values()))
    joint = None
    if isinstance(first, keras.Model):
        _refuse_apart(first)
        joint = access_of(first)
    ranks: _Ranks | None = joint or _job
    # In a nested call of these functions, the outer call decides. Objects that
    # are no paths are local to each rank.
    is_path = isinstance(where, str | os.PathLike)
    if _on_every_rank.get() or ranks is None or not is_path:
        return original(*args, **kwargs)
    path = os.path.normpath(absolute(where))
    call = tower_call.current()
    with save_on_every_rank(), thread_state.keeping_parts.holding(True):
        if call is not None and call.config.transport.size > 1:
            ranks = _RanksInCallback(call)
            if not call.meet(f"save {path}", None):
                if ranks.rank == 0:
                    return original(*args, **kwargs)
                raise TowerError(
                    f"rank {ranks.rank} saves {path} in a callback, and rank 0 "
                    f"does not. {_REMEDY}"
                )
        if ranks.rank == 0:
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
            raise TowerError(f"rank 0 could not save {path}: {failure}")
        return None


def _refuse_apart(model: keras.Model) -> None:
    strategy = components.tower_strategy_of(model)
    if strategy is not None and strategy._adoption.are_apart(model):
        raise TowerError(
            f"model {model.name!r} cannot be saved here: with sync_every, "
            "ranks have the same weights only at the end of an epoch or of "
            'the block. Save it there (save_freq="epoch"), or give fit a '
            "kt.Backup(every=...)."
        )


PATCHES: tuple[patches.Patch, ...] = tuple(
    (owner, name, _save) for owner, name in _WRITERS
)
"""Replaces Keras's writers."""


class _RanksInCallback:
    """Ranks that all save in a callback of a call, where they can meet."""

    def __init__(self, call: TowerCall):
        self._call = call
        self.rank: int = call.config.transport.rank

    def end_save(self, path: str, failure: str) -> str:
        # Meanwhile ranks other than 0 take part in its reads.
        while not self._call.meet(f"save {path} to its end", None):
            pass
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

    def end_save(self, path: str, failure: str) -> str:
        position = path, failed_calls.calls.number
        self._counts[position] += 1
        named = "\n".join(map(str, (*position, self._counts[position])))
        digest = hashlib.sha256(named.encode(errors="surrogateescape"))
        key = f"saved-{digest.hexdigest()[:16]}"
        if self.rank == 0:
            self._store.put(key, failure)
            return failure
        limit_s = seconds(
            settings.ENV_STALL_SHUTDOWN, settings.STALL_SHUTDOWN_S
        )
        given_up = threading.Event()
        waits = f"waits for rank 0 to save {path}"
        try:
            with (
                activity.within(f"a save of {path}", waits=True),
                activity.doing(f"{waits} ({_REMEDY})"),
                activity.exchanges.running(activity.SAVE, is_counted=False),
            ):
                saved = watch.wait_for_ranks(
                    lambda: self._store.wait(key, limit_s or math.inf, given_up)
                )
                return str(json.loads(saved))
        except (TimeoutError, watch.RanksEnded) as error:
            why = f"{error}, and rank {self.rank} {waits}"
            if isinstance(error, TimeoutError):
                why = f"rank {self.rank} has waited {limit_s} s: it {waits}"
            raise TowerError(f"{why}. {_REMEDY}") from None
        finally:
            given_up.set()
