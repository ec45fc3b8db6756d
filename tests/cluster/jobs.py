"""Jobs on the hosts of a lab, and what becomes of them."""

import json
import sys
import time

import pytest

from tests.cluster.lab import why_not
from tests.kit.processes import Process

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


class Job(Process):
    """A process on a host."""

    def __init__(self, host, command, **variables):
        command = sys.executable, *command
        super().__init__(command, popen=host.start, **variables)

    @property
    def lines(self):
        return self.output.splitlines()

    def says(self, word, times=1, limit_s=START_S):
        """Wait until it has said something so often more."""
        times += self.output.count(word)
        self.wait_for(word, times=times, limit_s=limit_s)


def met(lab, *arguments, **variables):
    """Ranks of Horovod that torchrun would have started."""
    return [
        Job(
            host,
            ["-m", "tests.cluster.endless", *arguments],
            TORCHELASTIC_RUN_ID="lab",
            RANK=str(rank),
            WORLD_SIZE=str(len(lab.hosts)),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=lab.hosts[0].name,
            MASTER_PORT="29400",
            KERAS_TOWERS_RENDEZVOUS_FOLDER=str(lab.shared),
            **variables,
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


def launched(lab, options, *endless):
    """The launcher, on the first host, and its ranks on the others.

    Args:
        lab: the hosts.
        options: of ``keras-towers run``, with words between spaces.
        *endless: the arguments of ``endless.py``; none where the options name
            another module.
    """
    module = ("-m", "tests.cluster.endless", *endless) if endless else ()
    hosts = ("-H", ",".join(host.name for host in lab.hosts[1:]))
    if "--host-discovery-script" in options:
        hosts = ()
    words = "keras_towers", "run", *hosts, *options.split(), *module
    return Job(lab.hosts[0], ["-m", *words])


def is_empty(host):
    """Wait until no process of the package runs on a host any more."""
    until = time.monotonic() + NOTICED_S
    while found := [one for one in host.commands() if "python" in one]:
        assert time.monotonic() < until, found
        time.sleep(0.5)
    return True
