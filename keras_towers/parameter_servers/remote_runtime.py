"""Functions and devices of TensorFlow's runtime on other processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait

import tensorflow as tf

from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import ConcreteFunction
from keras_towers.foundation.system import InThread
from keras_towers.jobs.rendezvous.listening import reachable_only_at

# Otherwise a call to a dead server waits until the server is restarted.
_FAIL_FAST = ("GRPC_FAIL_FAST", "use_caller")


def join(jobs: Mapping[str, Mapping[int, str]], job: str, index: int) -> None:
    """Make this process a task of TensorFlow's runtime.

    Call it before TensorFlow starts: later, assignments to existing variables
    would be lost.
    """
    if compat.has_started():
        raise TowerError(
            f"TensorFlow started before this process became {job} {index} of "
            "its job, so models, variables and tensors created since would no "
            "longer work. Create the strategy before any model. Or start each "
            "task with `keras-towers run SCRIPT`, which connects before the "
            "script begins."
        )
    os.environ.setdefault(*_FAIL_FAST)
    root = logging.getLogger()
    handlers = list(root.handlers)
    with reachable_only_at(jobs[job][index]):
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name=job, task_index=index
        )
        # Starts TensorFlow, and with it the server.
        tf.config.list_logical_devices()
    # TensorFlow configures the root logger if the program has not done so.
    root.handlers[:] = handlers


def device_of(index: int) -> str:
    """Return the full name of a parameter server's device."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


class RunningFunction:
    """A concrete function that runs in a thread, and may block."""

    def __init__(
        self, function: ConcreteFunction, arguments: Sequence[tf.Tensor] = ()
    ):
        self._manager = manager = compat.CancellationManager()

        def run() -> list[tf.Tensor]:
            return compat.call_cancellable(function, arguments, manager) or []

        # The main thread stays in Python, where it handles signals.
        self._outputs: InThread[list[tf.Tensor]] = InThread(run)

    def wait(
        self,
        timeout_s: float = math.inf,
        poll: Callable[[], None] = lambda: None,
    ) -> list[tf.Tensor]:
        """Wait for the function's outputs, and cancel it if that fails.

        Args:
            timeout_s: seconds to wait.
            poll: called every ``settings.LIVENESS_CHECK_S`` seconds; an error
                that it raises ends the wait.

        Raises:
            TimeoutError: the function has not ended in time.
        """
        until = time.monotonic() + timeout_s
        try:
            while (left_s := until - time.monotonic()) > 0:
                wait([self._outputs], min(settings.LIVENESS_CHECK_S, left_s))
                if self._outputs.done():
                    return self._outputs.result()
                poll()
        finally:
            self.cancel()
        # The function may have ended before it was cancelled.
        with contextlib.suppress(tf.errors.CancelledError, TimeoutError):
            return self._outputs.result(0)
        raise TimeoutError(f"not done after {timeout_s} s")

    @property
    def has_failed(self) -> bool:
        """Whether ``wait`` would raise an error."""
        outputs = self._outputs
        return outputs.done() and outputs.exception() is not None

    def cancel(self) -> None:
        """Cancel the function, unless it has ended."""
        if not self._outputs.done():
            self._manager.start_cancel()
            # Python cannot end while a thread is inside TensorFlow.
            wait([self._outputs], settings.CANCEL_S)
