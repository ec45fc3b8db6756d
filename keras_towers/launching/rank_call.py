"""Calls a function sent by another process, as one rank of a job.

The function and its result are pickled in files of a folder that only this user
can open, because unpickling can run any code. Only Python's own modules are
imported until ``sys.path`` is set to the sender's.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

CALL = "call"
RESULT = "result"
ERROR = "error.{}"
EXIT_AGAIN = 75  # keras_towers.errors.EXIT_AGAIN


def main(folder: Path) -> None:
    """Make the call in a folder, and write its result or error there."""
    rank = int(os.environ["HOROVOD_RANK"])
    try:
        with (folder / CALL).open("rb") as file:
            sys.path[:] = pickle.load(file)
            function, args, kwargs = pickle.load(file)
        result = function(*args, **kwargs)
        if rank == 0:
            _write_result(result, folder / RESULT)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else ERROR
        if code == EXIT_AGAIN:
            raise
        if not code:
            # sys.exit() without an error: nothing to return.
            if rank == 0:
                _write_result(None, folder / RESULT)
            return
        trace = error.__traceback__
        # Drop the frame of this function unless it is the only one.
        error.__traceback__ = (trace and trace.tb_next) or trace
        text = "".join(traceback.format_exception(error))
        (folder / ERROR.format(rank)).write_text(text, encoding="utf-8")
        sys.stderr.write(text)
        sys.exit(1)


def _write_result(result: object, path: Path) -> None:
    import cloudpickle

    from keras_towers.errors import TowerError

    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        raise TowerError(
            "the function returned a value that cannot be pickled, "
            f"{type(result).__name__}: return numbers, arrays, weights or a "
            "Keras model."
        ) from error
    path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
