"""Running a function of a notebook or a script as the ranks of a job.

The function and its result are pickled in files of a folder that only this user
can open, because unpickling can run any code.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from keras_towers import settings
from keras_towers.errors import EXIT_AGAIN, TowerError
from keras_towers.launching.job import Job
from keras_towers.launching.outcome import Outcome
from keras_towers.launching.rank_job import run_job
from keras_towers.launching.rank_process import RankProcess
from keras_towers.rendezvous import store

_T = TypeVar("_T")

_PATH = "path"
_CALL = "call"
_RESULT = "result"
_ERROR = "error.{}"
# The program of a rank: everything is imported as by the sender.
_RANK_PROGRAM = f"""\
import pickle, sys
with open(sys.argv[1] + "/{_PATH}", "rb") as file:
    sys.path[:] = pickle.load(file)
from {__name__} import call_as_rank
call_as_rank(sys.argv[1])
"""


def launch(
    fn: Callable[..., _T],
    np: int = 2,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    output: str | Path | None = None,
    stall_warning_s: int = settings.STALL_WARNING_S,
    stall_shutdown_s: int = settings.STALL_SHUTDOWN_S,
) -> _T:
    """Run a function in several processes that train one model together.

    Use it in notebooks, or in scripts that you do not start with ``keras-towers
    run``. Each process, or rank, runs on this machine and calls ``fn`` once.
    The ranks' output appears here, each line with its rank. Ctrl-C ends all
    ranks.

    Ranks are new processes. They get ``fn`` and the values of the notebook or
    script that it uses. ``fn`` makes its own model and strategy.

    Args:
        fn: the function that each rank calls. Ranks get the functions and
            classes that your notebook or script defines, and import those that
            modules define.
        np: number of ranks, at least 1.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        output: a folder for one output file per rank; None: no files.
        stall_warning_s: seconds until a waiting rank reports which ranks it
            waits for; 0: never.
        stall_shutdown_s: seconds until a stalled job ends; 0: never.

    Returns:
        The result of ``fn`` on rank 0. It must be an object that can be
        pickled: numbers, arrays, weights, a Keras model.

    Raises:
        TowerError: ``fn`` failed on a rank (the message has its traceback), or
            a rank was killed; ``fn`` or its result cannot be sent; ``np`` is
            not positive; you call this in a rank; Horovod is not installed.

    Example:
        >>> def train(epochs):
        ...     model = build()
        ...     with kt.HorovodStrategy():
        ...         model.fit(x, y, epochs=epochs)
        ...     return model.get_weights()
        >>> model.set_weights(kt.launch(train, np=2, args=(5,)))
    """
    if not callable(fn):
        raise TowerError(f"kt.launch takes a function, but got {fn!r}.")
    if not isinstance(np, int) or np < 1:
        raise TowerError(f"np={np!r}: give 1 or more ranks.")
    if store.store_of_job() is not None:
        raise TowerError(
            "kt.launch was called in a process that is itself a rank of a job: "
            "call the function directly there, or start the script without "
            "`keras-towers run`."
        )
    with tempfile.TemporaryDirectory(prefix="keras-towers-") as name:
        folder = Path(name)
        (folder / _PATH).write_bytes(pickle.dumps(sys.path))
        _dump(
            (fn, tuple(args), dict(kwargs or {})),
            folder / _CALL,
            f"{getattr(fn, '__name__', fn)} cannot be sent to the ranks: "
            "if an object cannot be pickled, create it inside the function",
        )
        outcome = run_job(
            Job(
                command=[sys.executable, "-P", "-c", _RANK_PROGRAM, name],
                ranks=np,
                hosts={"localhost": np},
                stall_warning_s=stall_warning_s,
                stall_shutdown_s=stall_shutdown_s,
                output=None if output is None else Path(output),
                launcher="kt.launch",
                runs="function",
            )
        )
        _check(outcome, folder)
        return _result(folder / _RESULT)


def _dump(value: object, path: Path, problem: str) -> None:
    """Pickle a value into a file; ``problem`` begins the error if it cannot."""
    try:
        pickled = cloudpickle.dumps(value)
    except Exception as error:
        raise TowerError(f"{problem} ({error}).") from error
    path.write_bytes(pickled)


def call_as_rank(folder_name: str) -> None:
    """Make the call in a folder, and write its result or error there."""
    folder = Path(folder_name)
    rank = int(os.environ["HOROVOD_RANK"])
    try:
        function, args, kwargs = pickle.loads((folder / _CALL).read_bytes())
        result = function(*args, **kwargs)
        if rank == 0:
            _dump(
                result,
                folder / _RESULT,
                f"the function returned a {type(result).__name__}, which "
                "cannot be pickled: return numbers, arrays, weights or a Keras "
                "model",
            )
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code == EXIT_AGAIN:
            raise
        if not code:
            # sys.exit() without an error: nothing to return.
            if rank == 0:
                _dump(None, folder / _RESULT, "")
            return
        trace = error.__traceback__
        # Drop the frame of this function unless it is the only one.
        error.__traceback__ = (trace and trace.tb_next) or trace
        text = "".join(traceback.format_exception(error))
        (folder / _ERROR.format(rank)).write_text(text, encoding="utf-8")
        sys.stderr.write(text)
        sys.exit(1)


def _check(outcome: Outcome, folder: Path) -> None:
    """Raise the error that ended a job early, once no rank is left."""
    cause = outcome.cause
    if isinstance(cause, OSError):
        raise cause
    if outcome.code == EXIT_AGAIN and isinstance(cause, int):
        raise SystemExit(EXIT_AGAIN)
    if isinstance(cause, int):
        # Has the signal's usual effect here, such as a KeyboardInterrupt.
        signal.raise_signal(cause)
        raise TowerError(f"stopped by {signal.Signals(cause).name}")
    if isinstance(cause, RankProcess):
        rank = cause.index
        error = folder / _ERROR.format(rank)
        if not error.exists():
            raise TowerError(outcome.text)
        raise TowerError(
            f"an error on rank {rank}:\n\n{error.read_text(encoding='utf-8')}"
        )


def _result(path: Path) -> Any:
    if not path.exists():
        raise TowerError("rank 0 ended before the function returned.")
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:
        raise TowerError(
            "the result of the function on rank 0 cannot be unpickled here: "
            f"{error}"
        ) from error
