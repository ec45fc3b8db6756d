"""Runs a script in this process, as ``python script.py`` does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.settings import ENV_SEED
from keras_towers.jobs import known_engines
from keras_towers.jobs.launching.script_source import check_script
from keras_towers.jobs.rendezvous import launchers
from keras_towers.jobs.rendezvous.separate_training import forbid_training


@dataclasses.dataclass(frozen=True)
class Setup:
    """How to prepare a process before its script runs.

    Attributes:
        strategy: the name of the strategy that the script runs inside, if any.
        options: its arguments.
        suggested: the name of a strategy that connects processes, to recommend
            if the script trains without one; None: it may.
        has_servers: whether the process is in a job with parameter servers.
        towers: the number of towers of the process.
        module: whether the script is a module, as for ``python -m``.
    """

    strategy: str | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    suggested: str | None = None
    has_servers: bool = False
    towers: int | None = None
    module: bool = False

    def command(self, script: str, *arguments: str) -> list[str]:
        """The command of a rank."""
        setup = json.dumps(dataclasses.asdict(self))
        return [sys.executable, "-m", __name__, setup, script, *arguments]


def main(setup: Setup, script: str, *arguments: str) -> None:
    """Run the script as a rank of `keras-towers run`.

    It runs inside a strategy, or may not train without one.
    """
    _stand_by()
    if os.environ.pop(settings.ENV_TASKS, None):
        _make_task()
    # When ranks connect, they compare the script that this names.
    sys.argv = [script, *arguments]
    if setup.suggested:
        _forbid_separate_training(setup.suggested, setup.has_servers)
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if setup.strategy or setup.has_servers:
        context = _connect(setup)
    _run(script, setup.module, context)


def run_as_is(words: Sequence[str]) -> None:
    """Run a script that another launcher has started, or the user alone.

    Since this package has been imported, a script that was written for an
    engine gets the drop-in. In one of several processes, it may not train
    unless it connects them.

    Args:
        words: a script or ``-m`` and a module, and their arguments.

    Raises:
        TowerError: the script is not there or does not compile.
    """
    module = words[0] == "-m"
    sys.argv = list(words[1:] if module else words)
    if not sys.argv:
        raise TowerError("-m needs the name of a module")
    check_script(sys.argv[0], module)
    # As for ranks of `keras-towers run`.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    rank = launchers.detect()
    if rank and not rank.is_single_process:
        engine = known_engines.HOROVOD
        forbid_training(
            f"this process is {rank}",
            "To train one model in all of them, start the script by "
            f"`keras-towers run --strategy {engine.strategy}`, or write `with "
            f"kt.{engine.strategy_class}():` around fit. If each should train "
            "its own model, start it by `python` alone.",
        )
    _run(sys.argv[0], module, contextlib.nullcontext())


def _run(
    script: str, module: bool, context: contextlib.AbstractContextManager[None]
) -> None:
    """Run a script inside a context; an error ends this process."""
    try:
        with context:
            if module:
                sys.path[0] = os.getcwd()
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                # As Python does, with symbolic links resolved.
                sys.path[0] = os.path.dirname(os.path.realpath(script))
                runpy.run_path(script, run_name="__main__")
    except Exception as error:
        # As Python does for an uncaught error, so that code that runs at exit
        # can see that there was one.
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = _from_script(error.__traceback__)
        traceback.print_exception(type(error), error, sys.last_traceback)
        sys.exit(1)


def _stand_by() -> None:
    """Wait until this process is needed, if it was started before that."""
    key = os.environ.pop(settings.ENV_STANDBY, None)
    if key is None:
        return
    # This takes long, and is the same for every script.
    import keras  # noqa: F401

    from keras_towers.jobs.rendezvous import store

    server = store.store_of_job()
    assert server is not None
    variables = None
    while variables is None:
        # If the launcher is gone, its agent ends this process.
        with contextlib.suppress(OSError):
            variables = server.get(key, settings.LISTEN_S)
    os.environ.update(variables)


def _make_task() -> None:
    """Make a task of TensorFlow of this rank, before TensorFlow starts."""
    from keras_towers.jobs import known_engines
    from keras_towers.jobs.rendezvous import tf_config

    tf_config.make_task()
    # Else the import of Keras does this.
    if "keras" in sys.modules:
        runtime = known_engines.RUNTIME
        runtime.load(runtime.after_keras)()


def _forbid_separate_training(suggested: str, has_servers: bool) -> None:
    """Make Keras train only inside a strategy."""
    from keras_towers.strategies import STRATEGIES

    forbid_training(
        "`keras-towers run` started this script in several processes",
        f"To train one model in all of them, add --strategy {suggested} to "
        f"`keras-towers run`, or `with kt.{STRATEGIES[suggested].kind}():` "
        "around fit in the script. "
        "If each should train its own model, give --no-strategy"
        + (", and -np in place of --ps and --workers." if has_servers else "."),
    )


@contextlib.contextmanager
def _connect(setup: Setup) -> Iterator[None]:
    """Connect the process, and have it enter the strategy that is named."""
    import keras

    import keras_towers as kt
    from keras_towers.jobs.launching.late_entry import entered_late
    from keras_towers.jobs.rendezvous import tf_config
    from keras_towers.parameter_servers.server_connection import take_role

    seed = os.environ.get(ENV_SEED)
    if seed is not None:
        # The same on all ranks, so that initial weights, shuffles and tf.data
        # agree in a script written for one process.
        keras.utils.set_random_seed(int(seed))
    name, towers = setup.strategy, setup.towers
    strategy: contextlib.AbstractContextManager[object] | None = None

    def make() -> contextlib.AbstractContextManager[object]:
        nonlocal strategy
        options = dict(setup.options)
        with _errors_of_command():
            if setup.has_servers:
                take_role("keras-towers run")
            if towers is not None:
                options["towers"] = towers
                _split_cpu(towers, name)
            made: contextlib.AbstractContextManager[object]
            strategy = made = contextlib.nullcontext()
            if name is not None:
                strategy = made = kt.strategy(name, **options)
        return made

    if setup.has_servers and tf_config.required().role == "ps":
        # It serves, and never runs the script.
        with _errors_of_command():
            take_role("keras-towers run")
    _save_once()
    with entered_late(make):
        try:
            yield
        except Exception as error:
            entered = type(strategy).__name__
            if name and entered in str(error):
                error.add_note(
                    f"The script runs inside {entered}, by `keras-towers run "
                    f"--strategy {name}`. If the script itself has a strategy "
                    "or a DistributedOptimizer, leave one of them out."
                )
            raise


@contextlib.contextmanager
def _errors_of_command() -> Iterator[None]:
    """End this process with a wrong use of `keras-towers run`."""
    try:
        yield
    except TowerError as error:
        sys.exit(f"keras-towers run: {error}")


def _split_cpu(towers: int, strategy: str | None) -> None:
    """Split the CPU into towers if it is the only device."""
    import tensorflow as tf

    import keras_towers as kt

    if not tf.config.list_physical_devices("GPU"):
        kt.virtual_towers(towers)
    elif strategy is None:
        raise kt.TowerError(
            "without --strategy, --towers only splits a CPU, but this machine "
            f"has GPUs: give towers={towers} to the script's strategy"
        )


def _save_once() -> None:
    """Let one rank write the files that several ranks save."""
    from keras_towers.fit.calls import saving
    from keras_towers.jobs.rendezvous import tf_config

    member = tf_config.this_member()
    if member is not None and member.size != 1:
        saving.let_one_rank_write(member.rank)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames that led to the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in ours:
        first = first.tb_next
    # If the error is not in the script, show all frames; but a syntax error has
    # no frame there, and its message shows the line.
    syntax = isinstance(sys.exc_info()[1], SyntaxError)
    return first or (None if syntax else trace)


if __name__ == "__main__":
    _, encoded, *words = sys.argv
    main(Setup(**json.loads(encoded)), *words)
