"""Keeps ranks from writing a file of data that another one writes or reads.

A script does not know that several ranks run it. These functions work as in one
process, wherever a launcher has started several.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import psutil
import tensorflow as tf

from keras_towers.fit.context import patches
from keras_towers.jobs.rendezvous.file_store import FileStore
from keras_towers.jobs.rendezvous.separate_training import member_of_job

# How often this rank has got each file.
_calls: collections.Counter[str] = collections.Counter()


def _cache(
    original: patches.Original,
    dataset: tf.data.Dataset,
    filename: Any = "",
    *args: Any,
    **kwargs: Any,
) -> tf.data.Dataset:
    """Cache a dataset in a file of this rank's own, unless there is a whole.

    Ranks fill their caches while they train, so none can wait for another.
    """
    is_file = isinstance(filename, str | os.PathLike) and os.fspath(filename)
    member = member_of_job(certainly=True) if is_file else None
    if member and not tf.io.gfile.exists(f"{os.fspath(filename)}.index"):
        filename = f"{os.fspath(filename)}-{member.rank}-of-{member.size}"
    return original(dataset, filename, *args, **kwargs)


def _get_file(original: patches.Original, *args: Any, **kwargs: Any) -> str:
    """Get a file on one rank of a machine, for which the others wait.

    Keras would extract it on each rank, while others may read it.
    """
    if member_of_job(certainly=True) is None:
        return original(*args, **kwargs)
    place = os.getcwd(), os.environ.get("KERAS_HOME"), os.path.expanduser("~")
    call = repr((args, kwargs, place))
    _calls[call] += 1
    digest = hashlib.sha256(f"{call} {_calls[call]}".encode()).hexdigest()
    name = f"keras-towers-{os.getuid()}-{digest[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    store, me = FileStore(folder), psutil.Process()
    with contextlib.ExitStack() as stack:
        lock = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Files that a process has got which has ended may be changed since.
        with contextlib.suppress(psutil.Error, TypeError):
            pid, begun, path = store.get("got")
            is_alive = psutil.Process(pid).create_time() == begun
            if is_alive and os.path.exists(path):
                return path
        path = original(*args, **kwargs)
        store.put("got", (me.pid, me.create_time(), path))
        return path


PATCHES: tuple[patches.Patch, ...] = (
    (tf.data.Dataset, "cache", _cache),
    *(
        (module, "get_file", _get_file)
        for module in [*sys.modules.values()]
        if isinstance(module, ModuleType)
        and vars(module).get("get_file") is keras.utils.get_file
    ),
)
"""Replaces functions of TensorFlow, and of Keras where modules have them."""
