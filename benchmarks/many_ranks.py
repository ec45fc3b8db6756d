"""Try the store of a job with more ranks than there are machines.

``python -m benchmarks.many_ranks 64 1000 4000`` prints a table with a column
for each number of ranks. The store is the real one, in the process beside rank
0 that serves it where another launcher starts the ranks. The ranks are
simulated, in a few processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.simulated_ranks import RANKS_PER_HOST, SimulatedRank
from keras_towers.foundation import system
from keras_towers.jobs.rendezvous import rank_helper
from keras_towers.jobs.rendezvous.network import LOOPBACK
from keras_towers.jobs.rendezvous.signatures import Endpoint

PROCESSES = 2
LIMIT_S = 150.0
"""What a phase may take."""


class Part:
    """The simulated ranks of one process; its methods are phases.

    Args:
        endpoint: the store.
        ranks: the ranks.
        size: how many ranks there are in all.
    """

    def __init__(self, endpoint: Endpoint, ranks: range, size: int):
        self._all = {r: SimulatedRank(endpoint, r, size) for r in ranks}

    def take_beats(self) -> tuple[list[float], int]:
        """Return how long heartbeats took since the last call, and errors."""
        beats: list[float] = []
        errors = 0
        for rank in self._all.values():
            beats += rank.beats
            errors += rank.link.errors
            rank.beats, rank.link.errors = [], 0
        return beats, errors

    async def _each(
        self, act: Callable[[SimulatedRank], Awaitable[None]]
    ) -> None:
        await asyncio.gather(*map(act, self._all.values()))

    async def meet(self) -> None:
        """Let all meet."""
        await self._each(SimulatedRank.meet)

    async def exchange_addresses(self) -> None:
        """Let all become tasks of TensorFlow."""
        await self._each(SimulatedRank.exchange_addresses)

    async def train(self, seconds: float) -> None:
        """Let all begin what they do while they train, for some time."""
        for rank in self._all.values():
            rank.begin()
        await asyncio.sleep(seconds)

    async def save(self, seconds: float) -> None:
        """Let all wait until rank 0, which takes some time, has saved."""

        async def wait_for_rank_0(rank: SimulatedRank) -> None:
            if rank.rank:
                await rank.link.wait("saved")
                return
            await asyncio.sleep(seconds)
            await rank.end_save()

        await self._each(wait_for_rank_0)

    async def fail(self, which: int) -> None:
        """Let a call fail on one rank, until all have connected again."""
        if which in self._all:
            await self._all[which].fail()
        while any(rank.round == 0 for rank in self._all.values()):
            await asyncio.sleep(0.02)

    async def end(self, which: int, is_silent: bool) -> None:
        """Let one rank end, until all others know."""
        if which in self._all:
            await self._all.pop(which).end(is_silent)
        name = f"rank {which} on host{which // RANKS_PER_HOST}"
        while any(name not in rank.gone for rank in self._all.values()):
            await asyncio.sleep(0.05)


def _run_part(
    pipe: Connection, endpoint: Endpoint, ranks: range, size: int
) -> None:
    """Run the phases that are asked for, until the pipe is closed."""

    async def run() -> None:
        loop, part = asyncio.get_running_loop(), Part(endpoint, ranks, size)
        while True:
            phase, *arguments = await loop.run_in_executor(None, pipe.recv)
            begun = time.monotonic()
            running = getattr(part, phase)(*arguments)
            took_s: float | None = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running, LIMIT_S)
                took_s = time.monotonic() - begun
            pipe.send((took_s, *part.take_beats()))

    with contextlib.suppress(EOFError):
        asyncio.run(run())
    os._exit(0)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a phase took.

    Attributes:
        seconds: how long; None: it did not end.
        cores: the CPU time of the store, divided by the time.
        files: the largest number of files that the store had open.
        beats: how long the store took to answer each heartbeat, sorted.
        errors: how many requests failed.
    """

    seconds: float | None
    cores: float
    files: int
    beats: list[float]
    errors: int

    def percentile(self, share: float) -> float | None:
        """The time in which the store answered a share of the heartbeats."""
        last = len(self.beats) - 1
        return self.beats[round(share * last)] if self.beats else None


class Simulation:
    """A store and simulated ranks, in processes of their own."""

    def __init__(self, size: int):
        too_few = system.allow_open_files(2 * size + 100, f"{size} ranks")
        if too_few:
            raise SystemExit(too_few)
        self.size = size
        place = Endpoint(LOOPBACK, 0, "")
        self._helper, endpoint = rank_helper.start_store(place, size)
        self._store = psutil.Process(self._helper.pid)
        # Not forked, as this process may have threads.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for number in range(PROCESSES):
            pipe, other = context.Pipe()
            ranks = range(number, size, PROCESSES)
            process = context.Process(
                target=_run_part, args=(other, endpoint, ranks, size)
            )
            process.start()
            other.close()
            self._pipes.append(pipe)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        rank_helper.stop_helper(self._helper)

    def run(self, phase: str, *arguments: object) -> Measured:
        """Run a phase, a method of ``Part``, and measure it."""
        begun, cpu_s, files = time.monotonic(), self._cpu_s(), 0
        for pipe in self._pipes:
            pipe.send((phase, *arguments))
        left, parts = set(self._pipes), []
        while left:
            ready = left.intersection(wait(left, 0.1))
            parts += [pipe.recv() for pipe in ready]
            left -= ready
            files = max(files, self._store.num_fds())
        cores = (self._cpu_s() - cpu_s) / (time.monotonic() - begun)
        times, beats, errors = zip(*parts, strict=True)
        return Measured(
            None if None in times else max(times),
            cores,
            files,
            sorted(itertools.chain(*beats)),
            sum(errors),
        )

    def _cpu_s(self) -> float:
        times = self._store.cpu_times()
        return float(times.user + times.system)


def measure(size: int, seconds: float, with_silent: bool) -> dict[str, Any]:
    """Measure the store of a job with so many simulated ranks.

    Args:
        size: the number of ranks.
        seconds: how long they train, and how long rank 0 saves.
        with_silent: whether one rank hangs, too, which takes long.
    """
    with Simulation(size) as ranks:
        met = ranks.run("meet")
        addresses = ranks.run("exchange_addresses")
        idle = ranks.run("train", seconds)
        saved = ranks.run("save", seconds)
        failed = ranks.run("fail", size - 1)
        phases = [met, addresses, idle, saved, failed]
        phases.append(ranks.run("end", size // 2, False))
        if with_silent:
            phases.append(ranks.run("end", size // 2 - 1, True))
    silent_s = phases[-1].seconds if with_silent else None
    return {
        "all have met, s": met.seconds,
        "all know the addresses of TensorFlow's tasks, s": addresses.seconds,
        "CPU of the store while ranks train, cores": idle.cores,
        "a heartbeat is answered, median, s": idle.percentile(0.5),
        "a heartbeat is answered, 99 %, s": idle.percentile(0.99),
        "the same while rank 0 saves, 99 %, s": saved.percentile(0.99),
        "a call has failed until all have connected again, s": failed.seconds,
        "a rank has ended until all know, s": phases[5].seconds,
        "a rank is silent until all know, s": silent_s,
        "files that the store has open while ranks train": idle.files,
        "files that the store has open at most": max(
            phase.files for phase in phases
        ),
        "requests that failed": sum(phase.errors for phase in phases),
    }


def main(
    sizes: Annotated[list[int], typer.Argument(help="Numbers of ranks.")],
    seconds: Annotated[
        float, typer.Option(help="How long ranks train, and save.")
    ] = 20,
    silent: Annotated[
        bool, typer.Option(help="Whether a rank hangs, too.")
    ] = True,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
) -> None:
    """Try the store of a job with many simulated ranks."""
    found = {}
    for size in sizes:
        found[size] = measure(size, seconds, silent)
        print(f"{size} ranks: load {os.getloadavg()[0]:.1f}", flush=True)
    print("| ranks |", *(f"{size:,} |" for size in sizes))
    print("|---|", *("---|" for _ in sizes), sep="")
    for name in found[sizes[0]]:
        cells = (found[size][name] for size in sizes)
        print(f"| {name} |", *(f"{_text(cell)} |" for cell in cells))
    if json_ is not None:
        json_.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
