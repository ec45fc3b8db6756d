"""Measure a step of two ranks whose link is slow, by strategy and option.

Run it with ``python -m benchmarks.slow_link JSON``, as root; needs what ``make
test-cluster`` needs. Each rank is on a host of its own and computes on one
core; a server of parameters is on a third host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.scaling import Phase, roles_of, said_by, start_ranks
from tests.cluster.lab import Lab, why_not

PROGRAM = str(Path(__file__).with_name("slow_link_rank.py"))
ONE_CORE = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
# The strategies of the package, and what they are given; ``""``: none.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("socket", {}),
    *(
        ("HorovodStrategy", options)
        for options in (
            {"compression": "none"},
            {"compression": "fp16"},
            {"compression": "bf16"},
            {"compression": "fp16-feedback"},
            {"compression": "bf16-feedback"},
            {"compression": "power-sgd"},
            {"sync_every": 8},
            {"sync_every": 8, "compression": "bf16"},
        )
    ),
    ("MultiWorkerTowerStrategy", {}),
    ("MultiWorkerTowerStrategy", {"compression": "bf16"}),
    ("SyncReplicasStrategy", {}),
    ("DistributedParameterServerStrategy", {}),
]


def measure(
    kind: str,
    options: dict[str, Any],
    rate: str,
    steps: int,
    rows: list[Any],
    python: str = sys.executable,
    ranks: int = 2,
) -> None:
    """Let ranks train, or copy; the figures are of one step."""
    with Lab(len(roles_of(kind, ranks))) as lab:
        for host in lab.hosts:
            host.rate(rate)
        jobs = start_ranks(
            *(lab, kind, ranks),
            [python, PROGRAM, kind, json.dumps(options), str(steps)],
            {**ONE_CORE, "GLOO_SOCKET_IFNAME": "eth0"},
        )
        assert said_by(jobs[-1]) == "begun\n"
        with Phase(lab.hosts, kind or "keras", rows, ranks) as row:
            row |= {"options": options, "rate": rate, "steps": steps}
            row |= json.loads(said_by(jobs[-1]))


def main(
    results: Annotated[Path, typer.Argument(help="JSON to write")],
    rates: Annotated[str, typer.Option(help="in tc's units")] = "200mbit,1gbit",
    steps: Annotated[int, typer.Option(help="whole rounds of 8")] = 16,
    torch: Annotated[
        str, typer.Option(help="a Python interpreter that has PyTorch")
    ] = "",
    only: Annotated[str, typer.Option(help="strategies, by name")] = "",
) -> None:
    """Measure all rows at each rate; write down the figures."""
    if reason := why_not():
        raise SystemExit(reason)
    rows: list[Any] = []
    for rate in rates.split(","):
        for kind, options in ROWS:
            if not only or kind in only.split(","):
                ranks = 2 if kind else 1
                measure(kind, options, rate, steps, rows, ranks=ranks)
                results.write_text(json.dumps(rows, indent=1))
        for ranks in (1, 2) if torch else ():
            measure("torch", {}, rate, steps, rows, torch, ranks)
            results.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
