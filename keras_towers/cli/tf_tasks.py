"""The tasks of a job on TensorFlow's runtime, from options of the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from keras_towers.errors import TowerError
from keras_towers.launching import inside
from keras_towers.strategies.registry import STRATEGIES


def tf_tasks(
    strategy: str | None,
    ps: int | None,
    workers: int | None,
    processes: int | None,
    others: Mapping[str, object],
) -> dict[str, int] | None:
    """Return the number of tasks of each role, None without the runtime.

    Args:
        strategy: its name, if the launcher enters one.
        ps: the number of parameter servers, if given.
        workers: the number of workers, likewise.
        processes: the number of processes, likewise.
        others: options of other kinds of jobs, by name; None: not given.
    """
    known = STRATEGIES.get(strategy or "")
    roles = known.roles if known else ()
    if (ps, workers) == (None, None) and (not roles or processes == 1):
        return None
    for name, value in (("--ps", ps), ("--workers", workers)):
        if value is not None and value < 1:
            raise TowerError(f"{name} must be at least 1, not {value}")
    if known and not roles:
        raise TowerError(
            f"--ps and --workers are not for the strategy {strategy}, whose "
            "processes are connected otherwise: give -np N"
        )
    if known and ps and "ps" not in roles:
        raise TowerError(
            f"the strategy {strategy} has no use for parameter servers: leave "
            "out --ps"
        )
    if "ps" in roles and not ps:
        raise TowerError(
            f"the strategy {strategy} needs parameter servers: --ps 1 "
            f"--workers {workers or processes or 'N'}"
        )
    if processes and (ps or workers):
        raise TowerError(
            "give --workers for the processes that train, instead of -np"
        )
    count = workers or processes
    if not count:
        raise TowerError("give the number of processes that train: --workers N")
    if inside.rank_to_be(None):
        raise TowerError(
            "another launcher started this process as one of several, each of "
            "which would start a cluster: start it once, without that launcher"
        )
    for name, given in others.items():
        if given is not None:
            raise TowerError(
                f"{name} is not for jobs on TensorFlow's own runtime, whose "
                "tasks are started on this machine only. On several machines, "
                "start the script on each with TF_CONFIG"
            )
    return {"ps": ps, "worker": count} if ps else {"worker": count}
