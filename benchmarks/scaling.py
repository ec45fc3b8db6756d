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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import standin
from tests.cluster.lab import Host, Lab

IDLE_S, STALL_S = 20, 40
RATE = "100mbit"
STRATEGIES = (
    "HorovodStrategy",
    "MultiWorkerTowerStrategy",
    "DistributedParameterServerStrategy",
)
PER_HOST = 8


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
            jobs = [_standin(lab, rank) for rank in range(ranks)]
            for job in jobs:
                assert job.stdout.readline().startswith("met")
        with Phase(lab.hosts, "idle", rows):
            time.sleep(IDLE_S)
        with Phase(lab.hosts, "stall", rows):
            for job in jobs[:-1]:
                job.stdin.write("step 1\n")
                job.stdin.flush()
            time.sleep(STALL_S)
        for job in jobs:
            job.stdin.close()
        for job in jobs:
            job.wait(60)


def _standin(
    lab: Lab, rank: int, strategy: str = "", cluster: Any = None
) -> Any:
    return lab.hosts[rank].start(
        [sys.executable, "-m", "benchmarks.standin", strategy or "0"],
        env={
            **(
                {"TF_CONFIG": json.dumps(cluster)}
                if strategy and "Horovod" not in strategy
                else {}
            ),
            "TORCHELASTIC_RUN_ID": "scaling",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(lab.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.hosts[0].name,
            "KERAS_TOWERS_MEETING_FOLDER": str(lab.shared),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def step(strategy: str, ranks: int, rows: list[Any]) -> None:
    """Let real ranks train on links of 100 Mbit; the figures are of a step."""
    served = "ParameterServer" in strategy
    roles = ["ps"] * served + ["worker"] * ranks
    addresses: dict[str, list[str]] = {}
    with Lab(len(roles)) as lab:
        places = []
        for role, host in zip(roles, lab.hosts, strict=True):
            host.rate(RATE)
            others = addresses.setdefault(role, [])
            places.append({"type": role, "index": len(others)})
            others.append(f"{host.name}:4000")
        jobs = [
            _standin(lab, rank, strategy, {"cluster": addresses, "task": place})
            for rank, place in enumerate(places)
        ]
        last = jobs[-1].stdout
        for _ in range(4):
            assert last.readline(), "a rank has ended"
        with Phase(lab.hosts, strategy, rows, ranks) as row:
            steps, until = 0, time.monotonic() + IDLE_S
            while time.monotonic() < until:
                assert last.readline(), "a rank has ended"
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
            assert job.stdout is not None
            met, said = 0, []
            while met < ranks:
                said.append(job.stdout.readline())
                assert said[-1], said
                met += "met" in said[-1]
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
