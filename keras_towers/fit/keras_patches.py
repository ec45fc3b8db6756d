"""Patches Keras and TensorFlow while a strategy is in scope; lists all patches.

``fit/context/patches.py`` replaces names, and puts them back, after errors too.
The names in ``_PATCHES`` are patched while the scope of at least one of our
strategies is active, or a distribution of Keras is set; each patch defers to
Keras unless such a strategy is the current one.

Two of ``_PATCHES`` see all that Python makes meanwhile, as they cannot be bound
to what a strategy has taken over. ``from_func_graph``: an attribute of a
function can only be given when it is made, before anyone can know whether a
step will call it, and TensorFlow makes many itself, as for branches, loops and
gradients. ``__getattribute__`` of optimizers: a step may use one that no model
holds, which nothing sees before its first use, and whose class may override the
methods without calling those of Keras. Where no strategy of ours is in force,
the methods of an optimizer do what the originals do.

Wrapped for good, when this package is imported:

* here: six methods of a model, the one that resolves its
  ``jit_compile="auto"``, the two that give a variable its first value, the
  functions by which Keras stores and uses a distribution, ``export``, the two
  that call a function with a gradient of its own, and the filter of tracebacks
* ``fit/calls/saving.py``: functions that write models, checkpoints and datasets
* ``fit/data/shared_files.py``: the cache of a dataset, and Keras's ``get_file``
* ``compat.py``: AutoGraph leaves this package alone

Wrapped for good, once a rank of several enters a scope: TensorFlow's functions
that write variables, and its calls of functions.

Patched classes and modules:

* ``fit/data/shuffle_order.py``: random numbers of shuffles, while ``fit``
  creates its data on several ranks
* ``replicas/replica_calls.py``, ``replicas/hogwild.py``: ``assign`` of Keras
  variables and ``next`` of seed generators, while asynchronous towers train
* ``parameter_servers/worker_fit.py``: the same, while a worker trains
* ``fit/data/model_use.py``: uses of Keras variables, while Keras looks at the
  first batches
* ``fit/weights/without_memory.py``: how variables begin, while ``plan``
  builds models and traces their steps, or an optimizer makes slots in shards
* ``fit/weights/moved_variable.py``: calls of functions, while another variable
  has the value of one that they may have captured
* ``jobs/launching/function_job.py``: how Keras names a class that it saves,
  while a model is pickled
* ``jobs/launching/late_entry.py``: TensorFlow's start and the current strategy,
  until a script of ``keras-towers run`` needs them
* ``engines/dropin/distributed_models.py``: ``compile`` and ``fit`` of models,
  and ``LossScaleOptimizer``, until Horovod or BytePS shuts down

Patched attributes of a single object:

* ``fit/calls/tower_call.py``, ``fit/calls/lone_call.py``,
  ``strategies/noop.py``, ``parameter_servers/worker_fit.py``: a model, during a
  call
* ``fit/step/running/adaptive_function.py``: a model, while Keras makes its
  functions
* ``fit/step/plan/dry_run.py``: a model, while a step is planned
* ``fit/update/optimizers.py``: an optimizer, during an update
* ``engines/dropin/gradient_reducer.py``: an optimizer, for good
* ``fit/calls/callback_effects.py``, ``fit/calls/callback_roles.py``: callbacks
* ``fit/calls/saving.py``: a variable that ranks sum, while it is saved
* ``strategies/keras_distribution.py``: a distribution, during a call
* ``fit/data/epoch_iterator.py``: Keras's reader of data
* ``inspection/explanation.py``: a strategy, while it explains a step
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import keras_towers
from keras_towers.fit import components
from keras_towers.fit.calls import keras_loop, saving, tower_call
from keras_towers.fit.components import METHODS
from keras_towers.fit.context import patches, recomputed_calls, thread_state
from keras_towers.fit.data import model_use, shared_files
from keras_towers.fit.step.graph.tower_statistics import normalize
from keras_towers.fit.step.reports import step_reports
from keras_towers.fit.update.optimizers import attribute_of_optimizer
from keras_towers.fit.weights import model_binding, writes
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Variable

SHARED = "shared_rendezvous"
"""An attribute of TensorFlow's functions."""
_PACKAGE = os.path.dirname(keras_towers.__file__) + os.sep


def installed() -> contextlib.AbstractContextManager[None]:
    """Patch Keras until the last of all such blocks exits."""
    return patches.patched_while_used(_PATCHES)


def _scaled_loss(original: patches.Original, value: tf.Tensor) -> tf.Tensor:
    # Only in a custom loop does a replica see just its part of the batch.
    across = tf.distribute.in_cross_replica_context()
    if across and components.active_strategy() is not None:
        return value
    return original(value)


def _notify(
    event: str,
    original: patches.Original,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Notify the current strategy that a model was created or compiled."""
    original(model, *args, **kwargs)
    strategy = components.active_strategy()
    if strategy is not None:
        getattr(strategy._adoption, event)(model)


def _create_optimizer(
    original: patches.Original,
    optimizer: keras.Optimizer,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Create an optimizer as one device does; its update runs on one tower.

    Another thread may have one of TensorFlow's own strategies.
    """
    with contextlib.ExitStack() as stack:
        if components.active_strategy() is not None:
            stack.enter_context(compat.single_device_mode())
        original(optimizer, *args, **kwargs)


def _reset_default_graph(original: patches.Original) -> None:
    """Reset the default graph, but keep the active strategies in scope."""
    # TensorFlow stores the scopes in the old graph, and exits them there.
    scopes = compat.get_default_graph()._thread_local
    original()
    compat.get_default_graph()._thread_local = scopes


def _call_loaded(
    original: patches.Original, function: object, args: object, captured: Any
) -> object:
    """Call a function of a loaded model.

    TensorFlow refuses to call a function that was loaded under a strategy
    outside of its replicas; here it reads the variables of the first tower.
    """
    outside = tf.distribute.get_replica_context() is None
    if thread_state.current_step() is not None or (
        outside and components.active_strategy()
    ):
        captured = [
            item._primary.handle
            if isinstance(item, compat.DistributedVariable)
            else item
            for item in captured
        ]
    return original(function, args, captured)


def _create_variable(
    outside: Callable[[Variable], contextlib.AbstractContextManager[None]],
    original: patches.Original,
    variable: Variable,
    value: Any,
) -> None:
    strategy = components.active_strategy()
    if thread_state.current_step() is not None:
        # As on one device: what traces it counts the variables that it makes.
        original(variable, value)
    elif strategy is None:
        with outside(variable):
            original(variable, value)
    else:
        with strategy._adoption.registering_variable(variable):
            original(variable, value)


def _create_by_initializer(
    original: patches.Original, variable: Variable, initializer: object
) -> None:
    """Create a variable; ranks may create only their rows of a large one."""
    strategy, call = components.active_strategy(), tower_call.current()
    step, deferred = thread_state.current_step(), None
    if step is None and strategy is not None:
        deferred = strategy._adoption.defer(variable, initializer)
    elif step and step.first_call and call and not tf.executing_eagerly():
        deferred = call.adoption.defer_in_step(variable, initializer)
        if deferred is not None:
            step.first_call.makes_variables = True
    if deferred is None:
        original(variable, initializer)
    else:
        variable._initialize(deferred)


def _call_recomputed(
    original: patches.Original,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function with a custom gradient.

    The function of ``tf.recompute_grad`` is called once.

    Args:
        original: TensorFlow's way to call it.
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    given = compat.recomputed(function)
    # Where Keras infers shapes, there is no gradient.
    here = recomputed_calls.apply_here() or compat.in_symbolic_scope()
    if given is None:
        return original(function, args, kwargs)
    if not here:
        recomputed_calls.note_call_outside()
        return original(function, args, kwargs)
    with recomputed_calls.called_once(given, (args, kwargs)):
        return given(*args, **kwargs)


def _remat_mode(original: patches.Original, *values: Any) -> Any:
    """Make the mode that a layer has of ``keras.RematScope``."""
    in_block = components.active_strategy() or keras.distribution.distribution()
    return (recomputed_calls.ModeOfBlock if in_block else original)(*values)


def _use_traces(
    original: patches.Original, cache: Any, *arguments: Any
) -> object:
    """Use the traces of a function: outside, some call another one twice.

    Then those of blocks have a context of their own.

    Args:
        original: TensorFlow's method of the cache of traces.
        cache: the cache.
        arguments: a type of arguments, or a trace, and its context.
    """
    if recomputed_calls.has_traces_from_outside(cache.values):
        arguments = tuple(
            given._replace(context=(given.context, __name__))
            if isinstance(given, compat.FunctionContext)
            else given
            for given in arguments
        )
    return original(cache, *arguments)


def _export(original: patches.Original, *args: Any, **kwargs: Any) -> object:
    """Export a model with whole variables."""
    with (
        contextlib.ExitStack() as wholes,
        thread_state.exporting.holding(wholes),
    ):
        return original(*args, **kwargs)


def _share_rendezvous(original: patches.Original, *arguments: Any) -> Any:
    """Make a TensorFlow function that shares its caller's rendezvous.

    If a function has a private rendezvous, an error in it cancels the caller's
    transfers between devices before the caller receives the error, and
    TensorFlow reports the first failure that it sees: "RecvAsync is cancelled".
    A shared rendezvous ends with the error itself. It is not used for functions
    with transfers inside, which overlapping calls would mix up.
    """
    name, graph, attributes, *rest = arguments
    attributes = attributes or {}
    # Variables may be on another device than the function.
    variables = (tf.resource, tf.variant)
    has_variables = any(t.dtype in variables for t in graph.inputs)
    if attributes.get(SHARED, not has_variables):
        shared = len(_devices(graph)) < 2
        attributes = {**attributes, SHARED: shared}
    return original(name, graph, attributes, *rest)


def _devices(graph: tf.Graph) -> set[str]:
    """Return the devices named in a function and in the functions it calls."""
    inputs = {tensor.op.name for tensor in graph.inputs}
    operations = graph.get_operations()
    devices = {op.device for op in operations if op.name not in inputs}
    for function in graph._functions.values():
        definition = function.cached_definition
        devices |= {node.device for node in definition.node_def}
    return devices


_TRAINER, _BASE = compat.TensorFlowTrainer, compat.BaseTrainer
_PATCHES: tuple[patches.Patch, ...] = (
    # Catches references to Keras's methods taken before the patch.
    (_TRAINER, "_maybe_symbolic_build", keras_loop.build_without_call),
    # Keras's loops create their iterator by this name.
    (compat.trainer_module, "TFEpochIterator", keras_loop.epoch_iterator),
    # Objects created in a scope belong to its strategy.
    (_TRAINER, "__init__", functools.partial(_notify, "register_created")),
    (_BASE, "compile", functools.partial(_notify, "register_compiled")),
    (compat.TFOptimizer, "__init__", _create_optimizer),
    # keras.utils.clear_session() calls it, inside the block too.
    (compat.v1, "reset_default_graph", _reset_default_graph),
    (compat.LoadedFunction, "_call_flat", _call_loaded),
    # An error in a called function also ends its caller.
    (compat.function_module, "from_func_graph", _share_rendezvous),
    # A step may use optimizers that its model does not hold.
    (compat.BaseOptimizer, "__getattribute__", attribute_of_optimizer),
    # Keras divides losses by the number of replicas, even outside of replicas.
    (compat.loss_module, "scale_loss_for_distribution", _scaled_loss),
    (compat.loss_module, "unscale_loss_for_distribution", _scaled_loss),
    # It can use the statistics of each tower's rows.
    (keras.layers.BatchNormalization, "call", normalize),
    # Models and users keep functions that were traced outside.
    *((compat.FunctionCache, n, _use_traces) for n in compat.USES_OF_TRACES),
    # It has to make sense outside, too, to the layers made here.
    (compat.remat_module, "RematMode", _remat_mode),
)


@functools.cache
def note_writes() -> contextlib.ExitStack:
    """From now on, note variables that code of the user writes.

    Ranks share them in the next call of a loop over batches.
    """
    written = [(*where, _note_write) for where in compat.VARIABLE_WRITES]
    called = compat.CalledFunction, "_call_flat", _note_call
    # The cache keeps it: a block that nothing refers to ends.
    undo = contextlib.ExitStack()
    undo.enter_context(patches.replaced(*written, called))
    return undo


def _is_noted() -> bool:
    """Whether code of the user writes: outside of calls, or in a callback."""
    is_users = tower_call.current() is writes.noting_in.get()
    return is_users and tf.executing_eagerly()


def _note_write(
    original: patches.Original, *args: Any, **kwargs: Any
) -> object:
    if _is_noted():
        for given in (*args[:1], *kwargs.values()):
            writes.note(given)
    return original(*args, **kwargs)


def _note_call(
    original: patches.Original,
    function: Any,
    tensor_inputs: list[Any],
    captured_inputs: list[Any],
) -> object:
    if _is_noted():
        writes.note_call(function, [*tensor_inputs, *captured_inputs])
    return original(function, tensor_inputs, captured_inputs)


def patch_until_closed(
    around_call: Callable[
        [str, keras.Model], contextlib.AbstractContextManager[None]
    ],
    around_creation: Callable[
        [Variable], contextlib.AbstractContextManager[None]
    ],
    set_distribution: Callable[[Callable[[], None], Any], None],
    backend: Mapping[str, Callable[..., object]],
) -> contextlib.ExitStack:
    """Patch Keras until the stack is closed, also outside of scopes.

    A model's methods then run on the towers of its strategy, and
    ``keras.distribution`` is connected to towers. Keras's TensorFlow backend
    does not implement that; the functions that its JAX backend has are added
    where Keras itself looks for them.

    Args:
        around_call: returns the context of a call of a model's method.
        around_creation: returns that of a variable made outside of all scopes.
        set_distribution: gets the function that stores a distribution, and the
            distribution, or None.
        backend: functions by name. Each gets Keras's function that it replaces,
            or None, and the arguments of a call.
    """

    def method(
        kind: str,
        original: patches.Original,
        model: keras.Model,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        with around_call(kind, model):
            return _run(kind, original, model, *args, **kwargs)

    def store(original: patches.Original, name: str, value: object) -> None:
        if name == "distribution":
            set_distribution(lambda: original(name, value), value)
        else:
            original(name, value)

    variable, custom = compat.KerasVariable, compat.custom_gradient_module
    create = functools.partial(_create_variable, around_creation)
    replacements: list[patches.Patch] = [
        *((_TRAINER, n, functools.partial(method, n)) for n in METHODS),
        (variable, "_initialize", create),
        (variable, "_initialize_with_initializer", _create_by_initializer),
        (_BASE, "_resolve_auto_jit_compile", _resolve_auto),
        *saving.PATCHES,
        *shared_files.PATCHES,
        # An exported model knows no towers.
        (keras.Model, "export", _export),
        # A set_distribution that was imported by name calls it, too.
        (compat.global_state, "set_global_attribute", store),
        # In a block, what recompute_grad is given runs once.
        (custom, "_graph_mode_decorator", _call_recomputed),
        (custom, "_eager_mode_decorator", _call_recomputed),
        # Tracebacks show the user's lines.
        (compat.traceback_utils, "include_frame", _is_shown),
    ]
    with contextlib.ExitStack() as undo:
        undo.enter_context(patches.replaced(*replacements))
        filled_in = {
            name: functools.partial(
                ours, getattr(compat.distribution_lib, name, None)
            )
            for name, ours in backend.items()
        }
        undo.enter_context(patches.shadowed(compat.distribution_lib, filled_in))
        return undo.pop_all()


def _run(
    kind: str,
    original: patches.Original,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Run a method of Keras on the towers of its strategy, if it has one."""
    in_block = tf.distribute.has_strategy()
    if in_block and components.active_strategy() is None:
        # One of TensorFlow's own strategies may train an ordinary model.
        model_binding.release_from_default(model)
    strategy = model_binding.strategy_that_runs(model, kind)
    if strategy is not None:
        if compat.in_replica():
            raise TowerError(
                f"{kind} of model {model.name!r} was called on each tower, by "
                "strategy.run or run_on_each_tower, but uses all towers "
                "itself: call it in the strategy's block, outside of these."
            )
        if not in_block:
            model_binding.announce_default(model, kind, strategy._config)
        runner = strategy._runner
        report = functools.partial(
            step_reports.record_called_once, strategy._config, model
        )
        with (
            runner.failing_together(kind),
            recomputed_calls.reporting.holding(report),
        ):
            call = components.KerasCall.of(kind, original, model, args, kwargs)
            with model_use.calling(model), strategy.scope():
                return runner.run_call(call)
    trains = kind in components.TRAINING
    if strategy is None and trains:
        _warn_if_block_is_elsewhere(kind, model)
    # This may be a nested call, such as evaluate in a callback.
    outer = thread_state.trains_on_one_device
    with outer.holding(None if outer.get() is None else trains):
        return original(model, *args, **kwargs)


def _warn_if_block_is_elsewhere(kind: str, model: keras.Model) -> None:
    """Warn once of training on one device beside a block of another thread."""
    block = thread_state.block_of_other_thread()
    if block is None:
        return
    said = "opened elsewhere", block.opened, block.thread.name
    if first_time(model, said):
        logger.warning(
            "%s of model %r runs on one device: %s in thread %r and applies "
            "only there, but this is thread %r. %s in the thread that calls "
            "%s.",
            kind,
            model.name,
            block.opened,
            block.thread.name,
            threading.current_thread().name,
            block.how,
            kind,
        )


def _resolve_auto(original: patches.Original, model: keras.Model) -> bool:
    """Resolve ``jit_compile="auto"`` as Keras does without a strategy.

    Under a strategy of TensorFlow's own, XLA cannot compile a step; on towers
    it can.
    """
    if components.tower_strategy_of(model) is None:
        return original(model)
    with patches.shadowed(model, {"_distribute_strategy": None}):
        return original(model)


def _is_shown(inner: Callable[[str], bool], filename: str) -> bool:
    return inner(filename) and not filename.startswith(_PACKAGE)
