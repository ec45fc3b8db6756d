"""Every name of TensorFlow and Keras that is private or that is replaced.

Only this module imports from ``keras.src`` or ``tensorflow.python``. It checks
all names at import, so that an incompatible release fails with a clear error.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from keras_towers._imports import packages
from keras_towers.errors import CompatibilityError

TESTED_VERSIONS = {"TensorFlow": ("2.20", "2.21"), "Keras": ("3.14", "3.15")}
"""The first and the last version of each package that is known to work."""

TABLE: dict[str, set[str]] = {}
"""The names that are used of each object, by the object's path."""


def resolve(path: str, names: str = "") -> Any:
    """Import ``package.module:Name.attribute``, and check ``names`` of it."""
    module_name, _, within = path.partition(":")
    try:
        value = importlib.import_module(module_name)
        for name in within.split(".") if within else ():
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise _missing(path) from error
    for name in names.split():
        if not hasattr(value, name) and not _assigns(value, name):
            raise _missing(f"{path}{'.' if within else ':'}{name}")
    TABLE.setdefault(path, set()).update(names.split())
    return value


def _assigns(owner: Any, name: str) -> bool:
    """Whether the code of a class or its bases sets an attribute."""
    codes = [
        getattr(_function(value), "__code__", None)
        for cls in getattr(owner, "__mro__", ())
        for value in vars(cls).values()
    ]
    while codes:
        code = codes.pop()
        if code is None:
            continue
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        if name in code.co_names and any(
            step.opname == "STORE_ATTR" and step.argval == name
            for step in dis.get_instructions(code)
        ):
            return True
    return False


def _function(value: Any) -> Any:
    """The function of a method or of a property's getter or setter."""
    if isinstance(value, property):
        value = value.fset or value.fget
    return inspect.unwrap(getattr(value, "__func__", value))


def _missing(what: str) -> CompatibilityError:
    return CompatibilityError(
        f"keras_towers needs {what}, which is missing in the installed "
        f"versions ({_installed_versions()}). It is known to work with "
        f"{tested_versions()}: install one of these, or a newer keras_towers."
    )


def tested_versions() -> str:
    """Name the versions that are known to work."""
    return " and ".join(
        f"{name} {first} to {last}"
        for name, (first, last) in TESTED_VERSIONS.items()
    )


def _installed_versions() -> str:
    installed = packages("tensorflow") | packages("keras")
    named = [f"{name} {version}" for name, version in installed.items()]
    return ", ".join(named) or "neither TensorFlow nor Keras"


_TF = "tensorflow.python"
_KERAS = "keras.src"

# TensorFlow: distributed values.
_VALUES = f"{_TF}.distribute.values"
Mirrored = resolve(f"{_VALUES}:Mirrored")
MirroredVariable = resolve(f"{_VALUES}:MirroredVariable", "_get")
SyncOnReadVariable = resolve(f"{_VALUES}:SyncOnReadVariable", "assign")
DistributedVariable = resolve(
    f"{_VALUES}:DistributedVariable",
    "_distributed_container _values _primary _distribute_strategy",
)
PerReplica = resolve(f"{_VALUES}:PerReplica")
PerReplicaSpec = resolve(f"{_VALUES}:PerReplicaSpec", "_value_specs")
select_replica = resolve(f"{_TF}.distribute.distribute_utils:select_replica")
current_replica_id = resolve(
    f"{_TF}.distribute.values_util:get_current_replica_id_as_int"
)

# TensorFlow: the internals of MirroredStrategy.
MirroredExtended = resolve(
    f"{_TF}.distribute.mirrored_strategy:MirroredExtended",
    "_cross_device_ops _get_cross_device_ops _call_for_each_replica "
    "_create_variable _reduce_to _gather_to_implementation "
    "_experimental_distribute_dataset _distribute_datasets_from_function",
)
resolve(
    f"{_TF}.distribute.cross_device_ops:ReductionToOneDevice",
    "_num_between_graph_workers _gather_implementation",
)
_LIB = f"{_TF}.distribute.distribute_lib"
_push_mode = resolve(f"{_LIB}:_push_per_thread_mode")
_pop_mode = resolve(f"{_LIB}:_pop_per_thread_mode")
_default_mode = resolve(f"{_LIB}:_get_default_replica_mode")

# TensorFlow: the batch size of a dataset.
resolve(f"{_TF}.data.ops.batch_op:_BatchDataset", "_batch_size _input_dataset")
_constant_value = resolve(f"{_TF}.framework.tensor_util:constant_value")

# TensorFlow: variables.
_VARIABLES = f"{_TF}.ops.resource_variable_ops"
BaseResourceVariable = resolve(
    f"{_VARIABLES}:BaseResourceVariable", "handle _handle _unique_id"
)

# TensorFlow: this process, and calls of functions.
eager_context = resolve(f"{_TF}.eager.context:context")
resolve(
    f"{_TF}.eager.context:Context",
    "config configure_collective_ops enable_collective_ops "
    "check_collective_ops_peer_health abort_collective_ops "
    "ensure_initialized function_call_options get_compiler_ir "
    "_context_handle _collective_leader _seed _rng",
)
global_seed = resolve(f"{_TF}.eager.context:global_seed")
is_op_determinism_enabled = resolve(
    f"{_TF}.framework.config:is_op_determinism_enabled"
)
CancellationManager = resolve(
    f"{_TF}.eager.cancellation:CancellationManager", "start_cancel"
)
_execute_with_cancellation = resolve(
    f"{_TF}.eager.execute:execute_with_cancellation"
)

# TensorFlow: AutoGraph, which rewrites the functions that a user's tf.function
# calls. This package is exempted, like Keras: rewriting takes seconds, and
# changes nothing here.
_autograph = resolve(
    f"{_TF}.autograph.core.config", "CONVERSION_RULES DoNotConvert"
)
_autograph.CONVERSION_RULES = (
    _autograph.DoNotConvert(__name__.partition(".")[0]),
    *_autograph.CONVERSION_RULES,
)
_convert = resolve(f"{_TF}.autograph.impl.api:tf_convert")
_conversion = resolve(f"{_TF}.autograph.core.ag_ctx:control_status_ctx")

# TensorFlow: functions, their graphs, and how these are optimized.
_FUNCTION = f"{_TF}.eager.polymorphic_function"
Function = resolve(
    f"{_FUNCTION}.polymorphic_function:Function",
    "__call__ python_function _autograph",
)
function_module = resolve(f"{_FUNCTION}.atomic_function", "from_func_graph")
resolve(f"{_FUNCTION}.atomic_function:AtomicFunction", "call_flat")
call_in_graph = resolve(f"{_FUNCTION}.atomic_function:make_call_op_in_graph")
get_default_graph = resolve(f"{_TF}.framework.ops:get_default_graph")
resolve(
    "tensorflow:Graph",
    "get_operations _variable_creator_stack _thread_local "
    "experimental_acd_manager",
)
resolve("tensorflow:Operation", "_add_control_input")
resolve("tensorflow.compat.v1", "reset_default_graph")
# A function of a model that tf.saved_model.load returns.
LoadedFunction = resolve(
    f"{_TF}.saved_model.load:_WrapperFunction", "_call_flat"
)
func_graph_from_py_func = resolve(
    f"{_TF}.framework.func_graph:func_graph_from_py_func"
)
FuncGraph = resolve(
    f"{_TF}.framework.func_graph:FuncGraph",
    "_functions _get_function _add_function_recursive",
)
AutomaticControlDependencies = resolve(
    f"{_TF}.framework.auto_control_deps:AutomaticControlDependencies",
    "ops_which_must_run",
)
_handle_data = resolve(f"{_TF}.ops.handle_data_util:create_handle_data")


_Defun = resolve(f"{_TF}.framework.function:_DefinedFunction")
_graph_of_definition = resolve(
    f"{_TF}.framework.function_def_to_graph:function_def_to_graph"
)


def graph_of_function(graph: Any, name: str) -> Any:
    """Return the graph of a function that a graph calls; None if unknown."""
    function = graph._get_function(name)
    own = getattr(function, "graph", None)
    if own is not None or not isinstance(function, _Defun):
        return own
    # Functions of TensorFlow's own losses only keep their definition.
    with graph.as_default():
        return _graph_of_definition(function.definition)


def add_functions(graph: Any, other: Any) -> None:
    """Add the functions that operations of another graph call."""
    for function in other._functions.values():
        graph._add_function_recursive(function)


def add_function(graph: Any, function: Any) -> None:
    """Add a function, and the functions that it calls, to a graph."""
    graph._add_function_recursive(function)


get_resource_handle_data = resolve(
    f"{_TF}.ops.handle_data_util:get_resource_handle_data"
)
set_handle_data = resolve(f"{_TF}.ops.handle_data_util:set_handle_data")

# Counts the draws without an explicit seed in each graph.
draws_of_graphs = resolve(f"{_TF}.framework.random_seed:_graph_to_seed_dict")


def type_of_variable(handle: Any) -> Any:
    """Return the type of the variable of an eager handle, if any."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return data.shape_and_type[0].dtype


resources_of = resolve(
    f"{_TF}.framework.auto_control_deps_utils:get_read_write_resource_inputs"
)
# The attribute that says which of an operation's inputs it does not write.
READ_ONLY_INPUTS: str = resolve(
    f"{_TF}.framework.auto_control_deps_utils:READ_ONLY_RESOURCE_INPUTS_ATTR"
)
_run_independently = resolve(
    f"{_TF}.framework.auto_control_deps"
    ":AutomaticControlDependencies.run_independently"
)
op_definition = resolve(f"{_TF}.framework.op_def_registry:get")
in_xla_context = resolve(
    f"{_TF}.ops.control_flow_util:GraphOrParentsInXlaContext"
)
_XlaContext = resolve(f"{_TF}.ops.control_flow_ops:XLAControlFlowContext")


# TensorFlow: datasets.
resolve("tensorflow.data:Dataset", "_inputs _as_serialized_graph")
resolve(f"{_TF}.data.ops.map_op:_ParallelMapDataset", "_deterministic")
_GraphDef = resolve("tensorflow.compat.v1:GraphDef")
_ExternalStatePolicy = resolve(
    "tensorflow.data.experimental:ExternalStatePolicy"
)
_ParallelInterleaveDataset = resolve(
    f"{_TF}.data.ops.interleave_op:_ParallelInterleaveDataset"
)
resolve(f"{_TF}.data.ops.shuffle_op:_ShuffleDataset", "_seed _seed2")

# Keras: models.
TensorFlowTrainer = resolve(
    f"{_KERAS}.models.model:Trainer",
    "__init__ fit evaluate predict train_on_batch test_on_batch "
    "predict_on_batch train_step distribute_strategy _make_function "
    "make_train_function make_test_function make_predict_function "
    "_autoconvert_optionals _symbolic_build _maybe_symbolic_build "
    "_get_metrics_result_or_logs _distribute_strategy _jit_compile "
    "_initial_epoch _eval_epoch_iterator _loss_tracker "
    "_compile_metrics _compile_loss",
)
BaseTrainer = resolve(
    f"{_KERAS}.trainers.trainer:Trainer", "compile _resolve_auto_jit_compile"
)
resolve(f"{_KERAS}.trainers.compile_utils:CompileLoss", "_user_loss_weights")
trainer_module = resolve(
    f"{_KERAS}.backend.tensorflow.trainer", "TFEpochIterator"
)
TFEpochIterator = resolve(
    f"{_KERAS}.backend.tensorflow.trainer:TFEpochIterator",
    "_steps_seen _num_batches _distributed_dataset _get_iterator data_adapter",
)
traceback_utils = resolve(f"{_KERAS}.utils.traceback_utils", "include_frame")
resolve(
    "keras.callbacks:SwapEMAWeights",
    "_tf_swap_variables _tf_finalize_ema_values",
)
resolve("keras.callbacks:TensorBoard", "_train_writer")
CallbackList = resolve(
    "keras.callbacks:CallbackList", "_async_train _async_test _async_predict"
)
load_h5_optimizer_weights = resolve(
    f"{_KERAS}.legacy.saving.legacy_h5_format"
    ":load_optimizer_weights_from_hdf5_group"
)

# Keras: data.
_ADAPTERS = f"{_KERAS}.trainers.data_adapters"
ArrayDataAdapter = resolve(
    f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter",
    "_num_samples _batch_size _shuffle _inputs",
)
convert_to_sliceable = resolve(
    f"{_ADAPTERS}.array_slicing:convert_to_sliceable"
)
GeneratorDataAdapter = resolve(
    f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter", "_first_batches"
)
py_dataset_module = resolve(f"{_ADAPTERS}.py_dataset_adapter", "random")

# Keras: layers and losses.
resolve(
    "keras.layers:Layer",
    "_flatten_layers _seed_generators _metrics "
    "_tracker _layers _inbound_nodes _outbound_nodes",
)
resolve("keras.layers:BatchNormalization", "call _moments _reduction_axes")
resolve(f"{_KERAS}.losses.losses:LossFunctionWrapper", "_fn_kwargs")
loss_module = resolve(
    f"{_KERAS}.losses.loss",
    "scale_loss_for_distribution unscale_loss_for_distribution",
)
# Keras: optimizers.
BaseOptimizer = resolve(
    f"{_KERAS}.optimizers.base_optimizer:BaseOptimizer",
    "__getattribute__ build apply apply_gradients scale_loss "
    "finalize_variable_values _get_variable_index _backend_update_step "
    "_variables _trainable_variables _iterations _learning_rate use_ema "
    "gradient_accumulation_steps _accumulated_gradients "
    "_model_variables_moving_average",
)
TFOptimizer = resolve(
    f"{_KERAS}.backend.tensorflow.optimizer:TFOptimizer",
    "__init__ _all_reduce_sum_gradients assign_add assign_sub "
    "_distribution_strategy",
)
resolve(
    "keras.optimizers:Adam", "update_step _apply_weight_decay _use_weight_decay"
)
resolve("keras.optimizers:SGD", "update_step")
resolve("keras.optimizers:RMSprop", "_momentums")

# Keras: variables, draws and global state.
KerasVariable = resolve(
    f"{_KERAS}.backend.tensorflow:Variable",
    "_initialize _value assign assign_add assign_sub",
)
in_stateless_scope = resolve(
    f"{_KERAS}.backend.common.stateless_scope:in_stateless_scope"
)
_GLOBAL = f"{_KERAS}.backend.common.global_state"
global_state = resolve(_GLOBAL, "set_global_attribute")
get_global_attribute = resolve(f"{_GLOBAL}:get_global_attribute")
distribution_lib = resolve(f"{_KERAS}.backend.tensorflow.distribution_lib")
resolve("keras.distribution:DataParallel", "_is_multi_process")


def convert_call(function: Any) -> Any:
    """Convert a user's function by AutoGraph if the caller is converted."""
    return _convert(function, _conversion(), convert_by_default=False)


def traced_by(function: Any) -> Any:
    """Return the function that a ``tf.function`` traces; else the function."""
    inner = getattr(function, "python_function", function)
    rewrites = getattr(function, "_autograph", False)
    return _convert(inner, _conversion()) if rewrites else inner


# The priority of the variable creators by which a tf.function detects new
# variables.
_FUNCTION_PRIORITY = 50


def batch_size_of(dataset: Any) -> int | None:
    """Return the number of elements that a dataset batches, if it does."""
    while dataset is not None:
        size = getattr(dataset, "_batch_size", None)
        if size is not None:
            value = _constant_value(size)
            return None if value is None else int(value)
        dataset = getattr(dataset, "_input_dataset", None)
    return None


def interleaves_in_any_order(dataset: Any) -> bool:
    """Whether a dataset is a parallel ``interleave`` in no fixed order."""
    if not isinstance(dataset, _ParallelInterleaveDataset):
        return False
    import tensorflow as tf

    # Only the graph contains this argument.
    try:
        text = dataset._as_serialized_graph(
            external_state_policy=_ExternalStatePolicy.IGNORE
        ).numpy()
    except tf.errors.OpError:  # It contains arrays larger than 2 GB.
        return False
    graph = _GraphDef.FromString(text)
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

    Variables created inside are plain ``tf.Variable``s, ``get_strategy()`` is
    the default strategy and ``get_replica_context()`` its only replica, both
    eagerly and during tracing (``tf.cond`` branches inherit the mode).
    """
    graph = get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = []
    _push_mode(_default_mode())
    try:
        yield
    finally:
        _pop_mode()
        graph._variable_creator_stack = creators


def make_function_trace_again() -> None:
    """Make the ``tf.function`` being traced for the first time trace again."""
    import tensorflow as tf

    # A function is traced again if it created a variable (the second time
    # TensorFlow raises a ValueError). A variable without any dependencies,
    # control dependencies included, is initialized separately, so the first
    # trace never runs.
    graph = get_default_graph()
    creators = graph._variable_creator_stack
    with single_device_mode(), tf.control_dependencies(None):
        graph._variable_creator_stack = [
            (priority, creator)
            for priority, creator in creators
            if priority == _FUNCTION_PRIORITY
        ]
        tf.Variable(0, trainable=False)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def outside(device: str) -> Iterator[None]:
    """Create values on a device, outside of all graphs and strategies."""
    import tensorflow as tf

    with tf.init_scope(), single_device_mode(), tf.device(device):
        yield


def hidden_variable(device: str, value: Any, dtype: Any = None) -> Any:
    """Create a plain variable that no strategy sees."""
    import tensorflow as tf

    with outside(device):
        return tf.Variable(value, dtype=dtype, trainable=False)


@contextlib.contextmanager
def global_seed_of(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed in a block; later draws go on as before."""
    import tensorflow as tf

    context = eager_context()
    # It has no generator before a seed was set.
    before = context._seed, getattr(context, "_rng", None)
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        context._seed, context._rng = before


@contextlib.contextmanager
def xla_context() -> Iterator[None]:
    """Trace operations for XLA, as ``tf.function(jit_compile=True)`` does."""
    context = _XlaContext()
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def lower_to_xla(name: str, specs: Sequence[Any], device: str) -> None:
    """Translate a function for XLA, without compiling it."""
    eager_context().get_compiler_ir(
        device_name=device,
        platform_name=None,
        function_name=name,
        flat_args=list(specs),
        captured_inputs=[],
        stage="hlo",
    )


def shared_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Return the variable with a name on the current device; it may be unset.

    TensorFlow refuses names in ``tf.Variable``, whose handles are private to a
    process.
    """
    handle = resolve("tensorflow:raw_ops").VarHandleOp(
        dtype=dtype, shape=shape, shared_name=name
    )
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


def run_independently(operation: Any) -> None:
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


def call_cancellable(
    function: Any, arguments: Sequence[Any], manager: Any
) -> list[Any]:
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
