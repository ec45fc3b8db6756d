"""When a step computes what: the order of its operations.

TensorFlow's executor runs what became ready last first. In a backward pass the
gradients of weights, which nothing waits for, then run at its very end, and
each keeps the gradient and the input of its layer. So an operation that takes
memory waits for those that, in the order of the program, have freed memory
before it. Whatever runs at a time then needs no more memory than the order
does, and what may be in flight beside it::

    gradient of layer 2's input     takes memory
    gradient of layer 2's weights   frees the gradient of layer 3's input
    gradient of layer 1's input     takes memory: waits for the line above

XLA orders what it compiles itself.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable

from keras_towers.partition.lifetimes import Lifetimes
from keras_towers.partition.program import Operation, Program, Tensor
from keras_towers.partition.tensor_sizes import TensorSizes

# The part of what a step needs at most that may be in flight besides, and that
# of the smallest tensors that wait.
_IN_FLIGHT = 32
_SMALL = 512


def keep_order(
    program: Program, sizes: TensorSizes, parts: int = 1
) -> Program:
    """Let operations wait for those that free memory before them.

    Args:
        program: the program; its operations get others that they run after.
        sizes: the sizes of its tensors.
        parts: the number of micro-batches of a tower.
    """
    lifetimes = Lifetimes(program, sizes, parts)
    most = lifetimes.most_bytes()
    # By what is added to a graph together.
    queues: dict[Hashable, _Queue] = collections.defaultdict(
        lambda: _Queue(most // _IN_FLIGHT, most // _SMALL)
    )
    for index, event in enumerate(lifetimes.events):
        if not isinstance(event, Operation):
            continue
        queue = queues[event.level, event.phase, event.on_columns]
        reused = lifetimes.reused[index]
        if lifetimes.made[index] or reused is not None:
            queue.take(event, lifetimes.made[index])
        if reused is not None and lifetimes.bytes_of(reused) > queue.small:
            # Its memory is taken over only if nobody else uses it any more.
            queue.wait(event, _users(lifetimes, reused))
        for tensor in lifetimes.ending(index):
            if tensor is not reused:
                users = _users(lifetimes, tensor)
                queue.free(lifetimes.bytes_of(tensor), users)
    return program


def _users(lifetimes: Lifetimes, tensor: Tensor) -> list[Operation]:
    events = [lifetimes.events[index] for index in lifetimes.users[tensor]]
    return [event for event in events if isinstance(event, Operation)]


class _Queue:
    """What frees memory in a part of a level, and what waits for it.

    Args:
        in_flight: the bytes of freed memory that nothing waits for.
        small: the bytes of tensors that take memory without waiting.
    """

    def __init__(self, in_flight: int, small: int):
        self.small = small
        self._in_flight = in_flight
        self._freed: collections.deque[tuple[int, list[Operation]]]
        self._freed = collections.deque()
        self._bytes = 0
        # The last operation that has waited, after which all others are.
        self._last: Operation | None = None

    def free(self, size: int, users: list[Operation]) -> None:
        """Note that memory is free once these operations have run."""
        if size > self.small:
            self._freed.append((size, users))
            self._bytes += size

    def take(self, operation: Operation, size: int) -> None:
        """Let an operation that takes memory wait."""
        if size <= self.small:
            return
        users = []
        while self._bytes > self._in_flight:
            freed, last = self._freed.popleft()
            self._bytes -= freed
            users += last
        before = [] if self._last is None else [self._last]
        self.wait(operation, [*before, *users])
        if users:
            self._last = operation

    def wait(self, operation: Operation, others: list[Operation]) -> None:
        """Let an operation run after others that do not come after it."""
        known = {id(tensor.operation) for tensor in operation.inputs}
        known |= {id(other) for other in operation.after} | {id(operation)}
        found = [o for o in others if id(o) not in known]
        operation.after = [*operation.after, *dict.fromkeys(found)]
