"""Runs an unmodified script under a strategy, as one rank of a job.

Started by ``keras-towers run --strategy NAME``. The script sees what ``python
script.py`` would show it: its arguments, its folder on the path, its own
``__main__``; errors of its own have its own traceback.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from types import TracebackType

from keras_towers.launch.environment import SEED


def main(arguments: list[str]) -> None:
    """Enter the strategy and run the script in it."""
    parser = argparse.ArgumentParser(prog="keras_towers.launch.script")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--towers", type=int)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)

    import keras

    import keras_towers as kt

    seed = os.environ.get(SEED)
    if seed is not None:
        # One on all ranks: initial weights, shuffles and tf.data agree then,
        # though the script knows of one process only.
        keras.utils.set_random_seed(int(seed))
    chosen = {} if options.towers is None else {"towers": options.towers}
    try:
        strategy = kt.strategy(options.strategy, **chosen)
    except kt.TowerError as error:
        sys.exit(f"keras-towers run: {error}")
    sys.argv = [options.script, *options.arguments]
    try:
        with strategy:
            if options.module:
                sys.path[0] = os.getcwd()
                runpy.run_module(
                    options.script, run_name="__main__", alter_sys=True
                )
            else:
                # As Python itself does it, symbolic links followed.
                folder = os.path.dirname(os.path.realpath(options.script))
                sys.path[0] = folder
                runpy.run_path(options.script, run_name="__main__")
    except Exception as error:
        traceback.print_exception(
            type(error), error, _from_script(error.__traceback__)
        )
        sys.exit(1)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that led to the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in ours:
        first = first.tb_next
    # An error between here and the script, not in it: show everything.
    return first or (None if _is_syntax() else trace)


def _is_syntax() -> bool:
    # What does not compile has no frame of its own; its error says where.
    return isinstance(sys.exc_info()[1], SyntaxError)


if __name__ == "__main__":
    main(sys.argv[1:])
