"""The cluster that ``TF_CONFIG`` describes, and this process's task in it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Mapping
from typing import ClassVar, NoReturn, TypeAlias

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject
from keras_towers.jobs.agent import source_address
from keras_towers.jobs.rendezvous import launchers, store
from keras_towers.jobs.rendezvous.hosts import RankPlacement, place_ranks
from keras_towers.jobs.rendezvous.network import reserve_port

VARIABLE = "TF_CONFIG"
EXAMPLE: str = (
    '{"cluster": {"worker": ["10.0.0.1:4000", "10.0.0.2:4000"], '
    '"ps": ["10.0.0.3:4000"]}, "task": {"type": "worker", "index": 0}}'
)

EVALUATOR: str = (
    "An evaluator evaluates checkpoints on its own, without a strategy."
)

# The key of the addresses of all ranks as tasks of TensorFlow.
_TASKS = "tasks"
# The store in which the tasks of this job have met; None: in none.
_store: store.StoreClient | None = None
# Ports that this process has reserved.
_held = contextlib.ExitStack()
_TRAINING = ("chief", "worker")
_ROLES = (*_TRAINING, "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job, and the role and the index of this process."""

    jobs: Mapping[str, tuple[str, ...]]
    role: str
    index: int
    how_to_train_alone: ClassVar[str] = (
        f"To train in this process alone, unset {VARIABLE}."
    )

    @functools.cached_property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        """Role and index of each training task, the chief first."""
        return tuple(
            (role, index)
            for role in _TRAINING
            for index in range(len(self.jobs.get(role, ())))
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the tasks that train."""
        return tuple(self.jobs[role][index] for role, index in self.tasks)

    @property
    def ps(self) -> tuple[str, ...]:
        """The addresses of the parameter servers."""
        return self.jobs.get("ps", ())

    @property
    def address(self) -> str:
        """The address of this process."""
        return self.jobs[self.role][self.index]

    @property
    def trains(self) -> bool:
        """Whether this process is one of ``workers``."""
        return self.role in _TRAINING

    @property
    def rank(self) -> int:
        """The index of this process among ``workers``."""
        return self.tasks.index((self.role, self.index))

    @property
    def size(self) -> int:
        """The number of tasks that train."""
        return len(self.tasks)

    @property
    def is_single_process(self) -> bool:
        """Whether no other task trains or serves."""
        return self.trains and self.size + len(self.ps) == 1

    @property
    def how_to_connect(self) -> str:
        """A sentence that says how all tasks train one model."""
        if self.role == "evaluator":
            return EVALUATOR
        kind = "DistributedReplicated" if self.ps else "MultiWorkerTower"
        return f"{kind}Strategy trains one model in all of them."

    @property
    def local_rank(self) -> int:
        """The index of this process among the ``workers`` on its host."""
        return self._placement().local_rank

    @property
    def local_size(self) -> int:
        """The number of ``workers`` on this process's host."""
        return self._placement().local_size

    def identity(self) -> str:
        """A text shared by the tasks of this job and by no other job."""
        return json.dumps(dict(self.jobs), sort_keys=True)

    def to_json(self) -> str:
        """The value of ``TF_CONFIG`` that describes this task."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": dict(self.jobs), "task": task})

    def _placement(self) -> RankPlacement:
        hosts = [address.rpartition(":")[0] for address in self.workers]
        return place_ranks(hosts)[self.rank]

    def __str__(self) -> str:
        return f"{self.role} {self.index} at {self.address}"


def from_environment(
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Read the cluster from ``TF_CONFIG``; None if it names none."""
    config = read_config(environment)
    if not config.get("cluster"):
        return None
    jobs = _jobs(config["cluster"])
    role, index = _task(config.get("task"), jobs)
    return Cluster(jobs, role, index)


Member: TypeAlias = launchers.ClusterEnvironment | Cluster
"""A process as one of several."""


def this_member() -> Member | None:
    """This process as one of several, by its launcher or ``TF_CONFIG``."""
    return launchers.detect() or from_environment()


def make_task() -> None:
    """Make this rank a task of TensorFlow, by ``TF_CONFIG``.

    Ranks tell each other in the job's store where they will listen.
    """
    global _store
    server, rank = store.store_of_job(), launchers.detect()
    if server is None or rank is None or rank.size is None:
        raise TowerError(
            f"{VARIABLE} is not set: set it, or start the script with "
            "`keras-towers run`."
        )
    address = reserve_port(source_address(server.host), _held)
    addresses = None
    while addresses is None:
        # If a rank ends before, the launcher ends this one.
        _, addresses = server.give(
            _TASKS, rank.rank, rank.size, address, settings.LISTEN_S
        )
    cluster = Cluster({"worker": tuple(addresses)}, "worker", rank.rank)
    os.environ[VARIABLE] = cluster.to_json()
    _store = server
    # It is no rank of Horovod any more.
    for field in dataclasses.fields(RankPlacement):
        os.environ.pop(f"HOROVOD_{field.name.upper()}", None)


def store_of_tasks() -> store.StoreClient | None:
    """Return the store of a job with the tasks of ``TF_CONFIG``, if any."""
    return _store


def read_config(environment: Mapping[str, str] = os.environ) -> JsonObject:
    """Return the parsed ``TF_CONFIG``; empty if it is not set."""
    text = environment.get(VARIABLE, "").strip()
    config, problem = None, ""
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        problem = str(error)
    if problem:
        _refuse(f"is not valid JSON: {problem}")
    if not isinstance(config, dict):
        _refuse(f"is {json.dumps(config)} instead of an object")
    return config


def required(
    environment: Mapping[str, str] = os.environ, options: str = "--workers {}"
) -> Cluster:
    """Read the cluster from ``TF_CONFIG``, or raise an error.

    Args:
        environment: the variables of the process.
        options: those with which `keras-towers run` starts tasks, with {} for
            their number.
    """
    cluster = from_environment(environment)
    if cluster is not None:
        return cluster
    rank = launchers.detect(environment)
    if rank is not None and rank.horovod_reads_variables:
        raise TowerError(
            f"this process is {rank}, but the strategy connects tasks of "
            "TensorFlow: start the script by `keras-towers run "
            f"{options.format(rank.size)}`, without -np."
        )
    _refuse(
        "is not set, or names no cluster: start the script by `keras-towers "
        f"run {options.format(2)}`, or set it"
    )


def _jobs(cluster: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, dict):
        _refuse(f'has {json.dumps(cluster)} as "cluster" instead of an object')
    for role, tasks in cluster.items():
        if role not in _ROLES:
            _refuse(
                f"names the unknown role {role!r} (known: {', '.join(_ROLES)})"
            )
        if not isinstance(tasks, list) or not all(map(_is_address, tasks)):
            _refuse(
                f'has {json.dumps(tasks)} as "{role}" instead of a list of '
                "host:port"
            )
    jobs = {role: tuple(tasks) for role, tasks in cluster.items()}
    if not any(jobs.get(role) for role in _TRAINING):
        _refuse('names no task that trains: "cluster" has no "worker"')
    if len(jobs.get("chief", ())) > 1:
        _refuse('names more than one "chief"')
    times = collections.Counter(itertools.chain(*jobs.values()))
    for address in times:
        if times[address] > 1:
            _refuse(f"gives more than one task the address {address}")
    return jobs


def _is_address(value: object) -> bool:
    host, _, port = str(value).rpartition(":")
    is_text = isinstance(value, str) and host and port.isdecimal()
    return bool(is_text and 0 < int(port) < 65536)


def _task(task: object, jobs: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        _refuse(
            "does not say which task this process is: it has "
            f'{json.dumps(task)} as "task"'
        )
    role, index = task.get("type"), task.get("index")
    if role == "evaluator" and role not in jobs:
        raise TowerError(
            f"{VARIABLE} says that this process is an evaluator. {EVALUATOR} "
            f"{Cluster.how_to_train_alone}"
        )
    if not isinstance(role, str) or role not in jobs:
        _refuse(
            f'has {json.dumps(role)} as the "type" of "task", but "cluster" '
            f"names {', '.join(map(repr, jobs))}"
        )
    last = len(jobs[role]) - 1
    # A number, or its digits as text.
    if not str(index).isdecimal() or int(str(index)) > last:
        _refuse(
            f'has {json.dumps(index)} as the "index" of "task": give a number '
            f"from 0 to {last}"
        )
    return role, int(str(index))


def _refuse(what: str) -> NoReturn:
    raise TowerError(
        f"{VARIABLE} {what}. It must name the tasks of the job, and which "
        f"of them this process is, for example {EXAMPLE}"
    )
