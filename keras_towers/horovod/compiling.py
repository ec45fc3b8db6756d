"""Starting and ending Horovod, which also changes what ``compile`` does."""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow as hvd

from keras_towers.dropin.compiling import replace, restore
from keras_towers.transport.horovod import HorovodTransport, connect


@functools.wraps(hvd.init)
def init(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``init``; ranks that any launcher started find one another."""
    connect(hvd, *args, **kwargs)
    HorovodTransport()  # Starts the stall watch.
    replace(hvd.is_initialized)


@functools.wraps(hvd.shutdown)
def shutdown() -> None:
    """Horovod's ``shutdown``; also restores Keras to before ``init``."""
    restore()
    if hvd.is_initialized():
        HorovodTransport().disconnect()


def prepare_process() -> None:
    """Do what ``init`` does besides: maybe Horovod's own was called."""
    HorovodTransport()
    replace(hvd.is_initialized)
