"""Simulated ranks: coroutines that speak to the store of a job as ranks do.

They send what ranks send, as often, in as many connections, and wait for the
answers. They compute nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from typing import Any

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import rank_helper, store
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.jobs.rendezvous.network import LOOPBACK
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
)
from keras_towers.jobs.rendezvous.store import Progress

RANKS_PER_HOST = 8
_NOT_FOUND = "404"


class _Link:
    """Makes requests as ``StoreClient`` does.

    Args:
        endpoint: the store.

    Attributes:
        errors: how many requests have failed.
    """

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self.errors = 0

    async def ask(
        self, method: str, key: str, body: bytes = b"", hold_s: float = 0
    ) -> bytes | None:
        """Make a request; None: there is no value, or the request failed."""
        is_read = method == "GET" and hold_s
        hold = f"{store.HOLD}{hold_s}" if is_read else ""
        path = f"/{store.SCOPE}/{key}{hold}"
        try:
            async with asyncio.timeout(settings.STORE_ANSWER_S + hold_s):
                return await self._ask(method, path, body)
        except OSError:
            self.errors += 1
            return None

    async def _ask(self, method: str, path: str, body: bytes) -> bytes | None:
        place = self._endpoint
        reader, writer = await asyncio.open_connection(
            place.address, place.port
        )
        lines = (
            f"{method} /{place.prefix}{path} HTTP/1.1",
            f"{SIGNATURE}: {place.sign_request(method, path, body)}",
            f"Content-Length: {len(body)}",
        )
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        try:
            answer = await reader.read()
        finally:
            writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        if not head:
            raise ConnectionResetError
        first, *rest = head.decode().split("\r\n")
        if first.split()[1] == _NOT_FOUND:
            return None
        headers = dict(line.split(": ") for line in rest)
        expected = place.sign_answer(method, path, content)
        if headers.get(SIGNATURE) != expected:
            raise ValueError("the answer's signature is wrong")
        return content

    async def wait(self, key: str) -> Any:
        """Wait for a value."""
        found = None
        while found is None:
            found = await self.ask("GET", key, hold_s=settings.LISTEN_S)
        return json.loads(found)

    async def call(
        self, method: str, *arguments: object, hold_s: float = 0
    ) -> Any:
        """Call a method of the store; None: the request failed."""
        body = json.dumps(arguments).encode()
        answer = await self.ask("POST", method, body, hold_s)
        return json.loads(answer or "null")


class SimulatedRank:
    """Speaks to the store as a rank and the process beside it do.

    Attributes:
        link: its connection.
        beats: how long the store took to answer each heartbeat.
        gone: when this rank has heard of each rank that is gone.
        round: how often it has connected again.
    """

    def __init__(self, endpoint: Endpoint, rank: int, size: int):
        self.rank, self.size = rank, size
        self.link = _Link(endpoint)
        self.beats: list[float] = []
        self.gone: dict[str, float] = {}
        self.round = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def _give(self, key: str, value: object, awaited: str = "") -> Any:
        """Contribute to a list, and wait for it, or for another value."""
        hold_s, found = settings.LISTEN_S, None
        given = key, self.rank, self.size, value, hold_s, awaited
        while found is None:
            answer = await self.link.call("give", *given, hold_s=hold_s)
            found = answer and answer[1]
        return found

    async def meet(self) -> None:
        """Meet the other ranks."""
        host = f"host{self.rank // RANKS_PER_HOST}"
        introduction = {
            "host": f"{host}-12345678",
            "name": host,
            "address": LOOPBACK,
            "cores": list(range(16)),
            "nonce": f"{self.rank:016x}",
        }
        placement = f"{rank_helper.PLACEMENT}-{self.rank}"
        await self._give(rank_helper.INTRODUCTIONS, introduction, placement)

    async def exchange_addresses(self) -> None:
        """Become a task of TensorFlow, of which each knows all addresses."""
        own = f"{LOOPBACK}:{10_000 + self.rank}"
        assert len(await self._give("tasks", own)) == self.size

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
        async for _ in self._pauses(rank_helper.heartbeat_pause_s(self.size)):
            begun = time.monotonic()
            await self._sign(next(numbers))
            self.beats.append(time.monotonic() - begun)

    async def _sign(self, sign: object) -> None:
        """Send a sign of life, as the process beside the rank does."""
        key = f"{store.HEARTBEAT}{self.rank}"
        await self.link.ask("PUT", key, json.dumps(sign).encode())

    async def _report(self) -> None:
        """Report a progress that is different each time."""
        progress = Progress(self.size, 60, action="update 10", waits=True)
        numbers = itertools.count()
        async for _ in self._pauses(settings.STALL_BEAT_S):
            progress.position = [0, 3, next(numbers)]
            fields = dataclasses.asdict(progress)
            answer = await self.link.call("report", self.rank, fields)
            for name in answer["gone"] if answer else ():
                self.gone.setdefault(name, time.monotonic())

    async def _listen(self) -> None:
        """Leave each call that has failed, and connect again with all."""
        while True:
            await self.link.wait(f"failed-{self.round}")
            for key in (f"left-{self.round}", f"renewed-{self.round}"):
                await self._give(key, None)
            self.round += 1

    async def end_save(self) -> None:
        """Tell, as rank 0, that it has saved."""
        await self.link.ask("PUT", "saved", b'""')

    async def fail(self) -> None:
        """Tell that this rank's call has failed."""
        failure = {"rank": self.rank, "call": 1, "why": "ValueError: my bug"}
        key = f"failed-{self.round}"
        await self.link.call("setdefault", key, failure)

    async def end(self, is_silent: bool) -> None:
        """End this rank; if it is silent, as one that hangs."""
        for task in self._tasks:
            task.cancel()
        if not is_silent:
            await self._sign(TaskState.ENDED)
