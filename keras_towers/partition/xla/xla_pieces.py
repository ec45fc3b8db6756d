"""Divides a level into functions that XLA compiles, and single operations.

XLA compiles functions of numbers, if it has kernels for their operations.
Operations on variables, files or strings stay outside. They may need the
results of such functions, or the functions theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

import tensorflow as tf

from keras_towers.partition.ir.called_functions import (
    CalledFunctions,
    functions_of,
)
from keras_towers.partition.ir.effects import (
    Effect,
    called_names,
    draws_statefully,
    effect_of,
    is_draw,
)
from keras_towers.partition.ir.program import (
    Operation,
    Program,
    Tensor,
    unrepeated,
)
from keras_towers.partition.ir.sizes import UNKNOWN
from keras_towers.partition.layout.folding import LARGEST
from keras_towers.partition.xla.kernels import Kernels
from keras_towers.partition.xla.stackable import Stackable
from keras_towers.transport.devices import same_device

_NOT_NUMBERS = (tf.string, tf.resource)
_LISTS = (
    "has a list of tensors that grows, or holds lists, in two of its functions"
)
_LEFT_OUT = (
    "gets a value that a branch keeps for its gradient, and XLA has to know "
    "its size"
)
# Operations whose output size depends on values: XLA knows only a limit.
_OF_VALUES = ("DynamicPartition", "Unique", "UniqueV2", "Where")
_SIZES = "has a size that depends on values in two of its functions"
_EFFECTS = "has effects in a function"
_DRAWS = (
    "draws from TensorFlow's own generator, which gives other numbers than on "
    "one device with XLA"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A part of a level: operations of a function, then single ones.

    Attributes:
        compiled: the operations of the function, in order.
        single: the operations that follow it, in order.
    """

    compiled: list[Operation] = dataclasses.field(default_factory=list)
    single: list[Operation] = dataclasses.field(default_factory=list)


class Stages:
    """Divides a program into functions that XLA compiles, and the rest.

    Args:
        program: the program.
        device: the device of the first tower.

    Attributes:
        kernels: what XLA compiles on the device.
        stackable: the lists that go from one function to another.
        not_compiled: for what runs without XLA although XLA has its kernels: by
            reason, the first operation.
    """

    def __init__(self, program: Program, device: str):
        self._called = CalledFunctions(program.graphs)
        self.kernels = Kernels(device, self._called)
        self.stackable = Stackable(program, self._called)
        self._device = device
        # XLA returns wrong sizes of what a function returns twice.
        self._sized_by_values = _sized_by_values(program)
        # By tensor: whether it may be a placeholder of a branch.
        self._left_out: dict[Tensor, bool] = {}
        self.not_compiled: dict[str, Operation] = {}
        # By what stays in a function: the operations that use it.
        self._users: dict[Tensor, list[Operation | None]] = {}
        for operation in program.operations:
            for tensor in self._kept_in(operation.inputs):
                self._users.setdefault(tensor, []).append(operation)
        ends = [*program.results, *(e.given for e in program.exchanges)]
        for tensor in ends:
            self._users.setdefault(tensor, []).append(None)
        self._used = {*ends, *(t for o in program.operations for t in o.inputs)}

    def of(self, operations: Sequence[Operation]) -> list[Stage]:
        """Divide the operations of a level into as few stages as possible.

        Args:
            operations: N operations, in order.
        """
        single = {id(o) for o in operations if self._is_single(o)}
        inside = {id(o) for o in operations}
        groups = self._groups_of(operations)
        for group in groups:
            ends = {
                id(end)
                for o in group
                for t in self._kept_in((*o.inputs, *o.outputs))
                for end in (t.operation, *self._users.get(t, ()))
            }
            if not ends <= inside:
                self._leave_out(group, single)
        least: dict[int, int] = {}
        while True:
            stages, numbers = _in_stages(operations, single, least)
            is_done = True
            for group in groups:
                of_list = {numbers[id(o)] for o in group}
                takes = [o for o in group if self._reason_to_leave_out(o)]
                is_alone = all(id(o) in single for o in takes)
                if len(of_list) == 1 or is_alone:
                    continue
                is_done = False
                if max(of_list) > len(operations):
                    # An operation without XLA is between two of its users.
                    self._leave_out(group, single)
                # No function takes it from another one.
                least |= {id(o): max(of_list) for o in group}
            if is_done:
                return stages

    def _kept_in(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that no function may take from another one.

        Each function computes repeated tensors itself.
        """
        return [
            tensor
            for tensor in tensors
            if not (tensor.operation and tensor.operation.is_repeated)
            and (
                tensor in self._sized_by_values
                or self._is_kept_list(tensor)
                or self._is_left_out(tensor)
            )
        ]

    def _is_kept_list(self, tensor: Tensor) -> bool:
        """Whether a tensor is a list that cannot be passed as a stack."""
        is_list = tensor.dtype == tf.variant
        return is_list and self.stackable.dtype_of(tensor) is None

    def _is_left_out(self, tensor: Tensor) -> bool:
        """Whether a tensor is a placeholder, or may be one of a branch.

        The gradient of a conditional takes what its branches keep for it. For
        what only another branch keeps, a branch returns a placeholder, without
        rows where their number is not known before the step. XLA makes all
        branches' results equally large in a function. But one that gets a
        placeholder from outside compiles the gradients of all branches for its
        size.
        """
        if tensor not in self._left_out:
            self._left_out[tensor] = self._may_be_left_out(tensor)
        return self._left_out[tensor]

    def _may_be_left_out(self, tensor: Tensor) -> bool:
        operation = tensor.operation
        if operation is None:
            return False
        if operation.type == "FakeParam":
            # It has no entries, or nobody knows how many.
            shape = operation.attributes["shape"].shape
            return shape.unknown_rank or any(d.size < 1 for d in shape.dim)
        return operation.type.endswith(("If", "Case")) and any(
            branch is not None
            and self._is_left_out(branch.outputs[tensor.index])
            for branch in self._called.of(operation)
        )

    def _groups_of(
        self, operations: Sequence[Operation]
    ) -> list[list[Operation]]:
        """Return groups of operations that must be in the same function."""
        groups: dict[Tensor, list[Operation]] = {}
        for operation in operations:
            lists = {*self._kept_in((*operation.inputs, *operation.outputs))}
            joined = [operation]
            known = [groups[tensor] for tensor in lists if tensor in groups]
            for group in {id(group): group for group in known}.values():
                joined = [*group, *joined]
            for o in joined if lists else ():
                ends = self._kept_in((*o.inputs, *o.outputs))
                groups |= dict.fromkeys(ends, joined)
        return list({id(group): group for group in groups.values()}.values())

    def _leave_out(
        self, operations: Sequence[Operation], single: set[int]
    ) -> None:
        """Leave operations to TensorFlow if they use a kept tensor."""
        for operation in operations:
            reason = self._reason_to_leave_out(operation)
            if reason and id(operation) not in single:
                single.add(id(operation))
                self.not_compiled.setdefault(reason, operation)

    def _reason_to_leave_out(self, operation: Operation) -> str | None:
        """Return why an operation cannot be compiled here; None: it can.

        XLA itself makes what a branch leaves out, and takes it only from there.
        """
        if any(map(self._is_left_out, operation.inputs)):
            return _LEFT_OUT
        ends = (*operation.inputs, *operation.outputs)
        if not self._sized_by_values.isdisjoint(ends):
            return _SIZES
        return _LISTS if any(map(self._is_kept_list, ends)) else None

    def _is_single(self, operation: Operation) -> bool:
        """Whether an operation cannot be part of a compiled function."""
        tensors = (*operation.inputs, *operation.outputs)
        elsewhere = operation.device and "towers" not in operation.axes
        if elsewhere and not same_device(operation.device, self._device):
            return True
        if not self.kernels.has(operation):
            # One device compiles it neither.
            return True
        if not operation.has_effect and not operation.at_root:
            return any(tensor.dtype in _NOT_NUMBERS for tensor in tensors)
        if draws_statefully(operation.type):
            self.not_compiled.setdefault(_DRAWS, operation)
        elif calls_functions(operation) and not self._only_checks(operation):
            self.not_compiled.setdefault(_EFFECTS, operation)
        return True

    def _only_checks(self, operation: Operation) -> bool:
        """Whether an operation's only effect is that it may fail."""
        source = operation.source
        is_unused = self._used.isdisjoint(operation.outputs)
        if not is_unused or source is None:
            return False
        return effect_of(source) <= Effect.CHECK


def needs_call(operations: Sequence[Operation]) -> bool:
    """Whether a function must be compiled, or becomes faster if it is.

    For a few operations on single numbers, a call takes longer. But XLA draws
    other random numbers than TensorFlow.
    """
    draws = any(is_draw(o.type) or calls_functions(o) for o in operations)
    outputs = [tensor for o in operations for tensor in o.outputs]
    sizes = [tensor.shape.num_elements() for tensor in outputs]
    return draws or any(n is None or n > LARGEST for n in sizes)


def calls_functions(operation: Operation) -> bool:
    """Whether an operation calls functions, of the program or of the trace."""
    named = called_names(operation.attributes)
    return bool(named or functions_of(operation))


def _sized_by_values(program: Program) -> set[Tensor]:
    """Return the tensors whose size in XLA depends on values."""
    sized: set[Tensor] = set()
    for operation in program.operations:
        if operation.type in _OF_VALUES or not sized.isdisjoint(
            operation.inputs
        ):
            sized.update(
                t for t in operation.outputs if not _is_sized(t, program)
            )
    return sized


def _is_sized(tensor: Tensor, program: Program) -> bool:
    """Whether the sizes of a tensor are known, or those of the batch."""
    operation = tensor.operation
    if operation is None or operation.source is None:
        return tensor.shape.is_fully_defined()
    if len(operation.source.outputs) <= tensor.index:
        return tensor.shape.is_fully_defined()
    value = program.values.get(operation.source.outputs[tensor.index].name)
    sizes = None if value is None else value.shape
    return sizes is not None and all(size is not UNKNOWN for size in sizes)


def _in_stages(
    operations: Sequence[Operation], single: set[int], least: Mapping[int, int]
) -> tuple[list[Stage], Mapping[int, int]]:
    """Divide operations into stages; return stages, and numbers by operation.

    Args:
        operations: N operations, in order.
        single: the ids of those that XLA does not compile.
        least: the least number of the stage of some, by their ids.
    """
    numbers: dict[int, int] = {}
    # The last stages that read and that wrote a resource.
    read: dict[Hashable, int] = {}
    written: dict[Hashable, int] = {}
    stages: list[Stage] = []
    for operation in operations:
        is_compiled = id(operation) not in single
        number = least.get(id(operation), 0)
        for tensor in unrepeated(operation.inputs):
            source = id(tensor.operation)
            if source in numbers:
                # A function comes before the single operations of its stage.
                is_later = is_compiled and source in single
                number = max(number, numbers[source] + int(is_later))
        if not is_compiled:
            reads = not operation.has_effect
            for key in _resources(operation):
                number = max(number, written.get(key, 0))
                if not reads:
                    number = max(number, read.get(key, 0))
            for key in _resources(operation):
                (read if reads else written)[key] = number
        numbers[id(operation)] = number
        while len(stages) <= number:
            stages.append(Stage())
        stage = stages[number]
        (stage.compiled if is_compiled else stage.single).append(operation)
    return stages, numbers


def _resources(operation: Operation) -> list[Tensor | None]:
    """Return the handles that an operation uses; None: any other resource."""
    return [t for t in operation.inputs if t.dtype == tf.resource] or [None]
