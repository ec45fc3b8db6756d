"""A cost model of the network: seconds of a step's exchanges on given links.

All exchanges run in a ring, which moves as few bytes as possible. With n
members, a ring takes n - 1 rounds, each of which moves an n-th of the bytes,
and costs the latency of a message. A sum takes twice as many rounds, since it
is scattered and then gathered. If an exchange spans several axes, it runs along
one axis after another: the towers of each host sum first, and then the hosts
do.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from keras_towers.fit.step.reports.step_costs import Exchanged
from keras_towers.partition.ir.axes import Axis
from keras_towers.partition.ir.sizes import EXAMPLES, Size, multiple_of
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.timeline import Timeline
from keras_towers.transport import messages


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of the members of an axis.

    Attributes:
        number: the number of members.
        rate: the bytes per second that each member sends, and receives at the
            same time.
        latency: the seconds that a message takes, however small.
    """

    number: int
    rate: float
    latency: float = 0.0

    def seconds(self, size: float, sent: int, is_sum: bool) -> float:
        """Return the seconds that an exchange takes.

        Args:
            size: the bytes of the result on each member.
            sent: the number of messages into which they divide it.
            is_sum: whether they sum, rather than only gather or scatter.
        """
        rounds = (2 if is_sum else 1) * (self.number - 1)
        moved = size / self.number / self.rate
        return rounds * (sent * self.latency + moved)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds.

    Attributes:
        sending: for each axis the seconds of a step's exchanges.
        computing: the seconds that it computes; None: not given.
        seconds: the seconds of the step: in each of its rounds, whichever is
            longer of computing and sending.
    """

    sending: Mapping[Axis, float]
    computing: float | None
    seconds: float

    @property
    def efficiency(self) -> float | None:
        """The fraction of the step that is spent computing; None: unknown."""
        return None if self.computing is None else self.computing / self.seconds


def time_step(
    exchanged: Iterable[Exchanged],
    axes: Mapping[Axis, Ring],
    examples: int,
    work: Mapping[int, float],
    computing: float | None = None,
) -> StepTime:
    """Return the time of a step.

    Args:
        exchanged: what it exchanges. What depends on the data is left out.
        axes: the members of each axis along which it does.
        examples: the number of examples of the global batch.
        work: of each level, how much of the step's computing is in it.
        computing: the seconds that a device computes in a step; None: unknown.
    """
    together: dict[tuple[int, bool, tuple[Axis, ...], bool], list[Exchanged]]
    together = collections.defaultdict(list)
    for part in exchanged:
        if bytes_for(part.size, examples) is not None:
            along, on_columns = tuple(part.over), "columns" in part.tensor.axes
            together[part.level, part.is_sum, along, on_columns].append(part)
    sending: dict[Axis, float] = collections.defaultdict(float)
    by_level: dict[int, float] = collections.defaultdict(float)
    for (level, is_sum, over, on_columns), group in together.items():
        size, sent = _size_and_messages(group, examples)
        for axis in over:
            # A host sends what each of its columns has.
            parts = on_columns and axis == "ranks" and "columns" in axes
            times = axes["columns"].number if parts else 1
            seconds = axes[axis].seconds(size * times, sent, is_sum)
            sending[axis] += seconds
            by_level[level] += seconds
    if computing is None:
        return StepTime(sending, None, sum(by_level.values()))
    # Without known sizes, the level of the computation is unknown.
    work = work or {0: 1.0}
    whole = sum(work.values())
    steps = (
        max(computing * work.get(level, 0) / whole, by_level[level])
        for level in {*work, *by_level}
    )
    return StepTime(sending, computing, sum(steps))


def _size_and_messages(
    group: Sequence[Exchanged], examples: int
) -> tuple[float, int]:
    """Return the bytes that are exchanged at a time, and the messages."""
    specs, size = [], 0.0
    for part in group:
        own = (bytes_for(part.size, examples) or 0) / part.groups
        size += own
        entries = math.ceil(own / part.tensor.dtype.size)
        specs.append(tf.TensorSpec([entries], part.tensor.dtype))
    return size, len(messages.group_by_bytes(specs))


def bytes_for(size: Size | int | None, examples: int) -> int | None:
    """Return the bytes for a number of examples; None if the data decide."""
    if isinstance(size, Size):
        number = multiple_of(size, EXAMPLES)
        return None if number is None else number * examples
    return size


def work_of(timeline: Timeline, sizes: TensorSizes) -> dict[int, float]:
    """Return the work of a tower in each level of a step."""
    return {
        level: sum(map(sizes.work_of, operations))
        for level, (operations, _) in enumerate(timeline.by_level)
    }
