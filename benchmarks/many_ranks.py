"""Try the store of a job with more ranks than there are machines.

``python -m benchmarks.many_ranks 64 1000 4000`` prints a table with a column
for each number of ranks. The store is the real one, in the process beside rank
0 that serves it where another launcher starts the ranks. The ranks are
simulated: coroutines of a few processes, that send what ranks send, as often,
in as many connections, and wait for the answers. They compute nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from keras_towers import settings, system
from keras_towers.rendezvous import meet, store
from keras_towers.rendezvous.liveness import TaskState
from keras_towers.rendezvous.network import LOOPBACK
from keras_towers.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    sign_answer,
)
from keras_towers.rendezvous.store import Progress
from keras_towers.rendezvous.store_link import (
    ANY,
    SCOPE,
    encode_request,
)

PROCESSES = 2
_RANKS_PER_HOST = 8
LIMIT_S = 150.0
"""What a phase may take."""


class _Request:
    def __init__(self, method: str, path: str):
        self.method, self.path = method, path
        self.answer: asyncio.Future[bytes | None] = asyncio.Future()


class SimulatedRank:
    """Speaks to the store as a rank and the process beside it do.

    Attributes:
        beats: how long the store took to answer each heartbeat.
        errors: how many requests have failed.
        gone: when this rank has heard of each rank that is gone.
    """

    def __init__(
        self, endpoint: Endpoint, rank: int, size: int, keeps: bool = True
    ):
        self.rank, self.size = rank, size
        self._keeps = keeps
        self.beats: list[float] = []
        self.errors = 0
        self.gone: dict[str, float] = {}
        self.round = 0
        self._endpoint = endpoint
        self._writer: asyncio.StreamWriter | None = None
        self._connecting, self._asked = asyncio.Lock(), asyncio.Event()
        self._requests: collections.deque[_Request] = collections.deque()
        # What it waits for.
        self._events: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def _ask(
        self, method: str, key: str, body: bytes = b""
    ) -> bytes | None:
        """Make a request as ``StoreLink`` does; None: there is no value."""
        request = _Request(method, f"/{SCOPE}/{key}")
        try:
            async with asyncio.timeout(settings.STORE_ANSWER_S):
                await self._send(request, body)
                return await request.answer
        except OSError:
            self.errors += 1
            return None

    async def wait(self, key: str) -> Any:
        """Wait for a value, in the same connection."""
        found = None
        while found is None:
            event = self._events[f"{SCOPE}/{key}"] = asyncio.Event()
            try:
                await self._ask_for_any()
            except OSError:
                self.errors += 1
                await asyncio.sleep(settings.NETWORK_POLL_S)
                continue
            await event.wait()
            found = await self._ask("GET", key)
        return json.loads(found)

    async def _ask_for_any(self) -> None:
        request = _Request("POST", f"/{SCOPE}/{ANY}")
        await self._send(request, json.dumps([*self._events]).encode())

    async def _send(self, request: _Request, body: bytes) -> None:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await self._connect()
                reads = self._read_answers(reader)
                self._tasks.append(asyncio.create_task(reads))
        self._requests.append(request)
        self._asked.set()
        self._writer.write(
            encode_request(
                self._endpoint, request.method, request.path, body, self._keeps
            )
        )

    async def _connect(
        self,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, port = self._endpoint.address, self._endpoint.port
        return await asyncio.open_connection(address, port)

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, EOFError):
            while self._keeps or self._requests:
                if not self._requests:
                    self._asked.clear()
                    await asyncio.wait_for(
                        self._asked.wait(), settings.STORE_IDLE_S
                    )
                request = self._requests[0]
                content = await self._read_answer(reader, request)
                self._requests.popleft()
                # This rank may not have waited so long.
                if not request.answer.done():
                    request.answer.set_result(content)
                if request.path.endswith(ANY):
                    self._wake(json.loads(content or b"[]"))
                if self._events and not self._requests:
                    await self._ask_for_any()
        # What has no answer fails; who waits asks again.
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        for request in self._requests:
            if request.path.endswith(ANY) or request.answer.done():
                continue
            request.answer.set_exception(ConnectionResetError())
        self._requests.clear()
        self._wake([*self._events])

    def _wake(self, places: Iterable[str]) -> None:
        for place in places:
            event = self._events.pop(place, None)
            if event is not None:
                event.set()

    async def _read_answer(
        self, reader: asyncio.StreamReader, request: _Request
    ) -> bytes | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ") for line in head[1:-2])
        content = await reader.readexactly(int(headers["Content-Length"]))
        if " 404 " in head[0]:
            return None
        secret = self._endpoint.secret
        expected = sign_answer(secret, request.method, request.path, content)
        if headers.get(SIGNATURE) != expected:
            raise OSError("the answer's signature is wrong")
        return content

    async def _give(self, key: str, value: object) -> None:
        part = json.dumps([self.rank, self.size, value]).encode()
        await self._ask("POST", f"{store.PARTS}{key}", part)

    async def meet(self) -> None:
        """Meet the other ranks."""
        host = f"host{self.rank // _RANKS_PER_HOST}"
        introduction = {
            "host": f"{host}-12345678",
            "name": host,
            "address": LOOPBACK,
            "cores": list(range(16)),
            "nonce": f"{self.rank:016x}",
        }
        await self._give(meet.INTRODUCTIONS, introduction)
        await self.wait(f"{meet.PLACEMENT}-{self.rank}")

    async def exchange_addresses(self) -> None:
        """Become a task of TensorFlow, of which each knows all addresses."""
        await self._give("tasks", f"{LOOPBACK}:{10_000 + self.rank}")
        assert len(await self.wait("tasks")) == self.size

    def begin(self) -> None:
        """Begin what a rank does while it trains."""
        for activity in (self._beat(), self._report(), self._listen()):
            self._tasks.append(asyncio.create_task(activity))

    async def _pauses(self, pause_s: float) -> Any:
        """Yield again and again, not at the same time as other ranks do."""
        await asyncio.sleep(self.rank * 7919 % self.size / self.size * pause_s)
        while True:
            yield
            await asyncio.sleep(pause_s)

    async def _beat(self) -> None:
        """Send heartbeats; those of rank 0 are the answers of its store."""
        if not self.rank:
            return
        numbers = itertools.count()
        async for _ in self._pauses(settings.HEARTBEAT_S):
            begun = time.monotonic()
            await self._sign(next(numbers))
            self.beats.append(time.monotonic() - begun)

    async def _sign(self, sign: object) -> None:
        """Send a sign of life, as the process beside the rank does."""
        beside = SimulatedRank(self._endpoint, self.rank, self.size, False)
        key = f"{store.HEARTBEAT}{self.rank}"
        await beside._ask("PUT", key, json.dumps(sign).encode())
        self.errors += beside.errors

    async def _report(self) -> None:
        """Report a progress that is different each time."""
        progress = Progress(self.size, 60, action="update 10", waits=True)
        numbers = itertools.count()
        async for _ in self._pauses(settings.STALL_BEAT_S):
            progress.position = [0, 3, next(numbers)]
            body = json.dumps(dataclasses.asdict(progress)).encode()
            answer = await self._ask(
                "POST", f"{store.PROGRESS}{self.rank}", body
            )
            for name in json.loads(answer or b'{"gone": []}')["gone"]:
                self.gone.setdefault(name, time.monotonic())

    async def _listen(self) -> None:
        """Leave each call that has failed, and connect again with all."""
        while True:
            await self.wait(f"failed-{self.round}")
            for key in (f"left-{self.round}", f"renewed-{self.round}"):
                await self._give(key, None)
                await self.wait(key)
            self.round += 1

    async def end_save(self) -> None:
        """Tell, as rank 0, that it has saved."""
        await self._ask("PUT", "saved", b'""')

    async def fail(self) -> None:
        """Tell that this rank's call has failed."""
        failure = {"rank": self.rank, "call": 1, "why": "ValueError: my bug"}
        body = json.dumps(failure).encode()
        await self._ask("POST", f"failed-{self.round}", body)

    async def end(self, is_silent: bool) -> None:
        """End this rank; if it is silent, as one that hangs."""
        for task in self._tasks:
            task.cancel()
        if not is_silent:
            await self._sign(TaskState.ENDED)


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
            errors += rank.errors
            rank.beats, rank.errors = [], 0
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
                await rank.wait("saved")
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
        name = f"rank {which} on host{which // _RANKS_PER_HOST}"
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
        self._helper, endpoint = meet.start_store(place, size)
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
        meet.stop_helper(self._helper)

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
