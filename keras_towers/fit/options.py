"""Options that several strategies share: declared, documented and checked.

A strategy takes some of them as keyword arguments, and passes the
``StrategyOptions`` to its ``TowerConfig`` (``components.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from keras_towers.fit.given_values import check_value
from keras_towers.foundation import settings
from keras_towers.foundation.byte_sizes import parse_bytes
from keras_towers.foundation.errors import TowerError, did_you_mean
from keras_towers.foundation.object_types import CompressionName

if TYPE_CHECKING:
    from keras.distribution import LayoutMap

    from keras_towers.reduction.collectives import Reduction
    from keras_towers.reduction.compression_hooks import CommunicationHook
    from keras_towers.reduction.packing import GradientPacker
    from keras_towers.reduction.stateful_hooks import StatefulHook

Batches: TypeAlias = Literal["split", "each"]
"""Whether towers split the global batch, or each takes a whole batch."""
Bytes: TypeAlias = int | str
"""A number of bytes, such as 2**28, or "256MiB"."""
Extent: TypeAlias = Literal["tower", "global"]
"""Whether statistics are those of a tower's examples or the global batch."""
MicroBatches: TypeAlias = int | Literal["auto"] | None
"""The number of micro-batches per tower; "auto": as many as memory requires."""
ModeName: TypeAlias = Literal[
    "nccl", "collective", "hierarchical", "towers", "host"
]
"""How the towers of a process exchange tensors."""
Remat: TypeAlias = bool | float | None
"""Whether activations are computed again; a number: this part of the work."""
Shards: TypeAlias = Literal["updates", "weights"]
"""The option that divides variables into shards."""
ShardOver: TypeAlias = Literal["job", "process"]
"""Whether the towers of all processes, or of each one, share a weight."""
Tokens: TypeAlias = Literal["per_replica", "shared"]
"""Whether each replica has a share of an update, or takes shared tokens."""
Updates: TypeAlias = Literal["once", "each", "sharded"]
"""Whether one tower updates all weights, or each its copy, or each a share."""
Weights: TypeAlias = Literal["sharded", "whole"]
"""Whether each large weight is divided into shards, one on each tower."""
Where: TypeAlias = Literal["host", "towers"]
"""Whether weights are in CPU memory, or spread over the towers."""

# Tensorpack's names of modes; its towers are GPUs.
_OF_TENSORPACK = {"cpu": "host", "gpu": "towers"}
_MAY_BE_OF_TENSORPACK = ("caching_device", "mode", "ps_device")

# Types that only exist where TensorFlow has been imported, by their modules.
_OF_TENSORFLOW = {
    "GradientPacker": "keras_towers.reduction.packing",
    "LayoutMap": "keras.distribution",
    "StatefulHook": "keras_towers.reduction.stateful_hooks",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options shared by several strategies.

    Each strategy takes some of them as keyword arguments.

    Attributes:
        average: True: gradients are the same as on one device. False: they are
            multiplied by the number of replicas, as if each replica had its own
            batch and gradients were summed, as in tensorpack.
        batches: ``"split"``: towers split the global batch. All processes get
            the same data, and each takes its share of every batch. ``"each"``:
            every tower takes a whole batch, and every process reads its own
            data. Together, these batches form the global batch. Processes may
            have different numbers of batches.
        sync_every_epoch: synchronize all towers of all processes at the end of
            each epoch, including variables that each tower changes itself
            (moving statistics).
        batch_norm: ``"global"``: BatchNormalization uses the statistics of the
            global batch, as one device does. ``"tower"``: it uses the
            statistics of each tower's examples. This needs no exchange, but
            changes results.
        micro_batches: a number k: each tower processes its examples in k parts,
            one after another, and holds the activations of one part at a time.
            The result equals that of the whole batch. If an operation such as
            BatchNormalization needs all examples, it waits for all parts, and
            earlier activations stay in memory. With ``batch_norm="tower"``,
            each part has its own statistics. ``"auto"``: as few parts as fit
            into the memory of a device, or one if this memory is unknown. If
            one of the first steps of a call runs out of memory all the same,
            it is repeated from the same weights, with a plan that needs less:
            by this and all other options that are left out. If one process
            runs out of memory, all of them repeat the step with this plan.
            None: ``"auto"`` if the memory of devices is known, else 1.
        remat: what towers compute again in the backward pass, instead of
            keeping it from the forward pass (rematerialization, as of Chen et
            al., arXiv 1604.06174). Results do not change. None: as little as is
            needed for a step that would otherwise not fit into the memory of a
            device, and nothing if this memory is unknown, as for CPUs. True:
            whatever saves at least 1% of the memory for each 1% of work that it
            adds. A number between 0 and 1: the same, but at most this part of
            the step's work. False: nothing. Unless it is False, several towers
            also compute again the layers made under ``keras.RematScope`` or
            with ``keras.remat``. A single tower does so only with True, or if a
            step would not fit; asynchronous towers never do.
        mode: how the towers of a process sum gradients and exchange other
            tensors: ``"nccl"``, ``"collective"`` (TensorFlow's collective ops:
            a ring on CPUs, NCCL on GPUs), ``"hierarchical"`` (two groups; needs
            an even number of towers), ``"towers"`` (each tower sums some
            tensors), ``"host"`` (the CPU sums all), or None to choose
            automatically. If a mode cannot run, another replaces it, and the
            log says why. You can also give your own function, a
            ``keras_towers.extending.Reduction``.
        updates: ``"once"``: tower 0 updates the weights and distributes them.
            ``"each"``: every tower updates its own copy. ``"sharded"``: every
            tower of all processes updates its shard of each large weight, and
            holds the optimizer's state for this shard only, as in ZeRO stage 1.
            None: ``"sharded"`` if a model would not fit otherwise; else
            ``"once"`` if the towers share memory, and ``"each"`` if not.
        weights: ``"sharded"``: every tower holds only its shard of each large
            weight and of the optimizer's state, as in ZeRO stage 3 or FSDP. If
            an operation needs a whole weight, towers gather it. Results do not
            change. ``"whole"``: every tower, or one, has all of it. None, which
            is best at first: ``"sharded"`` if the memory of devices is known
            and a model would not fit otherwise, else ``"whole"``.
        gather_bytes: with ``weights="sharded"``: the bytes of gathered weights
            that a tower holds at a time, as a number or a text such as
            "256MiB". With a smaller number, towers exchange more often. While
            towers gather a weight larger than a quarter of it, they gather no
            other one, but keep what they hold, and may exceed the number. If a
            weight is larger than the whole number, they gather it in slices
            where operations can take these. None: a quarter of the model's
            weights, but at least 16 MiB and at most 512 MiB, or less if a step
            would not fit otherwise.
        layouts: a ``keras.distribution.LayoutMap`` on a mesh of this process's
            devices, as for ``ModelParallelStrategy``. Every process has such a
            mesh, whose first axis counts towers. None: each tower is a device.
        shard_over: with weights or updates in shards: ``"job"``: the towers of
            all processes share each large weight. ``"process"``: the towers of
            each process share it, and every process has all shards, as with
            hybrid shards (HSDP). Weights are then gathered within a process,
            and processes exchange only the sums of gradients.
        packer: a ``GradientPacker``, which packs the tensors that towers
            exchange into a few buffers; True for one with default settings,
            False for none. None: pack on accelerators but not on CPUs.
        compression: how processes exchange gradients. None: without loss; the
            strategy chooses how. ``"none"``: without loss, and always over the
            strategy's engine. All other values change results: ``"fp16"``,
            ``"fp16-shards"``, ``"bf16"``, ``"fp16-feedback"``,
            ``"bf16-feedback"``, ``"power-sgd"``
            (``keras_towers.extending.PowerSGD(rank)`` for a rank other than 4),
            a function of a transport, tensors and a key, or a
            ``keras_towers.extending.StatefulHook``. Processes never compress
            sparse gradients, metrics and statistics.
        sync_every: None: ranks exchange gradients in every step. A number k:
            each rank updates its own weights from its part of each batch. Ranks
            average their weights after k updates, at the end of an epoch and
            before ``evaluate`` and ``predict``. This changes results. The
            optimizer's variables differ between ranks until the end of the
            epoch (``sync_every_epoch``); files that you save between two
            averages have rank 0's values.
        outer_momentum: with ``sync_every``: the outer step uses the mean change
            of the weights since the last average as a gradient, with this
            Nesterov momentum, as in DiLoCo.
        outer_learning_rate: the learning rate of the outer step. With 1, and no
            momentum, ranks get the mean of their weights.
        scale_gradient: divide gradients by the number of towers or workers.
            With SGD, one batch on each of them then moves the weights as far as
            one synchronous step. This does not affect optimizers that ignore
            the scale of gradients, such as Adam. Workers that update together
            apply the average of their gradients if True, and the sum if False.
        stall_timeout_s: seconds that a worker waits for slow or restarting
            workers before it fails; in one process, seconds in which no replica
            finishes a step.

    Raises:
        TowerError: a value is not allowed, or contradicts another.
    """

    average: bool = True
    batches: Batches = "split"
    sync_every_epoch: bool = True
    batch_norm: Extent = "global"
    micro_batches: MicroBatches = None
    remat: Remat = None
    mode: ModeName | Reduction | None = None
    updates: Updates | None = None
    weights: Weights | None = None
    gather_bytes: Bytes | None = None
    layouts: LayoutMap | None = None
    shard_over: ShardOver = "job"
    packer: GradientPacker | bool | None = None
    compression: CompressionName | CommunicationHook | StatefulHook | None = (
        None
    )
    sync_every: int | None = None
    outer_momentum: float = 0.0
    outer_learning_rate: float = 1.0
    scale_gradient: bool = True
    stall_timeout_s: float = settings.STALL_TIMEOUT_S

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            check_value(name, getattr(self, name), hint)
        if isinstance(self.micro_batches, int) and self.micro_batches < 1:
            raise TowerError(
                f"micro_batches={self.micro_batches!r} is not allowed: give "
                "the number of parts of a tower's batch, 1 or more, 'auto' or "
                "None."
            )
        if not isinstance(self.remat, bool | None) and not 0 < self.remat < 1:
            raise TowerError(
                f"remat={self.remat!r} is not allowed: give True, False, None, "
                "or the part of the step's work that may be computed again, "
                "more than 0 and less than 1."
            )
        if (self.gathered_bytes or 0) < 0:
            raise TowerError(
                f"gather_bytes={self.gather_bytes!r} is not allowed: give a "
                'number of bytes, 0 or more, or a text such as "256MiB".'
            )
        self._check_shards()
        self._check_local_sgd()

    @property
    def gathered_bytes(self) -> int | None:
        """``gather_bytes`` as a number; None: it depends on the model."""
        number = self.gather_bytes
        if isinstance(number, str):
            return parse_bytes(f"gather_bytes={number!r}", number)
        return number

    @property
    def in_shards(self) -> list[str]:
        """The options that divide variables into shards, as text."""
        return [
            "a layout map" if name == "layouts" else f'{name}="sharded"'
            for name in ("layouts", "weights", "updates")
            if getattr(self, name) not in (None, "once", "each", "whole")
        ]

    def _check_shards(self) -> None:
        """Refuse options that shards contradict."""
        in_shards = self.in_shards
        gathers = self.weights == "sharded" or self.layouts is not None
        if self.gather_bytes is not None and not gathers:
            raise TowerError(
                'gather_bytes only applies with weights="sharded": set it, or '
                "leave gather_bytes out."
            )
        if self.shard_over != StrategyOptions.shard_over and not in_shards:
            raise TowerError(
                f"shard_over={self.shard_over!r} only applies with "
                'weights="sharded", updates="sharded" or layouts: set one of '
                "them, or leave shard_over out."
            )
        if self.layouts is not None and (self.weights or self.updates):
            name = "updates" if self.updates else "weights"
            raise TowerError(
                f"layouts contradict {name}={getattr(self, name)!r}: a layout "
                "map already divides the weights, and every device updates its "
                f"part. Leave {name} out."
            )
        if self.weights == self.updates == "sharded":
            raise TowerError(
                'weights="sharded" contradicts updates="sharded": sharded '
                "updates keep whole weights on every tower. Leave one of them "
                "out. Either divides the optimizer's state."
            )
        if not in_shards or self.shard_over == "process":
            return
        for name in ("compression", "sync_every"):
            value = getattr(self, name)
            # Neither of these changes anything.
            if value not in (None, "none"):
                raise TowerError(
                    f"{in_shards[0]} contradicts {name}={value!r}: each rank "
                    'holds only its own shards, unless shard_over="process". '
                    "Set this, or leave one of them out."
                )

    def _check_local_sgd(self) -> None:
        """Refuse options of local SGD that contradict each other."""
        steps = self.sync_every
        momentum, rate = self.outer_momentum, self.outer_learning_rate
        if steps is None:
            if (momentum, rate) != (0, 1):
                raise TowerError(
                    "outer_momentum and outer_learning_rate only apply with "
                    "sync_every: set it, such as sync_every=16."
                )
            return
        if steps < 1:
            raise TowerError(
                f"sync_every={steps!r} is not allowed: give the number of "
                "steps in a round, 1 or more, or None."
            )
        if not 0 <= momentum < 1 or not 0 < rate < math.inf:
            raise TowerError(
                f"outer_momentum={momentum!r} with outer_learning_rate={rate!r}"
                " is not allowed: give a momentum of 0 or more and less than "
                "1, and a learning rate of more than 0."
            )
        if not self.average:
            raise TowerError(
                f"sync_every={steps} contradicts average=False: with "
                "sync_every, ranks never sum their gradients. Leave one of "
                "them out."
            )


def free_shards(options: StrategyOptions) -> list[Shards]:
    """Return the options that may divide variables, if memory requires it.

    They are left out, and contradict nothing. The last one saves most.
    """
    names: list[Shards] = []
    if options.updates is not None:
        # With sharded weights, the update would be, too.
        return names
    for name in ("updates", "weights"):
        # What a user's own function gets is not divided.
        if getattr(options, name) is None and not callable(options.mode):
            with contextlib.suppress(TowerError):
                divided_by(options, name)
                names.append(name)
    return names


def divided_by(options: StrategyOptions, name: Shards) -> StrategyOptions:
    """Return options with variables in shards.

    Args:
        options: the options.
        name: the one that divides them.

    Raises:
        TowerError: other options contradict that.
    """
    changed: dict[str, Any] = {name: "sharded"}
    return dataclasses.replace(options, **changed)


class StepKeywords(TypedDict, total=False):
    """The ``StrategyOptions`` of synchronous steps."""

    average: bool
    batches: Batches
    sync_every_epoch: bool
    batch_norm: Extent
    micro_batches: MicroBatches
    remat: Remat


class AllReduceKeywords(StepKeywords, total=False):
    """The ``StrategyOptions`` of towers that all-reduce their gradients."""

    mode: ModeName | Reduction | None
    updates: Updates | None
    weights: Weights | None
    gather_bytes: Bytes | None
    packer: GradientPacker | bool | None


class MeshKeywords(StepKeywords, total=False):
    """The ``StrategyOptions`` of a mesh of devices, which divides weights."""

    mode: ModeName | None
    gather_bytes: Bytes | None
    packer: GradientPacker | bool | None


class RankKeywords(AllReduceKeywords, total=False):
    """The ``StrategyOptions`` of ranks that all-reduce their gradients."""

    layouts: LayoutMap | None
    shard_over: ShardOver
    compression: CompressionName | CommunicationHook | StatefulHook | None
    sync_every: int | None
    outer_momentum: float
    outer_learning_rate: float


class ServerKeywords(TypedDict, total=False):
    """The ``StrategyOptions`` of workers of parameter servers."""

    scale_gradient: bool
    batches: Batches
    sync_every_epoch: bool
    stall_timeout_s: float


def options_of(
    strategy: object, keywords: type, options: Mapping[str, Any], **fixed: Any
) -> StrategyOptions:
    """Return the options that a strategy got as keyword arguments.

    Args:
        strategy: the strategy.
        keywords: the class above that declares the strategy's options.
        options: the arguments.
        **fixed: options that the strategy chooses itself.

    Raises:
        TowerError: the strategy does not have this option, or its value is
            not allowed.
    """
    kind = type(strategy)
    named = inspect.signature(kind).parameters
    known = [name for name in named if name != "options"]
    check_names(kind.__name__, options, [*known, *keywords.__annotations__])
    if "mode" in options:
        options = {**options, "mode": current_name(options["mode"])}
    return StrategyOptions(**options, **fixed)


def check_names(
    strategy: str, options: Iterable[str], known: Sequence[str]
) -> None:
    """Refuse options that a strategy does not have.

    Args:
        strategy: its class.
        options: their names.
        known: the names of all options of the strategy.
    """
    for name in options:
        if name not in known:
            advice = did_you_mean(name, known)
            advice = advice or f". Its options are {', '.join(known)}."
            raise TowerError(f"{strategy} has no option {name!r}{advice}")


def check_values(options: Mapping[str, Any], hints: Mapping[str, str]) -> None:
    """Check the options of a strategy, which need not have been imported.

    Args:
        options: names and values.
        hints: the annotation of each name in the constructor; an option of
            ``StrategyOptions`` that is declared there has none. What needs
            TensorFlow is not checked.
    """
    shared = {}
    for name, value in options.items():
        if name in _MAY_BE_OF_TENSORPACK:
            value = current_name(value)
        if name not in hints:
            shared[name] = value
            continue
        # Some annotations need TensorFlow.
        with contextlib.suppress(NameError):
            check_value(name, value, eval(hints[name], globals()))
    StrategyOptions(**shared)


def current_name(name: Any) -> Any:
    """Return the name here for tensorpack's ``"cpu"`` or ``"gpu"``."""
    is_text = isinstance(name, str)
    return _OF_TENSORPACK.get(name, name) if is_text else name


def _hints() -> dict[str, Any]:
    """Return the types of the options; missing objects have stand-ins."""
    loaded = [m for m in _OF_TENSORFLOW.values() if m in sys.modules]
    return _resolved_hints(tuple(loaded))


@functools.cache
def _resolved_hints(loaded: tuple[str, ...]) -> dict[str, Any]:
    functions = ("CommunicationHook", "Reduction")
    names: dict[str, Any] = dict.fromkeys(functions, Callable[..., object])
    for name, module in _OF_TENSORFLOW.items():
        if module in loaded:
            names[name] = getattr(sys.modules[module], name)
        else:
            names[name] = type(name, (), {})
    return typing.get_type_hints(StrategyOptions, localns=names)
