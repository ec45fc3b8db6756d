"""The cluster that ``TF_CONFIG`` describes, and this process's task in it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from keras_towers.errors import TowerError

VARIABLE = "TF_CONFIG"
EXAMPLE: str = (
    '{"cluster": {"worker": ["10.0.0.1:4000", "10.0.0.2:4000"], '
    '"ps": ["10.0.0.3:4000"]}, "task": {"type": "worker", "index": 0}}'
)

HOW_TO_BE_ALONE: str = f"To train in this process alone, unset {VARIABLE}."
EVALUATOR: str = (
    "An evaluator evaluates checkpoints on its own, without a strategy."
)

_TRAINING = ("chief", "worker")
_ROLES = (*_TRAINING, "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job, and the role and the index of this process."""

    jobs: Mapping[str, tuple[str, ...]]
    role: str
    index: int

    @property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        """Role and index of each task that trains; the chief is the first."""
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
        """This process among ``workers``, from 0."""
        return self.tasks.index((self.role, self.index))

    @property
    def number(self) -> int:
        """This process among all tasks, role by role, from 0."""
        before = list(self.jobs)[: list(self.jobs).index(self.role)]
        return sum(len(self.jobs[role]) for role in before) + self.index

    @property
    def size(self) -> int:
        """The number of tasks that train."""
        return len(self.tasks)

    @property
    def members(self) -> int:
        """The number of tasks that train or serve."""
        return self.size + len(self.ps)

    @property
    def connected_by(self) -> str:
        """The strategy that trains one model in all tasks."""
        kind = "DistributedReplicated" if self.ps else "MultiWorkerTower"
        return f"{kind}Strategy"

    @property
    def local_rank(self) -> int:
        """This process among ``workers`` with its host, from 0."""
        return self._neighbours().index(self.rank)

    @property
    def local_size(self) -> int:
        """The number of ``workers`` with this process's host."""
        return len(self._neighbours())

    def identity(self) -> str:
        """A text that this job's tasks have in common, and no other job."""
        return json.dumps(dict(self.jobs), sort_keys=True)

    def written(self) -> str:
        """The value of ``TF_CONFIG`` that describes the cluster."""
        task = {"type": self.role, "index": self.index}
        return json.dumps({"cluster": dict(self.jobs), "task": task})

    def _neighbours(self) -> list[int]:
        here = _host(self.address)
        return [r for r, a in enumerate(self.workers) if _host(a) == here]

    def __str__(self) -> str:
        return f"{self.role} {self.index} at {self.address}"


def from_environment(
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Read the cluster from ``TF_CONFIG``, None if it names no cluster."""
    config = read(environment)
    if not config.get("cluster"):
        return None
    jobs = _jobs(config["cluster"])
    role, index = _task(config.get("task"), jobs)
    return Cluster(jobs, role, index)


def read(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read ``TF_CONFIG`` as it is; empty where it is not set."""
    text = environment.get(VARIABLE, "").strip()
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        _refuse(f"is not valid JSON: {error}")
    if not isinstance(config, dict):
        _refuse(f"is {_shown(config)} instead of an object")
    return config


def refuse_apart(engine: str) -> None:
    """Refuse an engine where each of several tasks would train by itself."""
    cluster = from_environment()
    if cluster is None or (cluster.trains and cluster.members == 1):
        return
    advice = f"Use {cluster.connected_by}, which does, or `keras-towers run`."
    if cluster.role == "evaluator":
        advice = EVALUATOR
    tasks = (f"{r} {i}" for r, a in cluster.jobs.items() for i in range(len(a)))
    raise TowerError(
        f"{VARIABLE} says that this process is {cluster}, one of the tasks "
        f"{', '.join(tasks)}, but {engine} does not read it, so that each "
        f"would train a model of its own. {advice} {HOW_TO_BE_ALONE}"
    )


def required(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Read the cluster from ``TF_CONFIG``, which has to be there."""
    cluster = from_environment(environment)
    if cluster is None:
        _refuse("is not set, or names no cluster")
    return cluster


def _jobs(given: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(given, dict):
        _refuse(f'has {_shown(given)} as "cluster" instead of an object')
    jobs = {role: _addresses(role, tasks) for role, tasks in given.items()}
    if not any(jobs.get(role) for role in _TRAINING):
        _refuse('names no task that trains: "cluster" has no "worker"')
    if len(jobs.get("chief", ())) > 1:
        _refuse('names more than one "chief"')
    seen: dict[str, str] = {}
    for role, tasks in jobs.items():
        for index, address in enumerate(tasks):
            name = f"{role} {index}"
            if address in seen:
                _refuse(
                    f"gives {seen[address]} and {name} the same address, "
                    f"{address}"
                )
            seen[address] = name
    return jobs


def _addresses(role: str, tasks: Any) -> tuple[str, ...]:
    if role not in _ROLES:
        _refuse(f"names the unknown role {role!r} (known: {', '.join(_ROLES)})")
    if isinstance(tasks, dict):
        # TensorFlow takes addresses by index, too.
        if sorted(tasks, key=str) != sorted(map(str, range(len(tasks)))):
            _refuse(
                f'has {_shown(tasks)} as "{role}": the indices have to be '
                '"0", "1", ...'
            )
        tasks = [tasks[str(index)] for index in range(len(tasks))]
    if not isinstance(tasks, list):
        _refuse(
            f'has {_shown(tasks)} as "{role}" instead of a list of addresses'
        )
    for address in tasks:
        host, _, port = str(address).rpartition(":")
        valid = isinstance(address, str) and host and port.isdecimal()
        if not valid or not 0 < int(port) < 65536:
            _refuse(
                f'has {_shown(address)} among the addresses of "{role}": each '
                "is host:port"
            )
    return tuple(tasks)


def _task(given: Any, jobs: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(given, dict):
        found = "is missing" if given is None else f"is {_shown(given)}"
        _refuse(f'does not say which task this process is: "task" {found}')
    role, index = given.get("type"), given.get("index")
    if not isinstance(role, str) or role not in jobs:
        _refuse(
            f'has {_shown(role)} as the "type" of "task", but "cluster" names '
            f"{', '.join(map(repr, jobs))}"
        )
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    count = len(jobs[role])
    if isinstance(index, bool) or not isinstance(index, int):
        _refuse(f'has {_shown(index)} as the "index" of "task": give a number')
    if not 0 <= index < count:
        _refuse(
            f'has {index} as the "index" of "task", but "cluster" names '
            f"{count} {role!r}: 0 to {count - 1}"
        )
    return role, index


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _shown(value: Any) -> str:
    return json.dumps(value)


def _refuse(what: str) -> NoReturn:
    raise TowerError(
        f"{VARIABLE} {what}. It describes the tasks of the job and which of "
        f"them this process is, for example {EXAMPLE}"
    )
