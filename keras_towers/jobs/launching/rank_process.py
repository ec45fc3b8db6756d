"""Starts one process of a job, here or by ssh, with its environment.

The process is a child of an agent (``agent.py``), which ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from keras_towers.foundation import commands, settings, system
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs import agent
from keras_towers.jobs.launching.output import Console, Sink, Tagger, tag
from keras_towers.jobs.rendezvous.network import LOOPBACK, is_local

_READ_BYTES = 1 << 16
# These variables belong to a machine or a session, not to the job.
_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOSTNAME|HOME|USER|LOGNAME|MAIL|SHELL"
    r"|TERM|TMPDIR|SSH_.*|XDG_.*|DISPLAY|.*CUDA_VISIBLE_DEVICES"
)
_AGENT = [sys.executable, "-I", "-S", str(Path(agent.__file__).absolute())]


class ProcessContext:
    """The command, place and console that the processes of a job share.

    Attributes:
        command: what they run.
        address: where they meet.
        console: shows their output.
        events: gets each process that has ended.
        processes: those of this round.
        logins: limits how many log in to a host at the same time.
    """

    command: list[str]
    address: str
    console: Console
    events: queue.SimpleQueue[Any]
    processes: list[RankProcess]
    logins: dict[str, threading.Semaphore]


@dataclasses.dataclass(frozen=True)
class RankStart:
    """How a process is started.

    Attributes:
        name: the tag of its output; None: its output is not tagged.
        index: its rank, or another number that is unique in the job.
        variables: its environment.
        host: where it runs.
        local_size: how many processes share the cores of the host.
        command: its command; None: the job's.
    """

    name: str | None
    index: int
    variables: dict[str, str] = dataclasses.field(compare=False)
    host: str = LOOPBACK
    local_size: int = 1
    command: Sequence[str] | None = None


class RankProcess:
    """A process of a job; its agent ends it with all of its children.

    Args:
        run: the job, to whose processes it is added.
        start: how it is started.

    Attributes:
        host: None if it runs on this machine.
        hostname: the name of its host in the job's plan.
        code: its exit code; None while it runs.
        stopped: whether the launcher has ended it.
        follows: whether it has told that another one's failure is why it ends.
    """

    follows = False

    def __init__(self, run: ProcessContext, start: RankStart):
        self.name, self.index = start.name, start.index
        self.hostname: str = start.host
        self.host: str | None = None if is_local(start.host) else start.host
        self.code: int | None = None
        self.stopped: bool = False
        self._login = contextlib.ExitStack()
        self._taggers: dict[IO[str], Tagger] = {}
        self._readers: list[threading.Thread] = []
        console, launch, environment = run.console, _AGENT, start.variables
        untagged = self.name is None
        direct = untagged and console.folder is None and console.inherited
        answers = self.host is not None and not direct
        if self.host:
            if run.address == LOOPBACK:
                raise TowerError(
                    "the job uses the loopback interface, because it started "
                    "on this machine only: start it with --network-interface"
                )
            environment = {**exported(os.environ), **environment}
            launch = ssh_command(self.host, _AGENT)
            # A login may take longer than this: signals are not handled while
            # this waits.
            logins = run.logins[self.host]
            if answers and logins.acquire(timeout=settings.SSH_CONNECT_S):
                self._login.callback(logins.release)
        order = {
            "read_from": self._start_agent(launch, direct),
            "command": start.command or run.command,
            "folder": str(system.working_folder()),
            "environment": environment,
            "local_size": start.local_size,
            "rendezvous": run.address,
            "grace_s": settings.GRACE_S,
            # The pipe to an agent on this machine closes with the launcher.
            "lost_s": settings.LOST_S if self.host else None,
            "frozen_s": settings.FROZEN_S,
            "answers": answers,
        }
        self._write(json.dumps(order).encode() + b"\n")
        self._stop = agent.StopDetector(self._process.pid)
        if not direct:
            self._start_readers(console)
        run.processes.append(self)
        threading.Thread(
            target=self._wait, args=(run.events.put,), daemon=True
        ).start()

    def _start_agent(self, launch: Sequence[str], direct: bool) -> list[int]:
        """Start the agent; return the file that its process reads, if any."""
        stdin: list[int] = []
        # A single rank reads the launcher's stdin. It gets a copy, because the
        # agent's own stdin is our pipe.
        if self.name is None and not self.host and sys.__stdin__ is not None:
            stdin = [os.dup(sys.__stdin__.fileno())]
        try:
            self._process = subprocess.Popen(
                launch,
                stdin=subprocess.PIPE,
                stdout=None if direct else subprocess.PIPE,
                stderr=None if direct else subprocess.PIPE,
                # Shields it from the terminal's Ctrl-C, which the launcher
                # handles.
                start_new_session=True,
                pass_fds=stdin,
            )
        finally:
            for copy in stdin:
                os.close(copy)
        return stdin

    def tail(self) -> str:
        """The end of the process's stderr."""
        tagger = self._taggers.get(sys.stderr)
        return tagger.tail.decode(errors="replace") if tagger else ""

    @property
    def killed(self) -> bool:
        """Whether a signal has ended it."""
        return self.code is not None and signal_name(self.code) is not None

    def send(self, number: int) -> None:
        """Send the process a signal."""
        self._write(f"{number}\n".encode())

    def resume(self) -> bool:
        """Let the agent, or ssh, go on; return whether it was stopped.

        While a signal has stopped it, nobody learns how its process ends.
        """
        is_stopped = self._stop.is_stopped()
        if is_stopped:
            self._process.send_signal(signal.SIGCONT)
        return is_stopped

    def stop(self) -> None:
        """Ask the agent to end the process and its children; do not wait."""
        self.stopped = True
        try:
            assert self._process.stdin
            self._process.stdin.close()
        except OSError:  # The agent has already ended.
            return

    def kill(self) -> None:
        """Kill the agent or the ssh connection if it does not respond."""
        if self.code is None:
            self._process.kill()

    def _write(self, line: bytes) -> None:
        try:
            assert self._process.stdin
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # The agent has ended, and its output says why.

    def _start_readers(self, console: Console) -> None:
        copy = console.file(self.name or "0")
        pipes = (self._process.stdout, self._process.stderr)
        for pipe, stream in zip(pipes, (sys.stdout, sys.stderr), strict=True):
            prefix = tag(self.name, self.index, stream) if self.name else b""
            common = console.tracebacks if self.name else None
            tagger = Tagger(console.sinks[stream], prefix, common)
            self._taggers[stream] = tagger
            answers = self.host and stream is sys.stdout
            login = self._login if answers else None
            thread = threading.Thread(
                target=_pump, args=(pipe, tagger, copy, login), daemon=True
            )
            thread.start()
            self._readers.append(thread)

    def _wait(self, on_end: Callable[[RankProcess], None]) -> None:
        code = self._process.wait()
        self._login.close()
        for reader in self._readers:
            reader.join(settings.GRACE_S)
        with contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        self.code = code if code >= 0 else 128 - code
        on_end(self)


def _pump(
    pipe: IO[bytes],
    tagger: Tagger,
    copy: Sink | None,
    login: contextlib.ExitStack | None,
) -> None:
    """Copy a stream of a process to its tagger, and to a file.

    Args:
        pipe: the stream.
        tagger: tags its lines, and writes them to the launcher's stream.
        copy: the file.
        login: closed when the agent answers on this stream; None: it does not.
    """
    # A rank's two streams share a file, so write whole lines to it.
    line = b""
    ready = select.poll()
    with pipe:
        ready.register(pipe, select.POLLIN)
        while True:
            if tagger.holds and not ready.poll(1000 * settings.TRACEBACK_S):
                tagger.release()
            data = os.read(pipe.fileno(), _READ_BYTES)
            if not data:
                break
            if login and agent.ANSWER in data:
                # It follows any output of the login on the host.
                data = data.replace(agent.ANSWER, b"", 1)
                login.close()
                login = None
                if not data:
                    continue
            *lines, line = (line + data).splitlines(keepends=True)
            if line.endswith((b"\n", b"\r")) or len(line) > _READ_BYTES:
                lines, line = [*lines, line], b""
            if copy:
                copy.write(b"".join(lines))
            tagger.feed(data)
    if copy:
        copy.write(line)
    tagger.close()


def signal_name(code: int) -> str | None:
    """The name of the signal that an exit code stands for, if any."""
    try:
        return signal.Signals(code - 128).name if code > 128 else None
    except ValueError:
        return None


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this environment to pass to other machines."""
    return {
        name: value
        for name, value in environment.items()
        if not _NOT_EXPORTED.fullmatch(name)
    }


def ssh_command(host: str, command: list[str]) -> list[str]:
    """The command that runs ``command`` on another machine."""
    # Host keys, ports and user names are left to the user's ssh configuration.
    return [
        "ssh",
        # Never prompt: a rank has no terminal.
        "-oBatchMode=yes",
        f"-oConnectTimeout={settings.SSH_CONNECT_S}",
        # ssh ends after three of these without an answer.
        f"-oServerAliveInterval={settings.LOST_S / 4:.0f}",
        host,
        shlex.join(command),
    ]


def check_reachable(hosts: Collection[str]) -> None:
    """Check, in parallel, that ssh reaches hosts."""
    limit_s = 2 * settings.SSH_CONNECT_S

    def check(host: str) -> None:
        try:
            result = commands.run_command(ssh_command(host, ["true"]), limit_s)
        except FileNotFoundError:
            raise TowerError(
                f"cannot reach host {host} by ssh: there is no ssh command on "
                "this machine"
            ) from None
        if result.code != 0:
            raise TowerError(
                f"cannot reach host {host} by ssh, which "
                f"{result.reason(limit_s)}"
            )

    if hosts:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(check, hosts))
