"""Measure what it costs to meet, to watch and to start, as ranks become more.

Run it with ``python -m benchmarks.scaling JSON``, as root; needs what ``make
test-cluster`` needs. Every rank is a stand-in on a host of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import standin
from tests.cluster.lab import Host, Lab, why_not

IDLE_S, STALL_S = 20, 40
RATE = "100mbit"
STRATEGIES = (
    "HorovodStrategy",
    "MultiWorkerTowerStrategy",
    "DistributedParameterServerStrategy",
)
PER_HOST = 8
STANDIN = sys.executable, "-m", "benchmarks.standin"


def counts(host: Host) -> dict[str, int]:
    """What the kernel of a host has counted so far."""
    folder = Path(f"/proc/{host.first_process()}/net")
    names, values = (
        line.split()
        for line in (folder / "snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    tcp = dict(zip(names[1:], map(int, values[1:]), strict=True))
    devices = (folder / "dev").read_text().splitlines()
    (device,) = (line for line in devices if "eth0:" in line)
    numbers = [int(number) for number in device.partition(":")[2].split()]
    return {
        "requests": tcp["PassiveOpens"],
        "packets": numbers[1] + numbers[9],
        "received": numbers[0],
        "sent": numbers[8],
    }


class Phase:
    """The figures of what happens in a block."""

    def __init__(
        self,
        hosts: list[Host],
        what: str,
        rows: list[Any],
        ranks: int | None = None,
    ):
        self._ends = {"first": hosts[0], "leaf": hosts[-1]}
        count = ranks or len(hosts)
        self._row: dict[str, Any] = {"what": what, "ranks": count}
        self._rows = rows

    def __enter__(self) -> dict[str, Any]:
        self._before = {n: counts(host) for n, host in self._ends.items()}
        self._begun = time.monotonic()
        return self._row

    def __exit__(self, *error: object) -> None:
        self._row["seconds"] = round(time.monotonic() - self._begun, 2)
        for end, host in self._ends.items():
            for name, now in counts(host).items():
                before = self._before[end][name]
                self._row[f"{name}_{end}"] = now - before
        self._rows.append(self._row)
        print(json.dumps(self._row), flush=True)


def meet(ranks: int, rows: list[Any]) -> None:
    """Let ranks meet by themselves, be idle, and wait for one that is slow."""
    with Lab(ranks) as lab:
        with Phase(lab.hosts, "meet", rows):
            jobs = start_ranks(lab, "", ranks, [*STANDIN, "0"])
            for job in jobs:
                assert said_by(job).startswith("met")
        with Phase(lab.hosts, "idle", rows):
            time.sleep(IDLE_S)
        with Phase(lab.hosts, "stall", rows):
            for job in jobs[:-1]:
                assert job.stdin is not None
                job.stdin.write("step 1\n")
                job.stdin.flush()
            time.sleep(STALL_S)
        for job in jobs:
            assert job.stdin is not None
            job.stdin.close()
        for job in jobs:
            job.wait(60)


def roles_of(strategy: str, ranks: int) -> list[str]:
    """The roles of the tasks that a strategy has for so many ranks."""
    served = "Server" in strategy or "Replicas" in strategy
    return ["ps"] * served + ["worker"] * ranks


def start_ranks(
    lab: Lab,
    strategy: str,
    ranks: int,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start a task on each host, servers first, as the strategy needs it."""
    addresses: dict[str, list[str]] = {}
    tasks: list[dict[str, Any]] = []
    for role, host in zip(roles_of(strategy, ranks), lab.hosts, strict=True):
        others = addresses.setdefault(role, [])
        tasks.append({"type": role, "index": len(others)})
        others.append(f"{host.name}:4000")
    common = {
        "TORCHELASTIC_RUN_ID": "scaling",
        "WORLD_SIZE": str(len(lab.hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.hosts[0].name,
        "KERAS_TOWERS_MEETING_FOLDER": str(lab.shared),
        **(env or {}),
    }
    by_cluster = "Strategy" in strategy and "Horovod" not in strategy
    jobs = []
    for rank, (host, task) in enumerate(zip(lab.hosts, tasks, strict=True)):
        cluster = json.dumps({"cluster": addresses, "task": task})
        own = {"RANK": str(rank), **common}
        if by_cluster:
            own["TF_CONFIG"] = cluster
        jobs.append(
            host.start(
                command,
                env=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
    return jobs


def said_by(job: subprocess.Popen[str]) -> str:
    """Return the next line that a rank prints."""
    assert job.stdout is not None
    line = job.stdout.readline()
    assert line, "a rank has ended"
    return line


def step(strategy: str, ranks: int, rows: list[Any]) -> None:
    """Let real ranks train on links of 100 Mbit; the figures are of a step."""
    with Lab(len(roles_of(strategy, ranks))) as lab:
        for host in lab.hosts:
            host.rate(RATE)
        jobs = start_ranks(lab, strategy, ranks, [*STANDIN, strategy])
        for _ in range(4):
            said_by(jobs[-1])
        with Phase(lab.hosts, strategy, rows, ranks) as row:
            steps, until = 0, time.monotonic() + IDLE_S
            while time.monotonic() < until:
                said_by(jobs[-1])
                steps += standin.STEPS
            row["steps"] = steps


def launch(ranks: int, rows: list[Any]) -> None:
    """Let the launcher start ranks by ssh, until all have met."""
    hosts = -(-ranks // PER_HOST)
    with Lab(1 + hosts, ssh=True) as lab:
        slots = ",".join(f"{h.name}:{PER_HOST}" for h in lab.hosts[1:])
        with Phase(lab.hosts, "launch", rows, ranks) as row:
            job = lab.hosts[0].start(
                [sys.executable, "-m", "keras_towers", "run", "-np", str(ranks)]
                + ["-H", slots, "-m", "benchmarks.standin", "60"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            met = 0
            while met < ranks:
                met += "met" in said_by(job)
            row["launcher_cpu_s"] = _cpu_s(job.pid)


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that the launcher in ``nsenter`` has taken by itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    told = Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2]
    return sum(map(int, told.split()[11:13])) / os.sysconf("SC_CLK_TCK")


def main(
    results: Annotated[Path, typer.Argument(help="JSON to write")],
    ranks: Annotated[str, typer.Option()] = "2,4,8,16,32,64",
    training: Annotated[str, typer.Option()] = "2,4,8",
) -> None:
    """Measure stand-ins, and fewer ranks that train; write down the figures."""
    if reason := why_not(ssh=True):
        raise SystemExit(reason)
    rows: list[Any] = []
    stand_ins = [int(n) for n in ranks.split(",") if n]
    real = [int(n) for n in training.split(",") if n]
    work: list[tuple[Callable[[int, list[Any]], None], list[int]]] = [
        (meet, stand_ins),
        (launch, stand_ins),
        *((partial(step, strategy), real) for strategy in STRATEGIES),
    ]
    for measure, numbers in work:
        for number in numbers:
            measure(number, rows)
            results.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
