"""TensorFlow's runtime over several processes, each with its own client."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat, settings
from keras_towers.errors import TowerError
from keras_towers.rendezvous.listening import reachable_only_at

# Otherwise a call of a server that has died waits for it to come back.
_FAIL_FAST = ("GRPC_FAIL_FAST", "use_caller")


def join(jobs: Mapping[str, Mapping[int, str]], job: str, index: int) -> None:
    """Make this process a task of TensorFlow's runtime.

    It has to be done before TensorFlow starts: afterwards, assignments to older
    variables would be lost.
    """
    if compat.has_started():
        raise TowerError(
            "TensorFlow has started in this process before the process was "
            f"made {job} {index} of its job, and objects created since "
            "(models, variables, tensors) would no longer work. Create the "
            "strategy first, before any model; or start each task with "
            "`keras-towers run SCRIPT`, which connects before the script "
            "begins."
        )
    os.environ.setdefault(*_FAIL_FAST)
    root = logging.getLogger()
    handlers = list(root.handlers)
    with reachable_only_at(jobs[job][index]):
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name=job, task_index=index
        )
        # The server starts when TensorFlow does.
        tf.config.list_logical_devices()
    # TensorFlow sets up the program's logging if the program has not.
    root.handlers[:] = handlers


def device_of(index: int) -> str:
    """The full name of a parameter server's device."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def traced(
    body: Callable[..., Any], device: str, *arguments: tf.TensorSpec
) -> Any:
    """Trace operations on one device as a concrete function, and keep it.

    An operation that fails in a function raises an error. By itself, it would
    also break whatever runs on that device later.
    """

    def function(*given: tf.Tensor) -> Any:
        with tf.device(device):
            return body(*given)

    made: Any = tf.function(function, autograph=False)
    return made.get_concrete_function(*arguments)


class Running:
    """A concrete function that runs in a thread, and may block."""

    def __init__(self, function: Any, arguments: Sequence[tf.Tensor] = ()):
        self._function = function
        self._arguments = arguments
        self._manager = compat.CancellationManager()
        self._outputs: list[Any] = []
        self._errors: list[BaseException] = []
        self._done = threading.Event()
        # Signals are handled between the main thread's own steps only.
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            found = compat.call_cancellable(
                self._function, self._arguments, self._manager
            )
            self._outputs.extend(found or ())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._done.set()

    def wait(
        self,
        timeout_s: float | None = None,
        poll: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Wait for the function's outputs, calling ``poll`` every 2 s."""
        cancelled = False
        try:
            until = math.inf
            if timeout_s is not None:
                until = time.monotonic() + timeout_s
            while (left_s := until - time.monotonic()) > 0:
                if self._done.wait(min(settings.LOOK_S, left_s)):
                    break
                if poll is not None:
                    poll()
        finally:
            cancelled = self.cancel()
        errors = self._errors
        if errors and not (
            cancelled and isinstance(errors[0], tf.errors.CancelledError)
        ):
            raise errors[0]
        if cancelled and not self._outputs:
            raise TimeoutError(f"not done after {timeout_s} s")
        return self._outputs

    @property
    def has_failed(self) -> bool:
        """Whether ``wait`` would raise an error."""
        return self._done.is_set() and bool(self._errors)

    def cancel(self) -> bool:
        """Cancel the function; return False if it had already ended."""
        if self._done.is_set():
            return False
        self._manager.start_cancel()
        # Python cannot end while a thread is inside TensorFlow.
        self._done.wait(settings.CANCEL_S)
        return True
