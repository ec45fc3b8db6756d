"""Every private name of TensorFlow and Keras that the package uses.

Only this module imports from ``keras.src`` or ``tensorflow.python``. A release
that lacks a name is a clear error at import. ``private_names.txt`` among its
tests lists the attributes that the package uses, and a test looks for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_towers.foundation.errors import CompatibilityError, TowerError
from keras_towers.foundation.import_hooks import minor_version, packages
from keras_towers.foundation.object_types import (
    ConcreteFunction,
    Step,
    Structure,
    Variable,
)

if TYPE_CHECKING:
    import keras
    from tensorflow.core.framework.function_pb2 import FunctionDef

TESTED_VERSIONS = {"TensorFlow": ("2.16", "2.21"), "Keras": ("3.8", "3.16")}
"""The first and the last version of each package that is known to work."""

HOST = "CPU:0"
"""The first CPU of this process."""


def private_name(paths: str) -> Any:
    """Import ``package.module:Name.attribute``.

    Args:
        paths: where it is, first in the newest version that has it elsewhere.
    """
    cause: Exception | None = None
    for path in paths.split():
        module_name, _, within = path.partition(":")
        try:
            value = importlib.import_module(module_name)
            for name in within.split(".") if within else ():
                value = getattr(value, name)
        except (ImportError, AttributeError) as error:
            cause = error
        else:
            return value
    raise CompatibilityError(
        f"keras_towers needs {' or '.join(paths.split())}, which is missing in "
        f"the installed versions ({_installed_versions()}). It is known to "
        f"work with {tested_versions()}: install one of these, or a newer "
        "keras_towers."
    ) from cause


def _tf(path: str) -> Any:
    return private_name(f"tensorflow.python.{path}")


def _keras(paths: str) -> Any:
    return private_name(" ".join(f"keras.src.{path}" for path in paths.split()))


def tested_versions() -> str:
    """Return the versions that are known to work, as text."""
    return " and ".join(
        f"{name} {first} to {last}"
        for name, (first, last) in TESTED_VERSIONS.items()
    )


def _installed_versions() -> str:
    installed = packages("tensorflow") | packages("keras")
    named = [f"{name} {version}" for name, version in installed.items()]
    return ", ".join(named) or "neither TensorFlow nor Keras"


KERAS = minor_version(private_name("keras:__version__"))
"""The installed version of Keras, to the minor one."""

# TensorFlow: distributed values.
Mirrored = _tf("distribute.values:Mirrored")
MirroredVariable = _tf("distribute.values:MirroredVariable")
SyncOnReadVariable = _tf("distribute.values:SyncOnReadVariable")
DistributedVariable = _tf("distribute.values:DistributedVariable")
PerReplica = _tf("distribute.values:PerReplica")
PerReplicaSpec = _tf("distribute.values:PerReplicaSpec")
select_replica = _tf("distribute.distribute_utils:select_replica")
current_replica_id = _tf("distribute.values_util:get_current_replica_id_as_int")
is_saving = _tf("distribute.values_util:is_saving_non_distributed")

# TensorFlow: the internals of MirroredStrategy.
MirroredExtended = _tf("distribute.mirrored_strategy:MirroredExtended")
_push_mode = _tf("distribute.distribute_lib:_push_per_thread_mode")
_pop_mode = _tf("distribute.distribute_lib:_pop_per_thread_mode")
_default_mode = _tf("distribute.distribute_lib:_get_default_replica_mode")

# TensorFlow: variables.
BaseResourceVariable = _tf("ops.resource_variable_ops:BaseResourceVariable")
UninitializedVariable = _tf("ops.resource_variable_ops:UninitializedVariable")
_FUNCTION = "eager.polymorphic_function.polymorphic_function"
_UnliftedVariable = _tf(f"{_FUNCTION}:UnliftedInitializerVariable")
_UnliftableError = _tf("eager.lift_to_graph:UnliftableError")
_READS = (
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd"),
    *("VariableShape", "VarIsInitializedOp", "LookupTableFindV2"),
)
_lift_to_graph = _tf("eager.lift_to_graph:lift_to_graph")
# The module whose function creates every variable.
variables_module = _tf("ops.variables")

# TensorFlow: this process, and calls of functions.
eager_context = _tf("eager.context:context")
_list_local_devices = _tf("client.device_lib:list_local_devices")
anonymous_name = _tf("eager.context:anonymous_name")
_enable_collectives = _tf("pywrap_tfe:TFE_EnableCollectiveOps")
global_seed = _tf("eager.context:global_seed")
is_op_determinism_enabled = _tf("framework.config:is_op_determinism_enabled")
CancellationManager = _tf("eager.cancellation:CancellationManager")
_execute_with_cancellation = _tf("eager.execute:execute_with_cancellation")

# TensorFlow: AutoGraph, which rewrites the functions that a user's tf.function
# calls. This package is exempted, like Keras: rewriting takes seconds, and
# changes nothing here.
_autograph = _tf("autograph.core.config")
_autograph.CONVERSION_RULES = (
    _autograph.DoNotConvert(__name__.partition(".")[0]),
    *_autograph.CONVERSION_RULES,
)
_convert = _tf("autograph.impl.api:tf_convert")
_conversion = _tf("autograph.core.ag_ctx:control_status_ctx")

# TensorFlow: functions, their graphs, and how these are optimized.
function_module = _tf("eager.polymorphic_function.atomic_function")
# The traces of a function, and what tells them apart besides arguments.
_TRACES = "tensorflow.core.function.polymorphism.function_cache"
FunctionCache = private_name(f"{_TRACES}:FunctionCache")
FunctionContext = private_name(f"{_TRACES}:FunctionContext")
# The methods of a ``FunctionCache`` that take a ``FunctionContext``.
USES_OF_TRACES = ("lookup", "generalize", "add")
# The bytes of a constant that a graph has at most once.
_SMALL = 256
_note_read_only = _tf(
    "eager.polymorphic_function.atomic_function"
    ":_set_read_only_resource_inputs_attr"
)
_COLLECTIVES = _tf("framework.auto_control_deps_utils:COLLECTIVE_MANAGER_IDS")
_XLA_COMPILE = _tf("eager.polymorphic_function.attributes:XLA_COMPILE")
get_default_graph = _tf("framework.ops:get_default_graph")
# This import makes it what ``tf.compat.v1`` is, as a script's import would.
v1 = private_name("tensorflow.compat.v1")
_gradient_function = _tf("eager.backprop:_gradient_function")
_gradients = _tf("framework.ops:gradient_registry")
_set_traceback = _tf("client.pywrap_tf_session:TF_SetOpStackTrace")
# The functions that compute gradients: of a tape, of ``tf.gradients``.
_GRADIENTS_OF = (
    _tf("eager.imperative_grad:imperative_grad"),
    _tf("ops.gradients_util:_GradientsHelper"),
)
# Its function of graphs calls what has a gradient of its own.
custom_gradient_module = _tf("ops.custom_gradient")
_recompute_grad = _tf("ops.custom_gradient:recompute_grad")
has_tape = _tf("eager.record:could_possibly_record")
# Whether a tape follows any of some tensors.
has_gradient = _tf("eager.record:should_record_backprop")
# A function of a model that tf.saved_model.load returns.
LoadedFunction = _tf("saved_model.load:_WrapperFunction")
CalledFunction = _tf(
    "eager.polymorphic_function.concrete_function:ConcreteFunction"
)
read_only_inputs = _tf(
    "framework.auto_control_deps_utils"
    ":get_read_only_resource_input_indices_graph"
)
# The modules that write TensorFlow's files.
saved_model = _tf("saved_model.save")
checkpoint_management = _tf("checkpoint.checkpoint_management")
TrackableSaver = _tf("checkpoint.checkpoint:TrackableSaver")
Trackable = _tf("trackable.base:Trackable")
func_graph_from_py_func = _tf("framework.func_graph:func_graph_from_py_func")
FuncGraph = _tf("framework.func_graph:FuncGraph")
AutomaticControlDependencies = _tf(
    "framework.auto_control_deps:AutomaticControlDependencies"
)
# The modules and names of the functions that write variables.
VARIABLE_WRITES: list[tuple[Any, str]] = [
    (module, name)
    for module in map(
        _tf,
        (
            *("ops.gen_resource_variable_ops", "ops.gen_training_ops"),
            *("ops.gen_state_ops", "ops.gen_array_ops"),
        ),
    )
    for name in vars(module)
    if re.match("assign_.*variable_op|resource_(?!gather)", name)
    and not name.endswith("_eager_fallback")
]
_handle_data = _tf("ops.handle_data_util:create_handle_data")

_Defun = _tf("framework.function:_DefinedFunction")
_graph_of_definition = _tf(
    "framework.function_def_to_graph:function_def_to_graph"
)

get_resource_handle_data = _tf("ops.handle_data_util:get_resource_handle_data")
set_handle_data = _tf("ops.handle_data_util:set_handle_data")

# Counts the draws without an explicit seed in each graph.
draws_of_graphs = _tf("framework.random_seed:_graph_to_seed_dict")

resources_of = _tf(
    "framework.auto_control_deps_utils:get_read_write_resource_inputs"
)
# The attribute that says which of an operation's inputs it does not write.
_run_independently = _tf(
    "framework.auto_control_deps:AutomaticControlDependencies.run_independently"
)
op_definition = _tf("framework.op_def_registry:get")
_kernels_of = _tf("framework.kernels:get_registered_kernels_for_op")
in_xla_context = _tf("ops.control_flow_util:GraphOrParentsInXlaContext")
_XlaContext: Any = _tf("ops.control_flow_ops:XLAControlFlowContext")

# TensorFlow: datasets.
_UnaryUnchangedStructureDataset = _tf(
    "data.ops.dataset_ops:UnaryUnchangedStructureDataset"
)
_ParallelInterleaveDataset = _tf(
    "data.ops.interleave_op:_ParallelInterleaveDataset"
)

# Keras: models.
TensorFlowTrainer = _keras("models.model:Trainer")
BaseTrainer = _keras("trainers.trainer:BaseTrainer trainers.trainer:Trainer")
trainer_module = _keras("backend.tensorflow.trainer")
TFEpochIterator = _keras("backend.tensorflow.trainer:TFEpochIterator")
traceback_utils = _keras("utils.traceback_utils")
CallbackList = private_name("keras.callbacks:CallbackList")
load_h5_optimizer_weights = _keras(
    "legacy.saving.legacy_h5_format:load_optimizer_weights_from_hdf5_group"
)

KerasSaveable = _keras("saving.keras_saveable:KerasSaveable")
object_registration = _keras("saving.object_registration")

# Keras: data.
ArrayDataAdapter = _keras(
    "trainers.data_adapters.array_data_adapter:ArrayDataAdapter"
)
convert_to_sliceable = _keras(
    "trainers.data_adapters.array_slicing:convert_to_sliceable"
)
GeneratorDataAdapter = _keras(
    "trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter"
)
PyDatasetAdapter = _keras(
    "trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter"
)
TFDatasetAdapter = _keras(
    "trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter"
)
py_dataset_module = _keras("trainers.data_adapters.py_dataset_adapter")

# Keras: losses and optimizers.
loss_module = _keras("losses.loss")
BaseOptimizer = _keras("optimizers.base_optimizer:BaseOptimizer")
TFOptimizer = _keras("backend.tensorflow.optimizer:TFOptimizer")

# Keras: variables, draws and global state.
KerasVariable = _keras("backend.tensorflow:Variable")
RandomInitializer = _keras("initializers.random_initializers:RandomInitializer")
in_stateless_scope = _keras("backend.common.stateless_scope:in_stateless_scope")
in_symbolic_scope = _keras("backend.common.symbolic_scope:in_symbolic_scope")
global_state = _keras("backend.common.global_state")
get_global_attribute = _keras(
    "backend.common.global_state:get_global_attribute"
)
distribution_lib = _keras("backend.tensorflow.distribution_lib")
# Keras 3.8 has no ``RematScope``.
remat_module: Any = (
    types.SimpleNamespace(RematMode=tuple)
    if KERAS < (3, 9)
    else _keras("backend.common.remat")
)


def convert_optionals(model: keras.Model, step: Step) -> Step:
    """Make a step take None where its data have a TensorFlow ``Optional``."""
    return step if KERAS < (3, 12) else model._autoconvert_optionals(step)


def auto_shards(distribution: keras.distribution.DataParallel) -> bool:
    """Whether a ``DataParallel`` divides the data that all processes have."""
    return KERAS < (3, 11) or distribution.auto_shard_dataset


def begin_with_epoch(adapter: Any, epoch: int) -> None:
    """Make data shuffle next as in an epoch of ``fit``, from 0."""
    # Since version 3.16 the order is a function of this number.
    if hasattr(adapter, "_epoch"):
        adapter._epoch = epoch


def parts_of_sums(
    variable: Variable,
) -> contextlib.AbstractContextManager[object]:
    """Let replicas hold parts of a metric's sum, as Keras does since 3.10."""

    def create(next_creator: Callable, **kwargs: object) -> tf.Variable:
        kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
        return next_creator(**kwargs)

    if KERAS >= (3, 10) or variable.aggregation != "sum":
        return contextlib.nullcontext()
    return tf.variable_creator_scope(create)


def uses_renorm(layer: keras.layers.BatchNormalization) -> bool:
    """Whether a ``BatchNormalization`` uses batch renormalization."""
    return KERAS >= (3, 14) and layer.renorm


def execution_of(
    item: Sequence, steps: int
) -> tuple[int, int, Iterator[Structure]]:
    """Return the first step, the last step and the data of an execution.

    Args:
        item: what Keras's epoch iterator yields.
        steps: the number of steps of an execution.
    """
    first, *last, data = item
    # Keras counts the last step itself since version 3.11.
    return first, last[0] if last else first + steps - 1, data


def memory_of_devices() -> dict[str, int]:
    """Return the bytes that TensorFlow may allocate on devices, by short name.

    For GPUs they are the limits of their allocators, which must exist already.
    """
    eager_context().ensure_initialized()
    listed = _list_local_devices(eager_context().config)
    return {device.name: device.memory_limit for device in listed}


def graph_of_function(graph: tf.Graph, name: str) -> tf.Graph | None:
    """Return the graph of a function that a graph calls; None if unknown."""
    function = graph._get_function(name)
    own = getattr(function, "graph", None)
    if own is not None or not isinstance(function, _Defun):
        return own
    # Functions of TensorFlow's own losses only keep their definition.
    with graph.as_default():
        return _graph_of_definition(function.definition)


def devices_of_handles(graph: tf.Graph) -> dict[int, str]:
    """Return the devices of variables that a graph captures.

    Returns:
        The devices, by the ids of the handles in the graph.
    """
    devices: dict[int, str] = {}
    outer: dict[tf.Graph, dict[int, str]] = {}
    for external, internal in getattr(graph, "captures", ()):
        if internal.dtype != tf.resource:
            continue
        if not tf.is_symbolic_tensor(external):
            devices[id(internal)] = external.device
            continue
        if external.graph not in outer:
            outer[external.graph] = devices_of_handles(external.graph)
        device = outer[external.graph].get(id(external))
        if device is not None:
            devices[id(internal)] = device
    return devices


def add_functions(graph: tf.Graph, functions: Iterable[object]) -> None:
    """Add functions, and the functions that they call, to a graph."""
    for function in functions:
        graph._add_function_recursive(function)


def call_in_graph(
    function: Any, inputs: Sequence[tf.Tensor], config: bytes, infer: bool
) -> list[tf.Tensor]:
    """Add a call of a function to the current graph; return its results.

    Args:
        function: one as ``function_module`` makes them.
        inputs: its inputs.
        config: how to run it: a serialized ``ConfigProto``.
        infer: whether TensorFlow infers the shapes of its results, for which
            the current graph keeps a copy of the function's graph.
    """
    graph = get_default_graph()
    graph._add_function_recursive(function)
    options, given = function.call_options, function.definition.attr
    attributes = {
        "f": tf.compat.v1.AttrValue(func={"name": function.name}),
        "Tin": _types([tensor.dtype for tensor in inputs]),
        "Tout": _types([o.dtype for o in function.function_type.flat_outputs]),
        "config_proto": tf.compat.v1.AttrValue(s=config),
        "_disable_call_shape_inference": tf.compat.v1.AttrValue(b=not infer),
        _COLLECTIVES: tf.compat.v1.AttrValue(
            list={"i": options.collective_manager_ids_used}
        ),
    }
    compiled = {key: given[key] for key in (_XLA_COMPILE,) if key in given}
    kind = (
        "StatefulPartitionedCall" if options.is_stateful else "PartitionedCall"
    )
    call = graph.create_op(
        kind,
        list(inputs),
        [output.dtype for output in function.function_type.flat_outputs],
        attrs=attributes | compiled,
    )
    _note_read_only(call, function.graph)
    return list(call.outputs)


def _types(dtypes: Iterable[tf.DType]) -> Any:
    return tf.compat.v1.AttrValue(
        list={"type": [d.as_datatype_enum for d in dtypes]}
    )


def definition_of_function(
    graphs: Iterable[tf.Graph], name: str
) -> FunctionDef | None:
    """Return the definition of a function; None if it is unknown.

    Args:
        graphs: the graphs that may call it.
        name: its name.
    """
    if eager_context().has_function(name):
        return eager_context().get_function_def(name)
    for graph in graphs:
        function = graph._get_function(name)
        if isinstance(function, _Defun):
            return function.definition
    return None


def function_of_definition(definition: FunctionDef) -> object:
    """Return a function for graphs, given its definition."""
    return function_module.from_function_def(definition, None)


class CompactGraph(FuncGraph):  # type: ignore[valid-type, misc]
    """The graph of a function that has each small constant once.

    It does not depend on what other operations wait for: TensorFlow merges
    equal constants only if they wait for nothing.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self._constants: dict[Any, tf.Operation] = {}
        self._captures_one = False

    def capture(self, *args: Any, **options: Any) -> Any:
        """Capture a tensor; a small one by a constant that is an input."""
        before, self._captures_one = self._captures_one, True
        try:
            return super().capture(*args, **options)
        finally:
            self._captures_one = before

    def _create_op_internal(
        self, op_type: str, inputs: Any, *args: Any, **options: Any
    ) -> tf.Operation:
        create = super()._create_op_internal
        key = None
        if op_type == "Const" and not self._captures_one:
            key = self._key_of(**options)
        if key is None:
            return create(op_type, inputs, *args, **options)
        if key not in self._constants:
            with self.control_dependencies(None):
                made = create(op_type, inputs, *args, **options)
            self._constants[key] = made
        return self._constants[key]

    def _key_of(
        self, attrs: Any = None, compute_device: bool = True, **_: Any
    ) -> Any:
        """Return what tells constants apart; None: make a new one."""
        value = attrs["value"].tensor
        is_placed = any(True for _ in self._colocation_stack.peek_objs())
        if is_placed or value.ByteSize() > _SMALL:
            return None
        devices = [
            device.raw_string or device.function
            for device in self._device_function_stack.peek_objs()
        ]
        return value.SerializeToString(), compute_device, *devices


def forget_graphs(caller: tf.Graph, kind: type[tf.Graph]) -> None:
    """Let functions that a graph calls keep no graphs of a kind.

    Nor do they keep graphs within those. TensorFlow runs their definitions, of
    which it would make graphs if it needed any.
    """
    for function in caller._functions.values():
        graph: Any = getattr(function, "_cached_graph", None)
        while isinstance(graph, FuncGraph) and not isinstance(graph, kind):
            graph = graph.outer_graph
        if isinstance(graph, kind):
            function._cached_graph = function._cached_definition = None


def graphs_called_by(caller: tf.Graph) -> list[tf.Graph]:
    """Return the graphs of the functions that a graph calls, where kept.

    Of others, TensorFlow would make graphs anew, and it cannot of all.
    """
    functions = caller._functions.values()
    graphs = [getattr(f, "_cached_graph", None) for f in functions]
    return [graph for graph in graphs if graph is not None]


def never_fold(function: Any) -> None:
    """Call a function as one with effects, which TensorFlow does not fold."""
    options = function._call_options
    function._call_options = dataclasses.replace(options, is_stateful=True)


def type_of_variable(handle: tf.Tensor) -> Any:
    """Return the type of the variable of an eager handle, if any."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return data.shape_and_type[0].dtype


def convert_call(function: Callable) -> Callable:
    """Convert a user's function by AutoGraph if the caller is converted."""
    return _convert(function, _conversion(), convert_by_default=False)


def traced_by(function: Callable) -> Callable:
    """Return the function that a ``tf.function`` traces; else the function.

    One that XLA must compile stays a ``tf.function``.
    """
    if getattr(function, "_jit_compile", None):
        return function
    inner = getattr(function, "python_function", function)
    rewrites = getattr(function, "_autograph", False)
    return _convert(inner, _conversion()) if rewrites else inner


# The priority of the variable creators by which a tf.function detects new
# variables.
_FUNCTION_PRIORITY = 50


def batch_size_of(dataset: tf.data.Dataset | None) -> int | None:
    """Return the number of elements that a dataset batches, if it does."""
    while dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        dataset = getattr(dataset, "_input_dataset", None)
    return None


def batches_all_parts(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset makes each batch, so all parts have equally many rows.

    A function that is mapped over batches may change that.
    """
    while isinstance(dataset, _UnaryUnchangedStructureDataset):
        dataset = dataset._input_dataset
    return getattr(dataset, "_batch_size", None) is not None


def interleaves_in_any_order(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a parallel ``interleave`` in no fixed order."""
    if not isinstance(dataset, _ParallelInterleaveDataset):
        return False
    # Only the graph contains this argument.
    try:
        text = dataset._as_serialized_graph(
            external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE
        ).numpy()
    except tf.errors.OpError:  # It contains arrays larger than 2 GB.
        return False
    graph = tf.compat.v1.GraphDef.FromString(text)
    functions = [function.node_def for function in graph.library.function]
    return any(
        node.attr["deterministic"].s == b"false"
        for nodes in (graph.node, *functions)
        for node in nodes
        if "deterministic" in node.attr
    )


@contextlib.contextmanager
def single_device_mode() -> Iterator[None]:
    """Enter TensorFlow's default strategy, hiding the current one.

    Variables created inside are plain ``tf.Variable``s, or those of a function
    that is traced, ``get_strategy()`` is
    the default strategy and ``get_replica_context()`` its only replica, both
    eagerly and during tracing (``tf.cond`` branches inherit the mode).
    """
    creators = get_default_graph()._variable_creator_stack
    _push_mode(_default_mode())
    try:
        with _creators([c for c in creators if c[0] == _FUNCTION_PRIORITY]):
            yield
    finally:
        _pop_mode()


@contextlib.contextmanager
def _creators(creators: Sequence[tuple[int, Any]]) -> Iterator[None]:
    """Let these make the variables in this block, and no others."""
    graph = get_default_graph()
    before = graph._variable_creator_stack
    graph._variable_creator_stack = [*creators]
    try:
        yield
    finally:
        graph._variable_creator_stack = before


def frames_of_gradient(
    frames: Sequence[FrameSummary],
) -> Sequence[FrameSummary] | None:
    """Return the frames of the function of a gradient; None: there is none.

    Args:
        frames: where an operation was added, the innermost frame last.
    """
    for index in reversed(range(len(frames))):
        if _is_in(frames[index], _gradient_function):
            return frames[index + 1 :]
    return None


def shared_traceback(operation: tf.Operation, shared: dict[Any, Any]) -> Any:
    """Let operations that were added alike have one traceback; return it.

    TensorFlow writes out the traceback of each operation that is asked for it,
    and keeps it as long as the graph.

    Args:
        operation: the operation, which has a traceback.
        shared: gets the tracebacks, by themselves.
    """
    # A part belongs to itself, not to the operation.
    stack = operation.traceback[:]
    stack = shared.setdefault(stack, stack)
    _set_traceback(operation._c_op, stack)
    return stack


def is_of_gradient(operation: tf.Operation) -> bool:
    """Whether an operation was added to compute gradients."""
    frames = operation.traceback
    return any(_is_in(f, of) for f in frames for of in _GRADIENTS_OF)


def recomputed(function: Any) -> Callable[..., Any] | None:
    """Return the function that ``tf.recompute_grad`` was given.

    Args:
        function: one with a gradient of its own; None: that is another one.
    """
    is_function = inspect.isfunction(function)
    codes = _recompute_grad.__code__.co_consts
    if not is_function or function.__code__ not in codes:
        return None
    return inspect.getclosurevars(function).nonlocals["f"]


def is_gradient_of(
    operation: tf.Operation, frames: Sequence[FrameSummary]
) -> bool:
    """Whether frames are those of the function of an operation's gradient."""
    try:
        function = _gradients.lookup(operation.type)
    except LookupError:
        return False
    return bool(frames) and _is_in(frames[0], function)


def _is_in(frame: FrameSummary, function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and (frame.filename, frame.name) == (
        code.co_filename,
        code.co_name,
    )


class FirstCall:
    """Makes variables as the first call of a ``tf.function`` does.

    What computes their first values is a part of the graph that is traced. A
    trace in which variables were made is not run: TensorFlow traces the
    function once more.

    Attributes:
        makes_variables: whether variables were made.
    """

    def __init__(self) -> None:
        self.makes_variables = False
        # Variables without a value, and the tensors of their first values.
        self._initializers: list[tuple[tf.Variable, tf.Tensor]] = []

    def makes(self) -> contextlib.AbstractContextManager[None]:
        """Let the current graph make variables in this block, and no other."""
        return _creators([(_FUNCTION_PRIORITY, self._make)])

    def _make(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("experimental_enable_variable_lifting") is False:
            return next_creator(**kwargs)
        self.makes_variables = True
        with tf.init_scope():
            if not tf.executing_eagerly():
                # The graph around it never runs.
                return next_creator(**kwargs)
        return _UnliftedVariable(
            add_initializers_to=self._initializers, **kwargs
        )

    def initialize(self) -> None:
        """Give the variables that were made their first values.

        Raises:
            TowerError: such a value is known only when the step runs.
        """
        new, self._initializers = self._initializers, []

        def initialize() -> None:
            for variable, value in new:
                variable.assign(_lifted(variable, value), read_value=False)

        with tf.init_scope():
            # A checkpoint may have given them values.
            new = [pair for pair in new if not pair[0].is_initialized()]
            if new:
                function = tf.function(initialize, autograph=False)
                # It is another one each time, and no warning for users.
                function._omit_frequent_tracing_warning = True
                function()


def _lifted(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return the first value of a variable in the graph of another function.

    It may depend on other variables.

    Raises:
        TowerError: it is known only when the step runs.
    """
    graph = get_default_graph()
    before = len(graph.get_operations())
    try:
        lifted = _lift_to_graph(
            [value],
            graph,
            # All that are given are captured.
            sources=_captures_of(value),
            handle_captures=True,
        )[value]
    except _UnliftableError as error:
        raise _no_first_value(variable, "the batch") from error
    if not all(map(_only_reads, graph.get_operations()[before:])):
        raise _no_first_value(variable, "what the step has written before")
    return lifted


def _captures_of(value: tf.Tensor) -> list[tf.Tensor]:
    """Return the captures of its graph on which a value depends."""
    found: set[tf.Operation] = set()
    waiting = [value.op]
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += operation.control_inputs
    return [t for t in value.graph.internal_captures if t.op in found]


def _only_reads(operation: tf.Operation) -> bool:
    """Whether an operation writes no resource, but those that are made."""
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    if not resources or operation.type in _READS:
        return True
    # A variable that is made begins with a branch, if it has no value yet.
    condition = operation.inputs[0].op.type
    return operation.type == "If" and condition == "VarIsInitializedOp"


def _no_first_value(variable: tf.Variable, cause: str) -> TowerError:
    return TowerError(
        f"the first value of a variable that the step makes ({variable.name}) "
        f"depends on {cause}, so it is known only in the step. Begin with "
        "zeros, and assign the value in the step."
    )


def in_replica() -> bool:
    """Whether this code runs in a replica of a strategy."""
    # Without a strategy, TensorFlow's default one has a replica, too.
    replica = tf.distribute.get_replica_context()
    return tf.distribute.has_strategy() and replica is not None


def make_function_trace_again() -> None:
    """Make the ``tf.function`` being traced for the first time trace again.

    A function is traced again if it created a variable (the second time
    TensorFlow raises a ValueError). A variable without any dependencies,
    control dependencies included, is initialized separately, so the first
    trace never runs.
    """
    with single_device_mode(), tf.control_dependencies(None):
        tf.Variable(0, trainable=False)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def outside(device: str) -> Iterator[None]:
    """Create values on a device, outside of all graphs and strategies."""
    with unseen(), single_device_mode(), tf.device(device):
        yield


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Make variables of which no function that is traced around this knows."""
    with tf.init_scope(), _creators([]):
        yield


def hidden_variable(
    value: Any, dtype: tf.DType | None = None, device: str = HOST
) -> tf.Variable:
    """Create a plain variable that no strategy sees."""
    with outside(device):
        return tf.Variable(value, dtype=dtype, trainable=False)


def unknown(value: Any) -> tf.Tensor:
    """Return a value that TensorFlow treats as unknown in a graph.

    TensorFlow computes constants before a step, and merges operations with
    equal inputs. The operations of an engine do not declare their effects, so
    it would do this to them, too. Only a branch prevents that: TensorFlow looks
    through placeholders and reshapes. It also merges branches of equal values,
    unless each reads its condition anew. The result has no gradient.
    """
    if tf.executing_eagerly():
        return value
    return tf.raw_ops.Switch(data=value, pred=_true().read_value())[1]


@functools.cache
def _true() -> tf.Variable:
    return hidden_variable(True)


@contextlib.contextmanager
def global_seed_of(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed in a block; later draws go on as before."""
    context = eager_context()
    # It has no generator before a seed was set.
    before = context._seed, getattr(context, "_rng", None)
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        context._seed, context._rng = before


class _TraceContext(_XlaContext):
    """The context of traces, whether XLA compiles them or not."""

    def __init__(self, xla: bool):
        super().__init__()
        self._xla = xla

    def IsXLAContext(self) -> bool:
        return self._xla

    def RequiresUniqueFunctionRetracing(self) -> bool:
        return True


class TracePlacement:
    """Where variables are, until one of them moves.

    A ``tf.function`` called by a step is traced again for another placement:
    its other traces read variables where they were.
    """

    def __init__(self) -> None:
        self.contexts = [_TraceContext(xla) for xla in (False, True)]
        _placements.append(self)


# TensorFlow tells contexts by their ids, which must not be used again.
_placements: list[TracePlacement] = []


@contextlib.contextmanager
def trace_context(
    xla: bool, placement: TracePlacement | None = None
) -> Iterator[None]:
    """Trace operations, as ``tf.function(jit_compile=xla)`` does.

    Args:
        xla: whether XLA is to compile them.
        placement: where variables are; None: where one device has them.
    """
    context = _XlaContext() if xla else None
    if placement is not None:
        context = placement.contexts[xla]
    if context is None:
        yield
        return
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def xla_kernels(type_: str, device_type: str) -> list[dict[str, set[int]]]:
    """Return the XLA kernels of a type of operations.

    Args:
        type_: the type.
        device_type: ``CPU`` or ``GPU``.

    Returns:
        For each kernel, the dtypes that attributes may have, by their names.
    """
    _register_xla_kernels()
    return [
        {c.name: set(c.allowed_values.list.type) for c in kernel.constraint}
        for kernel in _kernels_of(type_).kernel
        if kernel.device_type == f"XLA_{device_type}_JIT"
    ]


@functools.cache
def _register_xla_kernels() -> None:
    """Let TensorFlow register XLA's kernels, as it does at the first use."""
    graph = FuncGraph("first")
    with graph.as_default():
        graph.outputs = [tf.constant(0)]
    function = function_module.from_func_graph("keras_towers_first", graph, {})
    eager_context().get_compiler_ir(
        device_name=HOST,
        platform_name=None,
        function_name=function.name,
        flat_args=[],
        captured_inputs=[],
        stage="hlo",
    )


def shared_variable(
    name: str, shape: tf.TensorShape, dtype: tf.DType
) -> tf.Variable:
    """Return the variable with a name on the current device; it may be unset.

    TensorFlow refuses names in ``tf.Variable``, whose handles are private to a
    process.
    """
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
    handle._handle_data = _handle_data(shape, dtype)
    return BaseResourceVariable(
        trainable=False,
        shape=shape,
        dtype=dtype,
        handle=handle,
        handle_name=name,
        unique_id=name,
        name=name,
    )


def run_independently(operation: tf.Operation) -> None:
    """Order an operation in a ``tf.function`` by its control inputs alone."""
    # Otherwise TensorFlow runs all operations with effects one after another.
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        _run_independently(manager, operation)


def has_started() -> bool:
    """Whether TensorFlow has created this process's devices."""
    return eager_context()._context_handle is not None


def has_collective_leader() -> bool:
    """Whether TensorFlow has a leader for this process's collectives."""
    return bool(eager_context()._collective_leader)


def enable_collectives_again(server: bytes) -> None:
    """Give this process new collectives, over the server that it has.

    Args:
        server: the definition with which the server was started.
    """
    # The method of the context would warn of tensors that it does not touch.
    _enable_collectives(eager_context()._context_handle, server)


def call_cancellable(
    function: ConcreteFunction, arguments: Sequence[object], manager: Any
) -> list[tf.Tensor]:
    """Call a concrete function; another thread may cancel it.

    ``CancellationManager.get_cancelable_function`` would let the manager cancel
    functions that other threads call in the meantime, too.
    """
    context = eager_context()
    attributes = context.function_call_options.as_attrs()
    return _execute_with_cancellation(
        function.name,
        num_outputs=len(function.outputs),
        inputs=[*arguments, *function.captured_inputs],
        attrs=tuple(part for pair in attributes.items() for part in pair),
        ctx=context,
        cancellation_manager=manager,
    )
