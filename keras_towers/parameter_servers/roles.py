"""What a process does, by the role that TF_CONFIG gives it."""

from __future__ import annotations

from keras_towers.errors import TowerError
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.parameter_servers.connection import Connection, connect
from keras_towers.parameter_servers.server import serve


def take_role(
    strategy: str,
    cluster: Cluster | None = None,
    timeout_s: float | None = None,
) -> Connection:
    """Serve if this process is a ps task, connect with them if it trains.

    So that one script does on all machines. In a ps task this does not return:
    the process ends, with exit code 0, when training has.

    Args:
        strategy: what the role is taken for; named in errors.
        cluster: the job; None: the one that ``TF_CONFIG`` describes.
        timeout_s: seconds that a worker waits for the ps tasks; None: for ever.

    Returns:
        The worker's connection.

    Raises:
        SystemExit: this was a ps task.
        TowerError: ``TF_CONFIG`` is missing or malformed, or names no ps task;
            the process is an evaluator; or it cannot serve or connect.
    """
    cluster = cluster or tf_config.required()
    if not cluster.ps:
        raise TowerError(
            f"{strategy} keeps its variables on parameter servers, but "
            'TF_CONFIG names none: add "ps" to "cluster", for example '
            f"{tf_config.EXAMPLE}, or start the script with `keras-towers run "
            "--ps 1 --workers 2`"
        )
    if cluster.role == "ps":
        serve(cluster)
        raise SystemExit(0)
    if not cluster.trains:
        raise TowerError(
            f"{strategy} has nothing to do in the task {cluster}: leave it out "
            "of TF_CONFIG, and evaluate the chief's checkpoints in a script of "
            "its own"
        )
    return connect(cluster, timeout_s)
