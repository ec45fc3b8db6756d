"""Simulated ranks: coroutines that speak to the store of a job as ranks do.

They send what ranks send, as often, in as many connections, and wait for the
answers. They compute nothing.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import rank_helper, store
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.jobs.rendezvous.network import LOOPBACK
from keras_towers.jobs.rendezvous.signatures import (
    SIGNATURE,
    Endpoint,
    sign_answer,
)
from keras_towers.jobs.rendezvous.store import Progress
from keras_towers.jobs.rendezvous.store_link import (
    ANY,
    AWAITED,
    SCOPE,
    encode_request,
)

RANKS_PER_HOST = 8
_ANY = "POST", f"/{SCOPE}/{ANY}"
_NOT_FOUND = 404


class _Link(asyncio.Protocol):
    """The connection of a simulated rank, with what ``StoreLink`` sends.

    Args:
        endpoint: the store.

    Attributes:
        errors: how many requests have failed.
    """

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self.errors = 0
        self._transport: asyncio.Transport | None = None
        self._connecting = asyncio.Lock()
        self._received = bytearray()
        # The methods and paths of requests, and their answers to come.
        self._requests: collections.deque[
            tuple[str, str, asyncio.Future[bytes | None]]
        ] = collections.deque()
        self._awaited: dict[str, asyncio.Event] = {}

    async def ask(
        self, method: str, key: str, body: bytes = b""
    ) -> bytes | None:
        """Make a request; None: there is no value, or the request failed."""
        path = f"/{SCOPE}/{key}"
        answer: asyncio.Future[bytes | None] = asyncio.Future()
        try:
            async with asyncio.timeout(settings.STORE_ANSWER_S):
                transport = await self._connected()
                self._requests.append((method, path, answer))
                self._send(transport, method, path, body)
                return await answer
        except OSError:
            self.errors += 1
            return None

    async def wait(self, key: str) -> Any:
        """Wait for a value, while other requests are made."""
        found = None
        while found is None:
            event = self._awaited[f"{SCOPE}/{key}"] = asyncio.Event()
            self._ask_for_any(await self._connected())
            await event.wait()
            found = await self.ask("GET", key)
        return json.loads(found)

    async def _connected(self) -> asyncio.Transport:
        place = self._endpoint.address, self._endpoint.port
        async with self._connecting:
            if self._transport is None:
                loop = asyncio.get_running_loop()
                self._transport, _ = await loop.create_connection(
                    lambda: self, *place
                )
        return self._transport

    def _ask_for_any(self, transport: asyncio.Transport) -> None:
        places = json.dumps([*self._awaited]).encode()
        self._send(transport, *_ANY, places)

    def _send(
        self, transport: asyncio.Transport, method: str, path: str, body: bytes
    ) -> None:
        transport.write(encode_request(self._endpoint, method, path, body))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._received.clear()
        for _, _, answer in self._requests:
            if not answer.done():
                answer.set_exception(ConnectionResetError())
        self._requests.clear()
        # Who waits asks again.
        self._wake([*self._awaited])

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            first, *lines = head.decode().split("\r\n")
            headers = dict(line.split(": ") for line in lines)
            if len(rest) < int(headers["Content-Length"]):
                return
            content = bytes(rest[: int(headers["Content-Length"])])
            del self._received[: len(head) + len(end) + len(content)]
            self._take(int(first.split()[1]), headers.get(SIGNATURE), content)

    def _take(self, status: int, signature: str | None, content: bytes) -> None:
        """Take an answer."""
        method, path = _ANY
        if status != AWAITED:
            method, path, answer = self._requests.popleft()
            # The rank may not have waited so long.
            if not answer.done():
                answer.set_result(None if status == _NOT_FOUND else content)
        expected = sign_answer(self._endpoint.secret, method, path, content)
        if status != _NOT_FOUND and signature != expected:
            raise ValueError("the answer's signature is wrong")
        if status == AWAITED:
            self._wake(json.loads(content))
            if self._awaited and self._transport is not None:
                self._ask_for_any(self._transport)

    def _wake(self, places: Iterable[str]) -> None:
        for place in places:
            event = self._awaited.pop(place, None)
            if event is not None:
                event.set()


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
        self._endpoint = endpoint
        self._tasks: list[asyncio.Task[None]] = []

    async def _give(self, key: str, value: object) -> None:
        part = json.dumps([self.rank, self.size, value]).encode()
        await self.link.ask("POST", f"{store.CONTRIBUTIONS}{key}", part)

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
        await self._give(rank_helper.INTRODUCTIONS, introduction)
        await self.link.wait(f"{rank_helper.PLACEMENT}-{self.rank}")

    async def exchange_addresses(self) -> None:
        """Become a task of TensorFlow, of which each knows all addresses."""
        await self._give("tasks", f"{LOOPBACK}:{10_000 + self.rank}")
        assert len(await self.link.wait("tasks")) == self.size

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
        beside = _Link(self._endpoint)
        key = f"{store.HEARTBEAT}{self.rank}"
        await beside.ask("PUT", key, json.dumps(sign).encode())
        self.link.errors += beside.errors
        beside.close()

    async def _report(self) -> None:
        """Report a progress that is different each time."""
        progress = Progress(self.size, 60, action="update 10", waits=True)
        numbers = itertools.count()
        async for _ in self._pauses(settings.STALL_BEAT_S):
            progress.position = [0, 3, next(numbers)]
            body = json.dumps(dataclasses.asdict(progress)).encode()
            key = f"{store.PROGRESS}{self.rank}"
            answer = await self.link.ask("POST", key, body)
            for name in json.loads(answer or b'{"gone": []}')["gone"]:
                self.gone.setdefault(name, time.monotonic())

    async def _listen(self) -> None:
        """Leave each call that has failed, and connect again with all."""
        while True:
            await self.link.wait(f"failed-{self.round}")
            for key in (f"left-{self.round}", f"renewed-{self.round}"):
                await self._give(key, None)
                await self.link.wait(key)
            self.round += 1

    async def end_save(self) -> None:
        """Tell, as rank 0, that it has saved."""
        await self.link.ask("PUT", "saved", b'""')

    async def fail(self) -> None:
        """Tell that this rank's call has failed."""
        failure = {"rank": self.rank, "call": 1, "why": "ValueError: my bug"}
        body = json.dumps(failure).encode()
        await self.link.ask("POST", f"failed-{self.round}", body)

    async def end(self, is_silent: bool) -> None:
        """End this rank; if it is silent, as one that hangs."""
        for task in self._tasks:
            task.cancel()
        if not is_silent:
            await self._sign(TaskState.ENDED)
