"""Jobs on the hosts of a lab, and what becomes of them."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from tests.cluster.lab import why_not

_REASON = why_not(ssh=True)
NEEDS_HOSTS = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
]
# Whoever is lost is named within this, by everybody.
NOTICED_S = 60
START_S = 240
STEPS = "steps"


class Job:
    """A process on a host, whose output is read."""

    def __init__(self, host, command, **env):
        self.host = host
        self.lines = []
        self.process = host.start(
            [sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    @property
    def text(self):
        return "\n".join(self.lines)

    def says(self, word, times=1, limit_s=START_S):
        """Wait until it has said something so often more."""
        wanted = self.text.count(word) + times
        until = time.monotonic() + limit_s
        while self.text.count(word) < wanted:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.1)

    def ends(self, limit_s=NOTICED_S):
        """Wait until it ends and has been read; its exit code."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text) from None
        # Whom it has started may hold its output, and live on.
        self._reader.join(5)
        return code


def met(lab, *arguments, script="cluster.endless"):
    """Ranks of Horovod that torchrun would have started."""
    return [
        Job(
            host,
            ["-m", f"tests.{script}", *arguments],
            TORCHELASTIC_RUN_ID="lab",
            RANK=str(rank),
            WORLD_SIZE=str(len(lab.hosts)),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=lab.hosts[0].name,
            MASTER_PORT="29400",
            KERAS_TOWERS_RENDEZVOUS_FOLDER=str(lab.shared),
        )
        for rank, host in enumerate(lab.hosts)
    ]


def tasks(lab, roles, strategy):
    """Tasks of ``TF_CONFIG``, one on each host."""
    cluster = {}
    places = []
    for role, host in zip(roles, lab.hosts, strict=True):
        addresses = cluster.setdefault(role, [])
        places.append({"type": role, "index": len(addresses)})
        addresses.append(f"{host.name}:4000")
    return [
        Job(
            host,
            ["-m", "tests.cluster.endless", strategy],
            TF_CONFIG=json.dumps({"cluster": cluster, "task": place}),
        )
        for host, place in zip(lab.hosts, places, strict=True)
    ]


def launched(lab, *arguments):
    """The launcher, on the first host, and its ranks on the others."""
    hosts = "-H", ",".join(host.name for host in lab.hosts[1:])
    if "--host-discovery-script" in arguments:
        hosts = ()
    return Job(lab.hosts[0], ["-m", "keras_towers", "run", *hosts, *arguments])


def is_empty(host):
    """Wait until no process of the package runs on a host any more."""
    until = time.monotonic() + NOTICED_S
    while found := list(_running(host)):
        assert time.monotonic() < until, found
        time.sleep(0.5)
    return True


def _running(host):
    own = os.readlink(f"/proc/{host.first_process()}/ns/pid")
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") != own:
                continue
            command = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if any("python" in pathlib.Path(part).name for part in command[:1]):
            yield command
