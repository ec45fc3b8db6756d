"""All private TensorFlow and Keras names that this package uses.

Only this module and ``fit/`` may import from ``keras.src`` or
``tensorflow.python``. All names are resolved at import time, so an incompatible
release fails with one clear error instead of training wrong weights.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from keras_towers._requirements import packages
from keras_towers.errors import CompatibilityError

KNOWN_TO_WORK = "TensorFlow 2.20 and 2.21 with Keras 3.14 and 3.15"


def resolve(path: str) -> Any:
    """Import an object by its path, ``"package.module:Name.attribute"``.

    Args:
        path: the module, a colon, and the dotted name inside it.

    Returns:
        The object.

    Raises:
        CompatibilityError: the installed TensorFlow or Keras has no such
            module or name.
    """
    module_name, _, names = path.partition(":")
    try:
        value = importlib.import_module(module_name)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise _gone(path) from error
    return value


def check_attribute(path: str, name: str) -> None:
    """Check that instances of a class have an attribute.

    Instance attributes cannot be imported, so the code of the class and its
    bases is searched for the name.

    Args:
        path: the class, as for ``resolve``.
        name: the attribute.

    Raises:
        CompatibilityError: neither the class nor its bases mention it.
    """
    owner = resolve(path)
    names: set[str] = set()
    for cls in owner.__mro__:
        names.update(vars(cls))
        for value in vars(cls).values():
            names |= _names_in(value)
    if name not in names:
        raise _gone(f"{path}, its attribute {name}")


def _names_in(value: Any) -> set[str]:
    """Return all attribute names that a method's or property's code uses."""
    value = getattr(value, "fget", value)
    value = inspect.unwrap(getattr(value, "__func__", value))
    codes = [getattr(value, "__code__", None)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        if code is not None:
            names.update(code.co_names)
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return names


def _gone(what: str) -> CompatibilityError:
    return CompatibilityError(
        f"keras_towers needs {what}, which is missing in the installed "
        f"versions ({_installed_versions()}). It is known to work with "
        f"{KNOWN_TO_WORK}: install one of these, or a newer keras_towers."
    )


def _installed_versions() -> str:
    found = packages("tensorflow")
    found |= packages("keras")
    named = [f"{name} {version}" for name, version in found.items()]
    return ", ".join(named) or "neither TensorFlow nor Keras"


_TF = "tensorflow.python"
_KERAS = "keras.src"

# TensorFlow: operations that do not give the same every time are refused.
is_op_determinism_enabled = resolve(
    f"{_TF}.framework.config:is_op_determinism_enabled"
)
# TensorFlow: one after another, where a function has operations with effects.
_run_independently = resolve(
    f"{_TF}.framework.auto_control_deps"
    ":AutomaticControlDependencies.run_independently"
)

# TensorFlow: distributed values.
Mirrored = resolve(f"{_TF}.distribute.values:Mirrored")
MirroredVariable = resolve(f"{_TF}.distribute.values:MirroredVariable")
SyncOnReadVariable = resolve(f"{_TF}.distribute.values:SyncOnReadVariable")
DistributedVariable = resolve(f"{_TF}.distribute.values:DistributedVariable")
PerReplica = resolve(f"{_TF}.distribute.values:PerReplica")
PerReplicaSpec = resolve(f"{_TF}.distribute.values:PerReplicaSpec")
BaseResourceVariable = resolve(
    f"{_TF}.ops.resource_variable_ops:BaseResourceVariable"
)
ResourceVariable = resolve(f"{_TF}.ops.resource_variable_ops:ResourceVariable")
_handle_data = resolve(f"{_TF}.ops.handle_data_util:create_handle_data")
regroup = resolve(f"{_TF}.distribute.distribute_utils:regroup")
select_replica = resolve(f"{_TF}.distribute.distribute_utils:select_replica")
current_replica_id = resolve(
    f"{_TF}.distribute.values_util:get_current_replica_id_as_int"
)
is_saving = resolve(f"{_TF}.distribute.values_util:is_saving_non_distributed")

# TensorFlow: the internals of MirroredStrategy.
MirroredExtended = resolve(
    f"{_TF}.distribute.mirrored_strategy:MirroredExtended"
)
MirroredReplicaContext = resolve(
    f"{_TF}.distribute.mirrored_run:_MirroredReplicaContext"
)
TracedFunction = resolve("tensorflow:types.experimental.PolymorphicFunction")
Function = resolve(
    f"{_TF}.eager.polymorphic_function.polymorphic_function:Function"
)
call_for_each_replica = resolve(
    f"{_TF}.distribute.mirrored_run:_call_for_each_replica"
)
_push_mode = resolve(f"{_TF}.distribute.distribute_lib:_push_per_thread_mode")
_pop_mode = resolve(f"{_TF}.distribute.distribute_lib:_pop_per_thread_mode")
_default_mode = resolve(
    f"{_TF}.distribute.distribute_lib:_get_default_replica_mode"
)
eager_context = resolve(f"{_TF}.eager.context:context")
global_seed = resolve(f"{_TF}.eager.context:global_seed")
get_default_graph = resolve(f"{_TF}.framework.ops:get_default_graph")
CancellationManager = resolve(f"{_TF}.eager.cancellation:CancellationManager")
_execute_with_cancellation = resolve(
    f"{_TF}.eager.execute:execute_with_cancellation"
)
constant_value_as_shape = resolve(
    f"{_TF}.framework.tensor_util:constant_value_as_shape"
)
ControlFlowFuncGraph = resolve(
    f"{_TF}.ops.control_flow_v2_func_graphs:ControlFlowFuncGraph"
)
WhileBodyFuncGraph = resolve(
    f"{_TF}.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph"
)

# TensorFlow: graphs of functions, their optimisation, and calls of them.
func_graph_from_py_func = resolve(
    f"{_TF}.framework.func_graph:func_graph_from_py_func"
)
FuncGraph = resolve(f"{_TF}.framework.func_graph:FuncGraph")
function_from_graph = resolve(
    f"{_TF}.eager.polymorphic_function.atomic_function:from_func_graph"
)
call_in_graph = resolve(
    f"{_TF}.eager.polymorphic_function.atomic_function:make_call_op_in_graph"
)
get_resource_handle_data = resolve(
    f"{_TF}.ops.handle_data_util:get_resource_handle_data"
)
set_handle_data = resolve(f"{_TF}.ops.handle_data_util:set_handle_data")
only_read = resolve(
    f"{_TF}.framework.auto_control_deps_utils"
    ":get_read_only_resource_input_indices_graph"
)
op_definition = resolve(f"{_TF}.framework.op_def_registry:get")
optimize_graph = resolve(f"{_TF}.grappler.tf_optimizer:OptimizeGraph")
GrapplerCluster = resolve(f"{_TF}.grappler.cluster:Cluster")
NamedDevice = resolve(
    "tensorflow.core.protobuf.device_properties_pb2:NamedDevice"
)

# TensorFlow: where random numbers come from.
stateless_ops = importlib.import_module(
    f"{_TF}.ops.gen_stateless_random_ops_v2"
)
seeded_ops = importlib.import_module(f"{_TF}.ops.gen_stateless_random_ops")
stateful_ops = importlib.import_module(f"{_TF}.ops.gen_random_ops")

set_global_attribute = resolve(
    f"{_KERAS}.backend.common.global_state:set_global_attribute"
)

# TensorFlow: a function of a model that tf.saved_model.load returns.
LoadedFunction = resolve(f"{_TF}.saved_model.load:_WrapperFunction")

in_xla_context = resolve(
    f"{_TF}.ops.control_flow_util:GraphOrParentsInXlaContext"
)
_XlaContext = resolve(f"{_TF}.ops.control_flow_ops:XLAControlFlowContext")
resolve(f"{_TF}.eager.context:Context.get_compiler_ir")

# Keras: the trainer, its data iterator, the optimizer and the losses.
TensorFlowTrainer = resolve(f"{_KERAS}.models.model:Trainer")
BaseTrainer = resolve(f"{_KERAS}.trainers.trainer:Trainer")
TFEpochIterator = resolve(
    f"{_KERAS}.backend.tensorflow.trainer:TFEpochIterator"
)
ArrayDataAdapter = resolve(
    f"{_KERAS}.trainers.data_adapters.array_data_adapter:ArrayDataAdapter"
)
convert_to_sliceable = resolve(
    f"{_KERAS}.trainers.data_adapters.array_slicing:convert_to_sliceable"
)
GeneratorDataAdapter = resolve(
    f"{_KERAS}.trainers.data_adapters.generator_data_adapter"
    ":GeneratorDataAdapter"
)
py_dataset_module = importlib.import_module(
    f"{_KERAS}.trainers.data_adapters.py_dataset_adapter"
)
trainer_module = importlib.import_module(f"{_KERAS}.backend.tensorflow.trainer")
keras_random = importlib.import_module(f"{_KERAS}.backend.tensorflow.random")
seed_generator_module = importlib.import_module(
    f"{_KERAS}.random.seed_generator"
)
resolve(f"{_KERAS}.random.seed_generator:global_seed_generator")
filter_traceback = resolve(f"{_KERAS}.utils.traceback_utils:filter_traceback")
resolve(f"{_KERAS}.utils.traceback_utils:include_frame")
LossFunctionWrapper = resolve(f"{_KERAS}.losses.losses:LossFunctionWrapper")
ImageLayer = resolve(
    f"{_KERAS}.layers.preprocessing.image_preprocessing"
    ".base_image_preprocessing_layer:BaseImagePreprocessingLayer"
)
get_keras_mask = resolve(f"{_KERAS}.backend:get_keras_mask")
set_keras_mask = resolve(f"{_KERAS}.backend:set_keras_mask")
loss_module = importlib.import_module(f"{_KERAS}.losses.loss")
in_stateless_scope = resolve(
    f"{_KERAS}.backend.common.stateless_scope:in_stateless_scope"
)
KerasVariable = resolve(f"{_KERAS}.backend.tensorflow:Variable")
load_h5_optimizer_weights = resolve(
    f"{_KERAS}.legacy.saving.legacy_h5_format"
    ":load_optimizer_weights_from_hdf5_group"
)
BaseOptimizer = resolve(f"{_KERAS}.optimizers.base_optimizer:BaseOptimizer")
get_global_attribute = resolve(
    f"{_KERAS}.backend.common.global_state:get_global_attribute"
)
set_global_attribute = resolve(
    f"{_KERAS}.backend.common.global_state:set_global_attribute"
)

# Methods and functions that fit/ calls, shadows or replaces: a missing one has
# to fail at import, not in the middle of a scope.
_USED = {
    f"{_KERAS}.models.model:Trainer": (
        "__init__ fit evaluate predict train_on_batch test_on_batch "
        "predict_on_batch train_step distribute_strategy _make_function "
        "make_train_function make_test_function make_predict_function "
        "_autoconvert_optionals _resolve_auto_jit_compile "
        "_symbolic_build _maybe_symbolic_build _get_metrics_result_or_logs"
    ),
    "keras.layers:Layer": "_flatten_layers",
    f"{_KERAS}.optimizers.base_optimizer:BaseOptimizer": (
        "__init__ apply apply_gradients scale_loss finalize_variable_values "
        "_get_variable_index"
    ),
    f"{_KERAS}.backend.tensorflow.optimizer:TFOptimizer": (
        "_all_reduce_sum_gradients assign_add assign_sub"
    ),
    f"{_KERAS}.backend.tensorflow:Variable": (
        "_initialize assign assign_add assign_sub"
    ),
    f"{_KERAS}.losses.loss": "reduce_values apply_mask",
    f"{_KERAS}.losses.losses:LossFunctionWrapper": "call",
    f"{_KERAS}.layers.preprocessing.image_preprocessing"
    ".base_image_preprocessing_layer:BaseImagePreprocessingLayer": (
        "call _is_batched"
    ),
    f"{_TF}.ops.resource_variable_ops:BaseResourceVariable": (
        "_read_variable_op"
    ),
    "keras.layers:BatchNormalization": "_moments",
    "keras.layers:TextVectorization": "call",
    f"{_KERAS}.trainers.data_adapters.py_dataset_adapter": "random",
    "keras.metrics:Mean": "update_state",
    f"{_KERAS}.layers.normalization.batch_normalization:BatchNormalization": (
        "_moments"
    ),
    "keras.metrics:Sum": "update_state",
    "keras.optimizers:Adam": (
        "update_step _apply_weight_decay _use_weight_decay"
    ),
    "keras.optimizers:SGD": "update_step",
    "keras.callbacks:TensorBoard": "_train_writer",
    "keras.callbacks:SwapEMAWeights": (
        "_tf_swap_variables _tf_finalize_ema_values"
    ),
    f"{_TF}.saved_model.load:_WrapperFunction": "_call_flat",
    f"{_KERAS}.backend.tensorflow.random": "shuffle",
    f"{_TF}.ops.gen_stateless_random_ops_v2": (
        "stateless_random_uniform_v2 stateless_random_normal_v2 "
        "stateless_truncated_normal_v2 stateless_random_uniform_int_v2 "
        "stateless_random_uniform_full_int_v2 stateless_random_gamma_v3 "
        "stateless_shuffle"
    ),
    f"{_TF}.ops.gen_stateless_random_ops": (
        "stateless_random_binomial stateless_random_poisson "
        "stateless_multinomial stateless_parameterized_truncated_normal"
    ),
    f"{_TF}.ops.gen_random_ops": (
        "random_uniform random_standard_normal truncated_normal "
        "random_uniform_int random_gamma random_poisson_v2 multinomial "
        "parameterized_truncated_normal random_shuffle"
    ),
    "tensorflow.random:Generator": "_prepare_key_counter",
    f"{_TF}.eager.context:Context": (
        "config configure_collective_ops enable_collective_ops "
        "check_collective_ops_peer_health abort_collective_ops "
        "ensure_initialized function_call_options"
    ),
    f"{_TF}.eager.cancellation:CancellationManager": "start_cancel",
    f"{_TF}.eager.polymorphic_function.polymorphic_function:Function": (
        "__call__ _clone"
    ),
    "tensorflow:Graph": "get_operations",
    "tensorflow.compat.v1": "reset_default_graph",
    "tensorflow.data:Dataset": "_inputs",
}
for _owner, _names in _USED.items():
    for _name in _names.split():
        resolve(f"{_owner}{'.' if ':' in _owner else ':'}{_name}")

# Instance attributes, set in __init__ or later.
_ATTRIBUTES = {
    f"{_KERAS}.models.model:Trainer": (
        "_distribute_strategy _jit_compile _compile_config _initial_epoch "
        "_eval_epoch_iterator _loss_tracker _compile_metrics _compile_loss"
    ),
    "keras.layers:Layer": "_seed_generators _metrics _losses _loss_ids",
    "keras.layers:BatchNormalization": "_reduction_axes synchronized",
    f"{_KERAS}.backend.tensorflow.trainer:TFEpochIterator": (
        "_steps_seen _num_batches _distributed_dataset data_adapter"
    ),
    f"{_KERAS}.trainers.data_adapters.array_data_adapter:ArrayDataAdapter": (
        "_num_samples _batch_size _shuffle _inputs"
    ),
    f"{_KERAS}.trainers.data_adapters.generator_data_adapter"
    ":GeneratorDataAdapter": "_first_batches",
    f"{_KERAS}.optimizers.base_optimizer:BaseOptimizer": (
        "_trainable_variables _iterations gradient_accumulation_steps use_ema"
    ),
    f"{_KERAS}.backend.tensorflow.optimizer:TFOptimizer": (
        "_distribution_strategy"
    ),
    f"{_KERAS}.backend.tensorflow:Variable": "_value",
    f"{_TF}.distribute.values:DistributedVariable": (
        "_distributed_container _values _primary _distribute_strategy"
    ),
    f"{_TF}.distribute.values:PerReplicaSpec": "_value_specs",
    f"{_TF}.ops.resource_variable_ops:BaseResourceVariable": "_unique_id",
    f"{_KERAS}.layers.layer:Layer": "_dtype_policy",
    "tensorflow:Graph": (
        "_variable_creator_stack _thread_local experimental_acd_manager"
    ),
    "tensorflow:Operation": "_add_control_input",
    f"{_TF}.data.ops.shuffle_op:_ShuffleDataset": "_seed _seed2",
    f"{_TF}.eager.context:Context": "_context_handle _collective_leader",
}
for _owner, _names in _ATTRIBUTES.items():
    for _name in _names.split():
        check_attribute(_owner, _name)


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


@contextlib.contextmanager
def xla_context() -> Iterator[None]:
    """Trace what is for XLA, as ``tf.function(jit_compile=True)`` does."""
    context = _XlaContext()
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def lower_to_xla(
    name: str, specs: Sequence[Any], variables: Sequence[Any], device: str
) -> None:
    """Translate a function for XLA, without compiling it.

    Args:
        name: the function.
        specs: of its first inputs; shapes are fully defined.
        variables: handles of variables for its other inputs.
        device: the full name of the device that it is for.

    Raises:
        ValueError: it cannot be translated.
    """
    eager_context().get_compiler_ir(
        device_name=device,
        platform_name=None,
        function_name=name,
        flat_args=list(specs),
        captured_inputs=list(variables),
        stage="hlo",
    )


def shared_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Return the variable of a name on the current device, maybe unset.

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
    """Order an operation in a ``tf.function`` by its control inputs alone.

    Otherwise TensorFlow runs all operations with effects one after another.
    """
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        _run_independently(manager, operation)


def has_started() -> bool:
    """Whether TensorFlow has created this process's devices."""
    return eager_context()._context_handle is not None


def has_collective_leader() -> bool:
    """Whether TensorFlow knows who leads the collectives of this process."""
    return bool(eager_context()._collective_leader)


def call_cancellable(
    function: Any, arguments: Sequence[Any], manager: Any
) -> list[Any]:
    """Call a concrete function; another thread may cancel it.

    ``CancellationManager.get_cancelable_function`` would let the manager cancel
    what any other thread calls in the meantime, too.

    Args:
        function: the concrete function.
        arguments: the tensors that it takes.
        manager: a ``CancellationManager``; its ``start_cancel`` ends the call.

    Returns:
        The function's flat outputs.

    Raises:
        tf.errors.CancelledError: it was cancelled.
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


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables an optimizer was built for; none if unbuilt."""
    return list(optimizer._trainable_variables)


def momenta_of_rmsprop(optimizer: Any) -> list[Any]:
    """Return the momenta of a built ``RMSprop``; none without momentum."""
    return list(optimizer._momentums)


def untraced(function: Any) -> Any:
    """Return a ``tf.function`` of the same code that has no traces yet."""
    return function._clone(None)


def layers_of(model: Any) -> list[Any]:
    """Return a model and all its layers, at any depth."""
    return list(model._flatten_layers())


# Instance attributes are looked up in the method that sets them.
for _owner, _method, _name in (
    (
        f"{_KERAS}.optimizers.base_optimizer:BaseOptimizer",
        "__init__",
        "_trainable_variables",
    ),
    ("keras.optimizers:RMSprop", "build", "_momentums"),
):
    if _name not in resolve(f"{_owner}.{_method}.__code__").co_names:
        resolve(f"{_owner}.{_name}")
resolve("keras:Model._flatten_layers")
