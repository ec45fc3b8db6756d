"""Modes of exchanges among towers, and the update that a mode needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.options import ModeName, StrategyOptions
from keras_towers.fit.update.local_sgd import LocalSGD
from keras_towers.fit.update.sharding_policy import (
    OnEachTower,
    ShardedOverTowers,
    ShardingPolicy,
)
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation.incomplete_classes import name_of
from keras_towers.foundation.notices import logger
from keras_towers.reduction import shared_memory
from keras_towers.reduction.collective_ops import (
    CollectiveOps,
    failure_of,
    hint_for,
    nccl_available,
)
from keras_towers.reduction.collectives import (
    Collectives,
    Hierarchical,
    OnDevice,
    OnTowers,
    SumsByFunction,
)
from keras_towers.reduction.compression_hooks import CommunicationHook
from keras_towers.reduction.hook_names import hook_for
from keras_towers.reduction.packing import GradientPacker, Packed
from keras_towers.reduction.rank_sum import RankSum
from keras_towers.reduction.stateful_hooks import (
    NesterovMomentum,
    StatefulHook,
    as_stateful,
)
from keras_towers.transport import devices as devices_lib

MODES: dict[ModeName, Callable[[], Collectives]] = {
    "nccl": CollectiveOps,
    "collective": CollectiveOps,
    "hierarchical": Hierarchical,
    "towers": OnTowers,
    "host": OnDevice,
}
"""The collectives that exchange tensors among towers in each mode."""


def _obstacle(mode: ModeName, devices: Sequence[str]) -> str | None:
    """Why a mode cannot run on devices; None if it can."""
    if mode == "nccl":
        available, reason = nccl_available(devices)
        return None if available else reason
    if mode == "hierarchical" and len(devices) % 2:
        return (
            "it needs an even number of towers, in two equal groups; there are "
            f"{len(devices)}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Mode:
    """The mode of exchanges among towers, and why it was chosen.

    Attributes:
        name: its name, or that of a user's function.
        reason: why it was chosen, as a phrase.
        collectives: exchanges the tensors.
        gradients: sums gradients; None: ``collectives`` does.
    """

    name: str
    reason: str
    collectives: Collectives
    gradients: Collectives | None = None


def choose(devices: Sequence[str], options: StrategyOptions) -> Mode:
    """Choose the mode for devices; warn if it is not the wanted one."""
    wanted = options.mode
    on_host = devices_lib.all_on_host(devices)
    name: ModeName = "host" if on_host else "towers"
    if callable(wanted):
        # Metrics and statistics are no gradients.
        own = SumsByFunction(wanted, name_of(wanted))
        mode = _mode(name_of(wanted), "requested", own, devices, options)
        return dataclasses.replace(
            mode, collectives=MODES[name](), gradients=mode.collectives
        )
    obstacle = _obstacle(wanted or "nccl", devices)
    if wanted and obstacle:
        reason = f"{wanted!r} was requested, but {obstacle}"
        logger.warning("using mode %r: %s", name, reason)
    elif wanted:
        name, reason = wanted, "requested"
    elif len(devices) == 1:
        reason = "one tower: nothing to reduce"
    elif on_host:
        reason = "all towers are CPUs, so sums in CPU memory need no copy"
    elif obstacle:
        reason = f"NCCL cannot run: {obstacle}"
    else:
        name = "nccl"
        reason = "several GPUs, whose links NCCL detects"
    return _mode(name, reason, MODES[name](), devices, options)


def _mode(
    name: str,
    reason: str,
    collectives: Collectives,
    devices: Sequence[str],
    options: StrategyOptions,
) -> Mode:
    """Return a mode, which was chosen for a reason."""
    on_host, packer = devices_lib.all_on_host(devices), options.packer
    if name == "collective":
        reason += f"; {hint_for(devices)} algorithm"
    if name in ("nccl", "collective") and not on_host:
        reason += "; bfloat16 is summed as float32"
    if packer is None:
        packer = not on_host
    if packer and len(devices) > 1:
        if packer is True:
            packer = GradientPacker()
        collectives = Packed(collectives, packer)
        reason += "; gradients are packed"
    return Mode(name, reason, collectives)


def fall_back_unless_tried(
    mode: Mode, config: TowerConfig, options: StrategyOptions
) -> Mode:
    """Return a mode if first exchanges over NCCL work, or it needs none.

    Else the mode "towers".

    A process tries the same devices only once.
    """
    devices = [*itertools.chain(*config.mesh)]
    over_nccl = mode.name == "nccl" or (
        mode.name == "collective" and nccl_available(devices)[0]
    )
    if not over_nccl:
        return mode
    failure = _failure(MODES["nccl"], tuple(devices))
    if not failure:
        return mode
    reason = f"NCCL does not work here: {failure}"
    logger.warning("using mode 'towers': %s", reason)
    return _mode("towers", reason, MODES["towers"](), devices, options)


@functools.cache
def _failure(kind: Callable[[], Collectives], devices: Sequence[str]) -> str:
    return failure_of(kind(), devices)


def sums_over_ranks(config: TowerConfig) -> dict[str, Any]:
    """Return what sums gradients, or changes of weights, over ranks, by name.

    They are the arguments of this name of ``WeightUpdate``; none in a job of
    one process.
    """
    options = config.options
    if config.transport.size == 1:
        return {}
    hook = _choose_hook(config)
    if options.outer_momentum:
        hook = NesterovMomentum(as_stateful(hook), options.outer_momentum)
    rank_sum = RankSum(config.transport, hook)
    if options.sync_every is None:
        return {"rank_sum": rank_sum}
    rounds = LocalSGD(
        config, options.sync_every, rank_sum, options.outer_learning_rate
    )
    return {"rank_sum": rank_sum, "local_sgd": rounds}


def create_update(
    config: TowerConfig, mode: Mode, sharding: ShardingPolicy | None = None
) -> WeightUpdate:
    """Create the update for towers that all-reduce their gradients.

    Args:
        config: the towers.
        mode: what exchanges tensors among them.
        sharding: how they divide weights; None: as the options say.
    """
    return WeightUpdate(
        config,
        sharding or choose_sharding(config, config.options),
        mode.collectives,
        mode.gradients,
        **sums_over_ranks(config),
    )


def choose_sharding(
    config: TowerConfig, options: StrategyOptions
) -> ShardingPolicy:
    """Return where towers have weights and slots, as options say."""
    updates = options.updates
    divides_weights = options.weights == "sharded"
    if divides_weights or updates == "sharded":
        option = f'{"weights" if divides_weights else "updates"}="sharded"'
        if config.num_towers * config.shards.size > 1:
            each = updates == "each"
            return ShardedOverTowers(config, option, divides_weights, each)
        if config.transport.rank == 0:
            logger.warning(
                "%s is off: there is only one tower, so there is nothing to "
                "divide",
                option,
            )
    by_default = updates in (None, "sharded")
    on_host = devices_lib.all_on_host(config.devices)
    if updates == "each" or (by_default and not on_host):
        return OnEachTower(config)
    return ShardingPolicy(config)


def _choose_hook(config: TowerConfig) -> CommunicationHook | StatefulHook:
    """Return the communication hook that ``compression`` asks for."""
    compression = config.options.compression
    on_host = devices_lib.all_on_host(config.devices)
    shares = shared_memory.available(config.transport)
    if compression is None and on_host and shares:
        return shared_memory.SharedMemoryAllReduce()
    return hook_for(compression)
