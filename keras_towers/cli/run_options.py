"""The options of ``keras-towers run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="What each rank runs.")
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGUMENTS",
        help="What is passed to SCRIPT, options too.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "-np",
        "--num-proc",
        min=1,
        metavar="N",
        help="Number of processes. Default: the slots of the hosts that are "
        "named or that a cluster has allocated.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="Hosts to run on. Default: those of the cluster's "
        "allocation, or this machine.",
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(help="Hosts in a file, with lines like 'host slots=2'."),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Run the unmodified script inside this strategy, such as "
        "horovod. Default: the script enters a strategy itself.",
    ),
]
NoStrategy = Annotated[
    bool,
    typer.Option(
        "--no-strategy",
        help="Let each process train a model of its own. Without it, fit is "
        "an error where neither --strategy nor the script has a strategy.",
    ),
]
Towers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Towers per process, with --strategy or --ps. Without GPUs the "
        "CPU is split into as many.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**32 - 1,
        help="Random seed of all ranks, with --strategy. Default: a random "
        "seed.",
    ),
]
Module = Annotated[
    bool,
    typer.Option("-m", help="SCRIPT is a module name, as for python -m."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Also write each rank's output to a file here.",
    ),
]
StallWarning = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="HOROVOD_STALL_CHECK_TIME_SECONDS",
        help="Seconds until a waiting rank reports which ranks it waits "
        "for; 0: never.",
    ),
]
StallShutdown = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        help="Seconds until a stalled job is ended; 0: never.",
    ),
]
Grace = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seconds that a script may take to end after SIGTERM, for a "
        "backup (kt.Backup), before it is killed.",
    ),
]
NetworkInterface = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Network interface for the rendezvous. Default: loopback if "
        "all ranks are local, otherwise the one with a route to the hosts.",
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="ssh port of the hosts."),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Print which rank is started on which host."
    ),
]
Servers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Servers of BytePS to start beside the processes. Default: 1 "
        "with --strategy byteps, else none.",
    ),
]
Ps = Annotated[
    int | None,
    typer.Option(
        "--ps",
        min=1,
        metavar="N",
        help="Number of parameter servers, on this machine.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of processes that train, connected by TensorFlow on this "
        "machine. Each task finds the others by TF_CONFIG.",
    ),
]
MinNp = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Elastic jobs: minimum number of ranks.",
    ),
]
MaxNp = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Elastic jobs: maximum number of ranks.",
    ),
]
HostDiscoveryScript = Annotated[
    Path | None,
    typer.Option(
        help="Elastic jobs: a program that prints the available hosts, one "
        "host:slots per line; run once a second.",
    ),
]
Slots = Annotated[
    int,
    typer.Option(
        min=1,
        help="Elastic jobs: slots of hosts that are printed without a number.",
    ),
]
ElasticTimeout = Annotated[
    int,
    typer.Option(
        min=1,
        help="Elastic jobs: seconds to wait for --min-np slots before giving "
        "up.",
    ),
]
BlacklistCooldownRange = Annotated[
    tuple[int, int],
    typer.Option(
        metavar="SECONDS SECONDS",
        help="Elastic jobs: shortest and longest time to avoid a host after a "
        "worker failed on it; doubles with each failure.",
    ),
]
ResetLimit = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Elastic jobs: end the job after ranks have joined or left this "
        "many times.",
    ),
]
