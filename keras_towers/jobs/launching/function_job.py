"""Running a function of a notebook or a script as the ranks of a job.

The function and its result are pickled in files of a folder that only this user
can open, because unpickling can run any code. Models are in files of their own
there, which stay if the result cannot be returned.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import cloudpickle

from keras_towers.foundation import settings
from keras_towers.foundation.errors import EXIT_AGAIN, TowerError
from keras_towers.jobs.launching.job import Job
from keras_towers.jobs.launching.outcome import Outcome
from keras_towers.jobs.launching.rank_job import run_job
from keras_towers.jobs.launching.rank_process import RankProcess
from keras_towers.jobs.rendezvous import store

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
        pickled: numbers, arrays, weights, a Keras model, which may have layers
        and functions of your own. If it cannot be returned, the error names
        files with the weights of the models.

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
    with _private_folder() as folder:
        (folder / _PATH).write_bytes(pickle.dumps(sys.path))
        _dump(
            (fn, tuple(args), dict(kwargs or {})),
            folder / _CALL,
            f"{getattr(fn, '__name__', fn)} cannot be sent to the ranks: "
            "if an object cannot be pickled, create it inside the function",
        )
        outcome = run_job(
            Job(
                command=[
                    sys.executable,
                    "-P",
                    "-c",
                    _RANK_PROGRAM,
                    str(folder),
                ],
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


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Make a folder for this block; trained models stay there after errors."""
    folder, trained = Path(tempfile.mkdtemp(prefix="keras-towers-")), ""
    try:
        yield folder
    except BaseException as error:
        paths = sorted(map(str, folder.glob(f"{_RESULT}-*")))
        trained = ", ".join(map(repr, paths))
        if trained:
            error.add_note(
                "keras_towers: the trained weights are kept. Make and build "
                f"the model again, and call model.load_weights() with {trained}"
            )
        raise
    finally:
        if not trained:
            shutil.rmtree(folder, ignore_errors=True)


def _dump(value: object, path: Path, problem: str) -> None:
    """Pickle a value into a file; ``problem`` begins the error if it cannot."""
    pickled = io.BytesIO()
    try:
        _Pickler(pickled, path).dump(value)
    except Exception as error:
        if path.name == _RESULT:
            _save_weights(path)
        raise TowerError(f"{problem} ({error}).") from error
    path.write_bytes(pickled.getvalue())


class _Pickler(cloudpickle.Pickler):
    """Pickles models together with the classes and functions in them.

    Keras saves only the names of these, and each process has its own.

    Args:
        file: where to write.
        path: begins the names of the files of models.
    """

    def __init__(self, file: IO[bytes], path: Path):
        super().__init__(file)
        self._path, self._models = path, 0

    def reducer_override(self, value: Any) -> Any:
        if "keras" in sys.modules:
            from keras_towers.foundation import compat

            if issubclass(type(value), compat.KerasSaveable):
                return self._reduce_model(value)
        return super().reducer_override(value)

    def _reduce_model(self, model: Any) -> Any:
        with _named_objects() as named:
            reduced = model.__reduce__()
        load, arguments = reduced[:2]
        if not isinstance(arguments[0], io.BytesIO):
            return reduced  # The class of the model pickles it in its own way.
        path = self._path.with_name(f"{self._path.name}-{self._models}.keras")
        path.write_bytes(arguments[0].getvalue())
        self._models += 1
        return _load_model, (load, path, named)


@contextlib.contextmanager
def _named_objects() -> Iterator[dict[str, Any]]:
    """Collect what Keras saves by its name in this block, except its own."""
    from keras_towers.fit.context import patches
    from keras_towers.foundation import compat

    named: dict[str, Any] = {}

    def name_of(original: Callable[[Any], str], value: Any) -> str:
        name = original(value)
        is_custom = not f"{value.__module__}".startswith("keras.")
        if is_custom and named.setdefault(name, value) is not value:
            raise TowerError(f"the model has two classes or functions {name!r}")
        return name

    registration = compat.object_registration, "get_registered_name", name_of
    with patches.replaced(registration):
        yield named


def _load_model(
    load: Callable[[IO[bytes]], Any], path: Path, named: dict[str, Any]
) -> Any:
    """Load a model of another process, and what is in it."""
    import keras

    with keras.saving.custom_object_scope(named):
        return load(io.BytesIO(path.read_bytes()))


def _save_weights(path: Path) -> None:
    """Save the weights of all models of this process, which returns none.

    Args:
        path: begins the names of the files.
    """
    if "keras" not in sys.modules:
        return
    import keras

    found = gc.get_objects()
    models = [m for m in found if issubclass(type(m), keras.Model) and m.built]
    models.sort(key=lambda m: (len(m.weights), m.compiled), reverse=True)
    saved: set[int] = set()
    for number, model in enumerate(models):
        own = set(map(id, model.weights))
        # The rest is in another model.
        if own - saved:
            model.save_weights(f"{path}-{number}.weights.h5")
            saved |= own


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
        # For code that runs at exit, as for an error that nobody catches.
        sys.last_value = error
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
