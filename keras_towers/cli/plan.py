"""``keras-towers plan``: what a model needs on several devices."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.cli import plan_hosts
from keras_towers.cli.plots import check_plot, draw_memory
from keras_towers.foundation.byte_sizes import format_bytes, parse_bytes
from keras_towers.foundation.errors import TowerError, did_you_mean
from keras_towers.foundation.object_types import JsonObject
from keras_towers.inspection.user_models import check_named, find_named, naming
from keras_towers.jobs.known_engines import ENGINES
from keras_towers.jobs.launching.output import without_noise

if TYPE_CHECKING:
    from keras_towers.inspection.planning import Plan, PlanSetting

# How many names of weights are printed.
_SHOWN = 3
_ESTIMATE = (
    "The step is an estimate of the batch, activations, gradients and "
    "gathered weights that exist at the same time. Kernels also need "
    "workspaces."
)
_TIMES = (
    "Times are lower bounds: they assume that each exchange overlaps with the "
    "computation before it."
)
# The argument of a function of layouts, in messages.
_DEVICES = "of the list of the devices' names"
# The parts of a process's memory that devices have, too.
_OF_DEVICES = "variables", "a step"
# The columns of a table of hosts, with all that it may have.
_WIDTH = 100


def plan(
    target: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION")],
    towers: Annotated[int, typer.Option(min=1, metavar="N")],
    batch_size: Annotated[int, typer.Option(min=1, metavar="N")] = 32,
    device_memory: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    gather_bytes: Annotated[str | None, typer.Option(metavar="BYTES")] = None,
    layouts: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION")
    ] = None,
    cpus: Annotated[str | None, typer.Option(metavar="STRATEGY")] = None,
    hosts: Annotated[str | None, typer.Option(metavar="N,N,...")] = None,
    link_between: Annotated[str | None, typer.Option(metavar="RATE")] = None,
    link_within: Annotated[str | None, typer.Option(metavar="RATE")] = None,
    step_ms: Annotated[float | None, typer.Option(metavar="MS")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the memory that training a model needs on N devices.

    keras-towers plan my_module:build --towers 8 --device-memory 16GiB

    The command works without the devices. It prints a column for each scheme:
    a copy of the model on every device, updates="sharded", weights="sharded"
    and remat=True. With --hosts, it predicts how long a step takes on your
    links, with a line for each scheme and number of hosts.

    Args:
        target: A function without arguments. It returns a compiled model, alone
            or with data as for fit: (model, x, y) or (model, dataset).
        towers: Number of devices; with --hosts, per host.
        batch_size: Examples in a global batch; with --hosts, per host.
        device_memory: Memory of a device, such as 24GiB, to show what fits.
        gather_bytes: With weights="sharded": how many bytes of gathered weights
            a device holds at a time. Default: as in training.
        layouts: A function that gets the names of N devices, and returns a
            keras.distribution.LayoutMap or ModelParallel on them. Adds a
            column.
        cpus: Plan N CPUs of this host, which share its memory, and count a
            process as a whole: tower for one with N towers, or horovod or
            multi-worker for N with a tower each.
        hosts: Numbers of hosts, such as 1,2,3 or 1,2,...,64, where three dots
            stand for repeated doubling.
        link_between: Rate of a host's link per direction, which its devices
            share, and latency, such as 100Gbit,30us (the default latency).
        link_within: Rate from each device to the others of its host, and
            latency, such as 300GB/s,5us (the default latency).
        step_ms: Milliseconds that one device alone needs for its share of the
            batch. Default: show only the times of exchanges.
        plot: Also draw into this file (.png, .svg, .pdf), with matplotlib, the
            memory of a device during a step; with --hosts, examples per second.
        as_json: Print JSON, with all sizes in bytes.
    """
    memory = None
    if device_memory is not None:
        memory = parse_bytes(f"--device-memory {device_memory}", device_memory)
    gathered = None
    if gather_bytes is not None:
        gathered = parse_bytes(f"--gather-bytes {gather_bytes}", gather_bytes)
    if plot is not None:
        check_plot(plot, "plan")
        if hosts is not None and step_ms is None:
            raise TowerError("--plot draws examples/s: add --step-ms")
    several = plan_hosts.Hosts.of_options(
        hosts, towers, link_between, link_within, step_ms
    )
    others = {"--hosts": hosts, "--layouts": layouts, "--plot": plot}
    for option, value in others.items():
        if cpus is not None and value is not None:
            raise TowerError(f"--cpus plans no {option}: leave one of them out")
    check_named(target)
    if layouts:
        check_named(layouts)
    # TensorFlow reports what it lacks; a plan needs no device.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with without_noise():
        from keras_towers.inspection import planning

    planning.hide_gpus()
    setting = planning.PlanSetting(
        [f"/device:GPU:{index}" for index in range(towers)],
        batch_size,
        gathered,
        find_named(layouts, _DEVICES) if layouts else None,
        several.numbers if several else None,
        memory,
    )
    if cpus is not None:
        setting = _on_cpus(setting, cpus)
    if layouts:
        # Before what may take minutes.
        with naming(layouts, "cannot be planned"):
            planning.on_mesh(setting)
    with naming(target, "cannot be planned"):
        plans = planning.plan(find_named(target), setting)
    rows = several.timed(plans, memory) if several else []
    if as_json:
        document = {
            "model": plans[0].model,
            "parameters": plans[0].parameters,
            "towers": towers,
            "batch_size": batch_size,
            "device_memory": memory,
            "choices": [_as_json(one, memory) for one in plans],
        }
        if rows:
            document["choices"] = [
                _as_json(row.plan, memory) | row.as_json() for row in rows
            ]
            document["take"] = plan_hosts.verdict(rows)
        typer.echo(json.dumps(document, indent=1))
    else:
        _print(plans, rows, setting, memory, device_memory)
    if plot is not None:
        if rows:
            plan_hosts.draw_curve(rows, plot)
        else:
            draw_memory(plans, memory, plot)


def _on_cpus(setting: PlanSetting, strategy: str) -> PlanSetting:
    """Return a setting with CPUs in place of GPUs.

    Args:
        setting: the setting.
        strategy: ``tower``, or the name of an engine's strategy.
    """
    from keras_towers.transport.absent_ranks import AbsentRanks

    number = len(setting.devices)
    names = [f"/device:CPU:{index}" for index in range(number)]
    if strategy == "tower":
        return dataclasses.replace(setting, devices=names)
    # What others send is known only when they run.
    engines = {
        e.strategy: e for e in ENGINES.values() if e.messages is not None
    }
    engine = engines.get(strategy)
    if engine is None:
        known = ["tower", *engines]
        raise TowerError(
            f"--cpus {strategy} is not allowed: give {', '.join(known)}"
            f"{did_you_mean(strategy, known)}"
        )
    messages = engine.load(engine.messages) if engine.messages else None
    return dataclasses.replace(
        setting,
        devices=names[:1],
        ranks=AbsentRanks(number, number, messages),
    )


def _print(
    plans: Sequence[Plan],
    rows: Sequence[plan_hosts.OnHosts],
    setting: PlanSetting,
    memory: int | None,
    device_memory: str | None,
) -> None:
    """Print a table, and what to know about it."""
    first, towers = plans[0], len(setting.devices)
    devices = f"{towers} device{'' if towers == 1 else 's'}"
    if setting.ranks is not None:
        devices = f"a device in each of {setting.processes} processes"
    each = f"{setting.batch_size} examples per step"
    if rows:
        devices, each = f"hosts of {devices}", f"{each} and host"
    console = Console(highlight=False)
    console.print(
        f"{first.model}: {first.parameters:,} parameters on {devices}, {each}",
        soft_wrap=True,
    )
    # Wider than what is not a terminal, which has 80 columns.
    wide = Console(highlight=False, width=max(console.width, _WIDTH))
    if rows:
        wide.print(plan_hosts.table_of(rows, device_memory))
        notes = [_TIMES, *_whole(rows[-1].plan)]
    else:
        wide.print(_table(plans, memory, device_memory))
        notes = [_ESTIMATE, *_whole(first)]
    for line in notes:
        console.print(line, style="dim", soft_wrap=True)
    if memory is not None and not rows and not setting.is_on_host:
        console.print(_by_itself(plans, memory), soft_wrap=True)
    if rows:
        console.print(plan_hosts.verdict(rows), soft_wrap=True)


def _as_json(plan: Plan, memory: int | None) -> JsonObject:
    """Return a plan in bytes, for other programs."""
    costs = plan.costs
    return {
        "choice": plan.choice,
        "weights": plan.weights,
        "optimizer": plan.optimizer,
        "step": plan.step,
        "gradients": plan.gradients,
        "gathered": costs.gathered,
        "total": plan.total,
        "process": plan.process,
        "fits": plan.fits(memory),
        "sent": costs.sent.get("", 0),
        "sent_per_unit": {u: n for u, n in costs.sent.items() if u},
        "sent_is_known": not costs.has_unknown,
        "exchanges": costs.exchanges,
        "rounds": costs.rounds,
        "whole": plan.whole,
    }


def _table(
    plans: Sequence[Plan], memory: int | None, device_memory: str | None
) -> Table:
    """Return a table with a column for each choice."""

    def size(number: int | None) -> str:
        return "unknown" if number is None else format_bytes(number)

    in_process = bool(plans[0].process)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("in each process" if in_process else "on each device")
    for one in plans:
        table.add_column(one.choice, justify="right", overflow="fold")

    def row(name: str, cell: Callable[[Plan], str]) -> None:
        table.add_row(name, *map(cell, plans))

    held = sum if in_process else max
    row("weights", lambda p: size(held(p.weights)))
    row("optimizer state", lambda p: size(held(p.optimizer)))
    row("step, at its peak", lambda p: size(p.process.get("a step", p.step)))
    row("  its gradients", lambda p: size(p.gradients))
    row(
        "  gathered weights",
        lambda p: size(p.costs.gathered) if p.costs.gathered else "-",
    )
    if any(plan.costs.remat_summary for plan in plans):
        row("  computed again", _again)
    for what in plans[0].process:
        sizes = [plan.process[what] for plan in plans]
        if what not in _OF_DEVICES and any(sizes):
            table.add_row(what, *map(format_bytes, sizes))
    row("in all", lambda p: size(p.total))
    if memory is not None:
        answer = {True: "yes", False: "no", None: "unknown"}
        row(f"fits {device_memory}", lambda p: answer[p.fits(memory)])
    row("sent, and received", lambda p: p.costs.sent_summary)
    row(
        "exchanges (rounds)",
        lambda p: f"{p.costs.exchanges} ({p.costs.rounds})",
    )
    return table


def _by_itself(plans: Sequence[Plan], memory: int) -> str:
    """Say what a strategy without options does."""
    *_, last = plans
    if not last.fits(memory):
        missing = format_bytes((last.total or 0) - memory)
        return (
            f"Nothing fits: the smallest plan misses by {missing}. Use more "
            "devices or a smaller batch"
        )
    how = last.how or "copies the model to every device, as it fits"
    return f"Write `with kt.TowerStrategy():`, which {how}"


def _again(plan: Plan) -> str:
    """Return the part of the step's work that is computed again."""
    step = plan.costs.plan
    return f"{step.work:.0%}" if step.recomputed else "-"


def _whole(plan: Plan) -> Iterator[str]:
    """Say which weights no choice divides, and why."""
    for reason, paths in plan.whole.items():
        names = ", ".join(paths[:_SHOWN])
        more = ", ..." if len(paths) > _SHOWN else ""
        yield f"Whole on every device, {reason}: {len(paths)} ({names}{more})"
    if plan.is_small:
        yield "No weight can be in shards, so the table has only copies"
