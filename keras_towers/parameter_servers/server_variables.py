"""The variables on parameter servers: copies of a model's variables.

``async_updates.py`` and ``averaged_updates.py`` update them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.update.optimizers import as_one_device
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.copies import copy_on_tower, copy_to_towers
from keras_towers.fit.weights.least_loaded import (
    LeastLoadedPlacement,
    byte_size,
)
from keras_towers.fit.weights.tower_variables import with_values
from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.parameter_servers.server_connection import Connection
from keras_towers.reduction.gradients import Gradient
from keras_towers.replicas.named_resources import (
    RunFunction,
    TracedFunctions,
    variable,
)

# The most chunks that weights are divided into.
_MOST_CHUNKS = 32
# Chunks of the gradients that a worker sends at the same time.
_IN_FLIGHT = 2


class ServerVariables:
    """Copies of a model's variables on parameter servers, found by name.

    All workers create them in the same order. Keras variables keep their local
    values, except in the blocks of ``optimizers_on_servers`` and
    ``on_servers``, where the copies replace them.

    Attributes:
        trained: the weights that optimizers train.
        others: all other variables of the model that workers share.
        seeds: the states of random generators.
        chunks: the trained weights in chunks, which are sent one after another
            in the order in which their gradients are computed; empty for a
            small model.
    """

    def __init__(self, name: str, connection: Connection, run: RunFunction):
        self._name = name
        self._drop_with = connection.dropped.drop_with
        self._calls = TracedFunctions(run)
        self._placement = LeastLoadedPlacement(connection.devices)
        self._copies: IdentityDict[keras.Variable, tf.Variable] = IdentityDict()
        self._count = 0
        self.trained: list[keras.Variable] = []
        self.others: list[keras.Variable] = []
        self.seeds: list[keras.Variable] = []
        self.chunks: list[list[keras.Variable]] = []
        self._of_optimizers: list[keras.Variable] = []

    @property
    def _all(self) -> list[keras.Variable]:
        return [*self.trained, *self.others, *self._of_optimizers]

    def create_copies(self, model: keras.Model, seeds: bool) -> None:
        """Create a copy of each variable that the workers share.

        Args:
            model: the model.
            seeds: whether workers share the states of random generators.
        """
        state = state_lib.collect(model)
        for optimizer in state.optimizers:
            _build(optimizer, model)
        self.trained = [v for v in state.weights if v.trainable]
        self.others = [v for v in state.weights if not v.trainable]
        self.seeds = state.seeds
        self.others += state.seeds if seeds else []
        self._of_optimizers = state.optimizer_variables
        self.chunks = _chunked(self.trained)
        slots = {
            id(slot): weight
            for optimizer in state.optimizers
            for slot, weight in state_lib.slots_of(optimizer)
        }
        for local in self._all:
            dtype = keras.backend.standardize_dtype(local.dtype)
            if local not in self._copies and dtype != "string":
                self._add(local, slots.get(id(local)))

    def _add(
        self, local: keras.Variable, beside: keras.Variable | None
    ) -> None:
        """Create a copy on the server of another copy, or the least loaded."""
        if beside is not None and beside in self._copies:
            device = self._copies[beside].device
        else:
            device = self._placement(local)
        name = f"{self._name}/{self._count}"
        dtype = tf.as_dtype(local.dtype)
        copy: Any = variable(name, device, local.shape, dtype)
        # Optimizers look up the variables that they train by this id.
        copy._unique_id = copy_on_tower(local._value)._unique_id
        self._drop_with(copy, name)
        self._count += 1
        self._copies[local] = copy

    def __contains__(self, local: object) -> bool:
        return isinstance(local, keras.Variable) and local in self._copies

    def copy_of(self, local: keras.Variable) -> tf.Variable:
        """Return the copy of a variable."""
        self._check([local])
        return self._copies[local]

    def _check(self, variables: Sequence[Variable]) -> None:
        unknown = [v for v in variables if v not in self]
        if unknown:
            names = ", ".join(getattr(v, "path", str(v)) for v in unknown)
            raise TowerError(
                f"the step trains {names}, which the parameter servers do not "
                "hold: they hold the trainable weights that the model had "
                "when fit began. Build all layers before fit, for example by "
                "model.evaluate on a batch."
            )

    def refuse_writes(self, graph: tf.Graph) -> None:
        """Refuse a traced step that writes trained weights itself.

        The servers' weights replace the written values after the step. A call
        of an optimizer in a condition or a loop is such a write.
        """
        paths = {
            id(copy_on_tower(local._value).handle): local.path
            for local in self._held(self.trained)
        }
        trained = {
            id(inside): paths[id(outside)]
            for outside, inside in graph.captures
            if id(outside) in paths
        }
        written = {
            trained[id(resource)]: None
            for operation in graph.get_operations()
            for resource in compat.resources_of(operation)[1]
            if id(resource) in trained
        }
        if written:
            raise TowerError(
                f"the step itself writes into {', '.join(written)}, but "
                "parameter servers hold the trained weights, so this would be "
                "lost. Call an optimizer's apply instead, outside of "
                "conditions and loops."
            )

    def upload(self, variables: Sequence[keras.Variable] | None = None) -> None:
        """Write local values into the copies; None: for all variables."""
        changed = [
            local
            for local in self._held(variables)
            if local._value is not self._copies[local]
        ]

        def body() -> None:
            for local in changed:
                copy = self._copies[local]
                value = copy_on_tower(local._value).read_value()
                with tf.device(copy.device):
                    copy.assign(value, read_value=False)

        self._call("upload", changed, body)

    def download(
        self, variables: Sequence[keras.Variable] | None = None
    ) -> None:
        """Read copies into the local variables; None: of all variables."""
        with_copies = self._held(variables)
        self._call("download", with_copies, lambda: self.pull(with_copies))

    def pull(self, variables: Sequence[keras.Variable] | None = None) -> None:
        """Like ``download``, inside a function; None: the trained weights."""
        variables = self.trained if variables is None else variables
        self.assign_local(variables, self.read(variables))

    def read(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Read the copies on their own devices, inside a function."""
        values = []
        for local in variables:
            copy = self._copies[local]
            with tf.device(copy.device):
                values.append(copy.read_value())
        return values

    def assign_local(
        self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
    ) -> None:
        """Assign values to the local variables, inside a function."""
        for local, value in zip(variables, values, strict=True):
            native = copy_on_tower(local._value)
            if native is not self._copies[local]:
                with tf.device(native.device):
                    native.assign(value, read_value=False)
        copy_to_towers(variables)

    def send(
        self,
        variables: Sequence[keras.Variable],
        grads: Sequence[Gradient | None],
    ) -> list[Gradient | None]:
        """Send dense gradients to their variables' servers, chunk by chunk.

        While one chunk is received, the previous one can be applied and read.
        Gradients sent at the same time would all arrive at the end.
        """
        self._check(variables)
        sent = list(grads)
        index = {id(v): i for i, v in enumerate(variables)}
        arrived: list[list[tf.Tensor]] = []
        for chunk in self.chunks:
            before = arrived[-_IN_FLIGHT] if arrived[_IN_FLIGHT - 1 :] else []
            arrived.append([])
            for i in (index[id(v)] for v in chunk if id(v) in index):
                grad = grads[i]
                if isinstance(grad, tf.Tensor):
                    with (
                        tf.device(grad.device),
                        tf.control_dependencies(before),
                    ):
                        grad = _keep(grad)
                    with tf.device(self._copies[variables[i]].device):
                        sent[i] = grad = _keep(grad)
                    arrived[-1].append(grad)
        return sent

    def _held(
        self, variables: Sequence[keras.Variable] | None
    ) -> list[keras.Variable]:
        known = self._all if variables is None else variables
        return [v for v in known if v in self._copies]

    def _call(
        self,
        what: str,
        variables: Sequence[keras.Variable],
        body: Callable[[], None],
    ) -> None:
        if variables:
            self._calls((what, *(id(v._value) for v in variables)), body)

    def forget_traced(self) -> None:
        """Drop the traced functions: local variables may have been replaced."""
        self._calls.forget()

    def optimizers_on_servers(self) -> contextlib.AbstractContextManager[None]:
        """Make optimizers use their variables on the servers in the block."""
        return self._replaced(self._of_optimizers)

    def _replaced(
        self, variables: Sequence[Variable]
    ) -> contextlib.AbstractContextManager[None]:
        own = self._held(variables)
        return with_values((v, self._copies[v]) for v in own)

    @contextlib.contextmanager
    def on_servers(
        self, optimizer: keras.Optimizer, variables: Sequence[Variable]
    ) -> Iterator[None]:
        """Make model and optimizers use the copies in the block."""
        self._check(variables)
        with (
            self._replaced([*self.trained, *self._of_optimizers]),
            as_one_device(optimizer, variables),
        ):
            yield


def _build(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    if optimizer.built:
        return
    if optimizer is not model.optimizer:
        raise TowerError(
            f"the optimizer {optimizer.name!r} of model {model.name!r} is "
            "not built yet, and all workers must know its variables "
            "before they train: call optimizer.build(variables) before fit."
        )
    with as_one_device(optimizer, model.trainable_variables):
        state_lib.build_optimizer(optimizer, model.trainable_variables)


def _keep(grad: tf.Tensor) -> tf.Tensor:
    """Return the gradient by an identity that TensorFlow does not remove."""
    return tf.raw_ops.PreventGradient(input=grad)


def _chunked(trained: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    sizes = list(map(byte_size, trained))
    least = max(settings.CHUNK_BYTES, sum(sizes) / _MOST_CHUNKS)
    chunks: list[list[keras.Variable]] = []
    left = 0.0
    for weight, size in zip(reversed(trained), reversed(sizes), strict=True):
        if left <= 0:
            chunks.append([])
            left = least
        chunks[-1].append(weight)
        left -= size
    return chunks if len(chunks) > 1 else []
