"""What the options of ``keras-towers bench`` ask for."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import typer

from keras_towers.cli.bench_devices import cpu_threads
from keras_towers.cli.bench_models import MODELS
from keras_towers.cli.bench_processes import (
    default_rows,
    plan_processes,
    run_processes,
)
from keras_towers.cli.bench_rows import ROWS
from keras_towers.cli.bench_runner import Job, plan, run_towers
from keras_towers.cli.bench_strategies import (
    DEFAULT_STRATEGIES,
    MODES,
    STRATEGIES,
)
from keras_towers.cli.bench_worker import BATCH_SIZE

# A function: an option that is wrong is refused before TensorFlow starts.
Facts = Callable[[], dict[str, Any]]


class Device(StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True)
class Amounts:
    """How much to measure: timed steps of a run, runs, seconds of a run."""

    batches: int
    repeats: int
    timeout_s: float


@dataclass(frozen=True)
class Plan:
    """What to measure, where and how; and the settings for the report."""

    jobs: list[Job]
    run: Callable[[Job], dict[str, Any]]
    where: str
    settings: dict[str, Any]


def towers_plan(
    models: str | None,
    strategies: str | None,
    modes: str,
    towers: str,
    device: Device,
    adoption: bool,
    amounts: Amounts,
    facts: Facts,
) -> Plan:
    """Plan the benchmark of towers in one process.

    The arguments are those of the command. One that is wrong ends it.
    """
    model_names = choices("model", models, MODELS)
    names = choices(
        "strategy", strategies, STRATEGIES, ",".join(DEFAULT_STRATEGIES)
    )
    names += [f"towers-{mode}" for mode in choices("mode", modes, MODES, "")]
    counts = numbers("--towers", towers, least=1)
    where = _choose_device(device, counts, len(facts()["gpus"]))
    return Plan(
        plan(model_names, names, counts, amounts.repeats, adoption),
        functools.partial(
            run_towers,
            device=where,
            batches=amounts.batches,
            timeout_s=amounts.timeout_s,
        ),
        where,
        {
            "models": model_names,
            "towers": counts,
            "strategies": names,
            "batch_size": BATCH_SIZE,
            "cpu_threads": {n: cpu_threads(n) for n in counts},
        },
    )


def processes_plan(
    models: str | None,
    rows: str | None,
    processes: str,
    rank_batch: int,
    amounts: Amounts,
    facts: Facts,
) -> Plan:
    """Plan the benchmark of several processes.

    The arguments are those of the command. One that is wrong ends it.
    """
    model_names = choices("model", models, MODELS, "large")
    names = choices("strategy", rows, ROWS, ",".join(default_rows()))
    counts = numbers("--processes", processes, least=2)
    if importlib.util.find_spec("horovod") is None:
        # Its rendezvous is what the launcher starts all rows with.
        refuse("Horovod is not installed: run `keras-towers install horovod`")
    return Plan(
        plan_processes(model_names, names, counts, amounts.repeats),
        functools.partial(
            run_processes,
            batch_size=rank_batch,
            batches=amounts.batches,
            timeout_s=amounts.timeout_s,
        ),
        "cpu",
        {
            "models": model_names,
            "processes": counts,
            "strategies": names,
            "rank_batch": rank_batch,
            "cores": {n: min(n, facts()["cores"]) for n in counts},
        },
    )


def choices(
    what: str,
    text: str | None,
    allowed: Sequence[str],
    default: str | None = None,
) -> list[str]:
    """Split a list given by commas, or end with one line that says why not.

    Args:
        what: what the names stand for.
        text: the list; None: the default.
        allowed: all names.
        default: another list; None: all names. If it is empty, so may the
            given one be.
    """
    if default is None:
        default = ",".join(allowed)
    text = default if text is None else text
    names = [name.strip() for name in text.split(",") if name.strip()]
    if default and not names:
        refuse(f"no {what} given; choose {', '.join(allowed)}")
    for name in names:
        if name not in allowed:
            refuse(f"unknown {what} '{name}'; choose {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def numbers(option: str, text: str, least: int) -> list[int]:
    """Read whole numbers given by commas, or end in one line as well."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = [least - 1]
    if counts[0] < least:
        refuse(f"{option} takes whole numbers from {least}, not '{text}'")
    return counts


def refuse(reason: str) -> NoReturn:
    """End the command with the exit code of a wrong argument."""
    typer.echo(f"keras-towers bench: {reason}", err=True)
    raise typer.Exit(2)


def _choose_device(device: Device, towers: list[int], gpus: int) -> str:
    if device is Device.AUTO:
        return "gpu" if gpus >= max(towers) else "cpu"
    if device is Device.GPU and gpus < max(towers):
        refuse(f"{max(towers)} GPUs are needed for --towers, {gpus} visible")
    return device.value
