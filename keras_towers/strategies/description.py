"""The lines of ``describe()`` about a strategy.

``fit/step/reports/step_reports.py`` has those about steps.
"""

from __future__ import annotations

from keras_towers.fit.components import KerasStrategy, TowerConfig
from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.step.reports import step_reports
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.system import resident_bytes
from keras_towers.reduction.hook_names import describe_effect
from keras_towers.strategies.modes import Mode
from keras_towers.transport import SingleProcess, devices as devices_lib
from keras_towers.transport.engine_transport import EngineTransport


def lines_of(strategy: KerasStrategy, mode: Mode) -> list[str]:
    """Return the lines after the first, given how towers work together."""
    config, update = strategy._config, strategy._update
    options, several = config.options, config.transport.size > 1
    changes = []
    if options.batch_norm == "tower":
        changes.append(
            'batch_norm="tower" changes results: BatchNormalization uses the '
            "statistics of each tower's own rows"
        )
    if several:
        changes += _rank_options(options)
    gradients = "those of one device"
    if changes:
        gradients = f"not {gradients}, as the lines below say"
    replicas = config.num_towers * config.job.size
    if not options.average:
        gradients += f" times {replicas}, the number of replicas"
    data = "every tower takes a whole batch"
    if options.batches == "split":
        data = "the global batch is split over the towers"
    sums, *state = _mode_lines(update, mode)
    lines = [sums, f"gradients are {gradients}; {update.description}", data]
    lines += [*strategy._adoption.describe_held(), *state]
    if options.micro_batches == "auto":
        lines.append(
            "each tower processes its rows in as few parts as memory allows"
        )
    elif options.micro_batches not in (None, 1):
        lines.append(
            f"each tower processes its rows in {options.micro_batches} parts, "
            "one after another; with fewer rows, some are empty"
        )
    lines += changes
    if type(config.transport) is not SingleProcess:
        lines.append(
            f"rank {config.job.rank} of {config.job.size} over "
            f"{config.transport.name}; {replicas} towers in total"
        )
    peak = resident_bytes("VmHWM")
    if several and peak is not None:
        lines.append(f"the peak memory of this process is {format_bytes(peak)}")
    lines += step_reports.describe_planned(strategy)
    lines += [*_axes(config), *_nccl(config)]
    return lines + step_reports.describe_steps(config)


def _axes(config: TowerConfig) -> list[str]:
    """Describe the axes of places, if there are several."""
    sizes = {
        "ranks": config.transport.size,
        "towers": config.num_towers,
        "columns": len(config.mesh[0]),
    }
    axes = [f"{n} {axis}" for axis, n in sizes.items() if n > 1]
    return [f"a step computes on {' x '.join(axes)}"] if axes[1:] else []


def _mode_lines(update: WeightUpdate, mode: Mode) -> list[str]:
    """Describe where gradients are summed, and what their hook holds."""
    lines = [f'mode "{mode.name}": {mode.reason}']
    rank_sum = update.rank_sum
    if rank_sum is not None and rank_sum.held_bytes:
        lines.append(
            "state of the communication hook: "
            f"{rank_sum.held_bytes:,} bytes on each rank"
        )
    return lines


def _nccl(config: TowerConfig) -> list[str]:
    """Describe whether ranks on GPUs sum over NCCL, if that is known."""
    transport = config.transport
    if devices_lib.all_on_host(config.devices[:1]):
        return []
    if not isinstance(transport, EngineTransport):
        return []
    line = transport.describe_nccl()
    return [line] if line else []


def _rank_options(options: StrategyOptions) -> list[str]:
    """Describe options of the exchange between ranks that change results."""
    line = describe_effect(options.compression)
    lines = [line] if line else []
    if options.sync_every is not None:
        end = "averages the ranks' weights"
        if (options.outer_momentum, options.outer_learning_rate) != (0, 1):
            end = (
                "takes an outer step with their mean change (momentum "
                f"{options.outer_momentum:g}, learning rate "
                f"{options.outer_learning_rate:g})"
            )
        lines.append(
            f"sync_every={options.sync_every} changes results: every rank "
            f"updates its own weights, and the end of each round {end}"
        )
    return lines
