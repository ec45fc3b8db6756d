"""Makes the effects of callbacks the same on all ranks.

``callback_roles.py`` decides which ranks run a callback.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.calls import tower_call
from keras_towers.fit.calls.callback_roles import (
    ALL_EVENTS,
    CHIEF_ONLY,
    callbacks_of_rank,
    in_form_of,
    listed,
    own_paths,
    with_added,
)
from keras_towers.fit.calls.lone_call import why_not_alone
from keras_towers.fit.calls.meeting import Meeting
from keras_towers.fit.components import KerasCall, TowerConfig
from keras_towers.fit.context import patches
from keras_towers.fit.context.identity_dict import IdentityDict
from keras_towers.fit.weights import (
    agreement,
    model_state as state_lib,
    writes,
)
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.fit.weights.copies import copy_on_tower
from keras_towers.fit.weights.joint_access import (
    Action,
    ExchangeIntents,
    Intent,
    JointAccess,
    refusing,
)
from keras_towers.fit.weights.shards import ShardedVariable, spans_ranks
from keras_towers.fit.weights.without_memory import is_deferred
from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.message_lists import describe_each
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Logs
from keras_towers.jobs.rendezvous import activity, rank_checks
from keras_towers.transport import Transport, messages

if TYPE_CHECKING:
    from keras_towers.fit.calls.tower_call import TowerCall

_Value: TypeAlias = "list[tf.Tensor] | Callable[[], tf.Tensor] | None"

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
# Keras calls the older ``on_batch_*`` from ``on_train_batch_*``.
_SYNCED_EVENTS = [e for e in ALL_EVENTS if not e.startswith("on_batch")]
# The batch methods of these classes stop no loop and write no weights.
_HARMLESS = (keras.callbacks.Callback, *CHIEF_ONLY)
# Data that Keras reads by calling code of the user, and what it calls.
_PYTHON_DATA = (types.GeneratorType, keras.utils.PyDataset)
_DATA = "code of the data"
# Ranks with their own data predict different numbers of batches.
_AFTER_PREDICT = {"on_predict_batch.*": "on_predict_end"}

# Attribute of a callback's method that stops no loop and writes no weights.
NEVER_STOPS = "_never_stops"


@contextlib.contextmanager
def callbacks_adapted(
    config: TowerConfig, adoption: Adoption, call: TowerCall, nested: bool
) -> Iterator[None]:
    """Keep only this rank's callbacks, and share their effects."""
    arguments = call.keras_call.arguments
    if call.kind.endswith("_on_batch"):
        yield
        return
    callbacks = arguments.get("callbacks")
    # Only rank 0 shows a progress bar.
    if config.job.rank > 0:
        arguments["verbose"] = 0
    synced = [c for c in listed(callbacks) if isinstance(c, SyncedCallbacks)]
    # Validation inside fit runs the callbacks of that fit.
    if nested and (synced or arguments.get("_use_cached_eval_dataset")):
        if synced:
            call.meeting = synced[0]
        yield
        return
    with contextlib.ExitStack() as stack:
        own: set[str] = set()
        if call.kind == "fit" and config.transport.size > 1:
            own = own_paths(config.transport, callbacks)
        of_this_rank = callbacks_of_rank(config.job, callbacks, stack, own)
        callbacks = in_form_of(callbacks, of_this_rank)
        stack.enter_context(refusing_ends(of_this_rank))
        if config.transport.size > 1:
            is_own = call.places.ranks.batch.size == 1
            synced_last = SyncedCallbacks(
                config.transport,
                of_this_rank,
                lambda model: [
                    *state_lib.collect(model).everything(),
                    *call.outer_variables,
                ],
                adoption,
                moved=_AFTER_PREDICT if is_own else {},
                data=(arguments.get("x"), arguments.get("validation_data")),
            )
            # Its data act before Keras gives callbacks the model.
            synced_last.set_model(call.model)
            callbacks = with_added(callbacks, synced_last)
            call.meeting = synced_last
            stack.enter_context(synced_last.watching())
        arguments["callbacks"] = callbacks
        yield


def refusing_ends(
    callbacks: Sequence[keras.callbacks.Callback],
) -> contextlib.AbstractContextManager[None]:
    """Turn exceptions that Keras takes for the end of the data into errors.

    In one process, too, such an exception of a callback would end the epoch.
    Here it would end on this rank only, and the other ranks would wait for it.
    """
    return patches.overridden(
        callbacks,
        lambda callback: {
            event: functools.partial(_refuse_end, event)
            for event in _SYNCED_EVENTS
            if "batch" in event and _acts(callback, event)
        },
    )


def _refuse_end(
    event: str,
    callback: keras.callbacks.Callback,
    original: patches.Original,
    *args: Any,
    **kwargs: Any,
) -> None:
    try:
        original(*args, **kwargs)
    except (StopIteration, tf.errors.OutOfRangeError) as error:
        raise TowerError(
            f"{type(callback).__name__}.{event} has raised {shorten(error)}, "
            "which Keras takes for the end of the data. This rank would end "
            "the epoch, and others would wait for it. Catch the error in the "
            "callback. To end training on all ranks, set model.stop_training "
            "= True."
        ) from error


class SyncedCallbacks(keras.callbacks.Callback, Meeting):
    """Propagates the effects of callbacks and data to all ranks. Collective.

    It runs after all other callbacks, since a callback on any rank may
    write weights or stop the loop. If a single rank left the loop, the next
    step of the other ranks would wait for it. The ranks agree at an event
    only if a callback on one of them acts there. ``moved`` maps patterns of
    events that ranks reach independently to the event at which they agree
    instead. Generators and ``PyDataset``s in ``data`` act, too. With
    ``leave_together``, a request to stop that ranks have not shared, such as
    one of another thread, waits until they do.
    """

    def __init__(
        self,
        transport: Transport,
        callbacks: list[keras.callbacks.Callback],
        variables: Callable[[keras.Model], list[Any]],
        adoption: Adoption | None = None,
        moved: Mapping[str, str] = types.MappingProxyType({}),
        data: Sequence[object] = (),
        leave_together: bool = True,
    ):
        super().__init__()
        self._transport = transport
        self._callbacks = callbacks
        self._variables = variables
        self._adoption = adoption
        self._joint, divides = JointAccess(transport), False
        if adoption is not None:
            self._joint = adoption.update.variables.access
            divides = adoption.update.sharding.divides_over_ranks
        # Whether other ranks take part in reading weights: what this call
        # divides is in shards only once callbacks are chosen.
        self._reads_together: bool = divides or self._joint.may_need_all
        # The code that runs: "Mine.on_epoch_end".
        self._running = ""
        # Of the variables that callbacks have written: the last writer's name,
        # and whether the value is another one.
        self._written: IdentityDict[keras.Variable, tuple[str, bool]]
        self._written = IdentityDict()
        acting = [
            e
            for e in _SYNCED_EVENTS
            if any(_acts(c, e, self._reads_together) for c in callbacks)
        ]
        for pattern, event in moved.items():
            acting = [re.sub(pattern, event, e) for e in acting]
        if any(isinstance(each, _PYTHON_DATA) for each in data):
            acting.append(_DATA)
        ranks = rank_checks.gather(transport, acting, "begins to run callbacks")
        self._events: set[str] = {*itertools.chain(*ranks)}
        self._leave_together = leave_together
        if leave_together:
            # Another thread may stop training at any time.
            self._events.add("on_epoch_end")
        # Requests to stop: those that ranks share, and those that wait for it.
        self._agreed: set[str] = set()
        self._waiting: set[str] = set()

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Record the variables that callbacks write in this block."""
        return patches.overridden(
            self._callbacks,
            lambda callback: {
                event: functools.partial(self._run, event)
                for event in _SYNCED_EVENTS
                if _acts(callback, event, self._reads_together)
            },
        )

    def _run(
        self,
        event: str,
        callback: keras.callbacks.Callback,
        original: patches.Original,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        name = type(callback).__name__
        with self._noting(name, f"{name}.{event}", event):
            original(*args, **kwargs)

    @contextlib.contextmanager
    def within_data(self, where: str) -> Iterator[None]:
        """Let code of data act in this block as callbacks do at an event.

        Args:
            where: what runs: "Mine.on_epoch_end".
        """
        if _DATA not in self._events:
            yield
            return
        with self._noting(where.partition(".")[0], where, _DATA):
            yield
        self._settle(_DATA)

    @contextlib.contextmanager
    def _noting(self, name: str, where: str, event: str) -> Iterator[None]:
        """Record the variables that code writes; let it meet other ranks."""
        variables = self._variables(self.model)
        before = [*map(_value, variables)]
        noted = writes.number()
        outer, self._running = self._running, where
        meets = event in self._events
        take = self._take if meets else refusing(f"in {where}")
        try:
            with (
                self._joint.known.take_action.holding(take),
                writes.noting_in.holding(tower_call.current()),
            ):
                yield
        finally:
            self._running = outer
        # A rank that writes the value that is there may differ from others.
        anew = writes.take(variables) if writes.number() != noted else []
        for index, variable in enumerate(variables):
            changed = not _is_same(before[index], _value(variable))
            if changed or index in anew:
                _, had_changed = self._written.get(variable, ("", False))
                self._written[variable] = name, changed or had_changed

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin the step, after all other callbacks."""
        self._settle("on_train_batch_begin")
        if self._adoption is not None:
            self._adoption.begin_steps(self.model)

    def _settle(self, event: str, *args: object, **kwargs: object) -> None:
        if event in self._events:
            self._transport.note_wait(event)
            # Callbacks of other ranks may make calls that this rank does not.
            self._joint.serve(event, self._sharing())
            activity.mark_over()
            return
        for name in set(_STOPS) - self._agreed:
            if self._leave_together and getattr(self.model, name, False):
                # This rank alone would leave the loop.
                setattr(self.model, name, False)
                self._waiting.add(name)

    def meet(self, what: object, call: KerasCall | None = None) -> list[object]:
        why = ""
        if call is not None:
            what = f"{what} in {self._running}" if self._running else what
            if self._adoption is not None:
                why = why_not_alone(call, self.model, self._adoption)
        with activity.within(f"the beginning of {what}", waits=True):
            return self._joint.meet(what, self._sharing(why))

    def _take(self, action: Action, value: object) -> tf.Tensor | None:
        """Read or write a variable in shards over the ranks."""
        with activity.within(f"{action} in {self._running}", waits=True):
            return self._joint.take_together(action, value, self._sharing())

    def _sharing(self, needs_all: str = "") -> ExchangeIntents:
        """Exchange intents, and share what callbacks have done until then.

        Args:
            needs_all: why not only some ranks can do it; empty: they can.
        """
        return functools.partial(self._share_effects, needs_all)

    def _share_effects(self, needs_all: str, mine: Intent) -> list[Intent]:
        """Share requests to stop, and the values that callbacks have written.

        Values wait until all ranks are about to do the same: before, a rank
        would get in the middle of a callback what others have written at its
        end, and write it once more.
        """
        model = self.model
        asked = [
            name
            for name in _STOPS
            if getattr(model, name, False) or name in self._waiting
        ]
        self._waiting.clear()
        has_written = any(changed for _, changed in self._written.values())
        shared = *mine, needs_all, asked, model._initial_epoch, has_written
        ranks = rank_checks.gather(
            self._transport, shared, "ends an event of callbacks"
        )
        all_do, actions, reasons, stops, epochs, written = zip(
            *ranks, strict=True
        )
        self._agreed.update(*stops)
        for name in itertools.chain(*stops):
            # A callback may know its own request by its value.
            setattr(model, name, getattr(model, name, False) or True)
        # A callback of rank 0 may have restored the epoch to continue with.
        model._initial_epoch = epochs[0]
        is_same = len({*all_do}) == 1
        if is_same:
            if any(written):
                self._take_over()
            self._written.clear()
        is_together = is_same or any(actions)
        for reason in () if is_together else filter(None, reasons):
            calls = {
                f"rank {rank}": f"calls {all_do[rank]}" if why else "does not"
                for rank, why in enumerate(reasons)
            }
            raise TowerError(f"{describe_each(calls)}, but {reason}.")
        return [*zip(all_do, actions, strict=True)]

    def _take_over(self) -> None:
        """Give all ranks the values that callbacks of any rank have written."""
        variables = self._variables(self.model)
        adoption = self._adoption
        apart = adoption is not None and adoption.ranks_diverge(self.model)
        # Each rank then counts on its own, and the ranks' metrics are summed.
        kept = state_lib.collect(self.model).metrics if apart else []
        for variable in kept:
            self._written.pop(variable, None)
        written = {
            str(index): (
                agreement.digest_of(variable),
                *self._written[variable],
            )
            for index, variable in enumerate(variables)
            if variable in self._written
        }
        ranks = rank_checks.gather(
            self._transport, written, "takes over what callbacks wrote"
        )
        roots: dict[int, list[keras.Variable]] = {}
        conflict = ""
        for index in dict.fromkeys(itertools.chain(*ranks)):
            by_rank = {
                r: own[index] for r, own in enumerate(ranks) if index in own
            }
            differ = len({digest for digest, _, _ in by_rank.values()}) > 1
            if len(by_rank) == len(ranks) and (apart or not differ):
                continue
            if not any(changed for _, _, changed in by_rank.values()):
                continue
            variable = variables[int(index)]
            roots.setdefault(min(by_rank), []).append(variable)
            if differ:
                names = (f"rank {r}: {n}" for r, (_, n, _) in by_rank.items())
                conflict = f"{variable.path} ({', '.join(names)})"
        for root, taken in roots.items():
            agreement.broadcast(self._transport, taken, root)
        is_first = self._transport.rank == 0
        if conflict and is_first and first_time(self.model, conflict):
            logger.warning(
                "callbacks wrote different values into %s on different "
                "ranks: all ranks continue with the values of the first of "
                "these ranks.",
                conflict,
            )


for _event in set(_SYNCED_EVENTS) - set(vars(SyncedCallbacks)):
    _settled = functools.partialmethod(SyncedCallbacks._settle, _event)
    setattr(SyncedCallbacks, _event, _settled)


def _acts(
    callback: keras.callbacks.Callback, event: str, reads: bool = False
) -> bool:
    """Whether a callback may stop a loop or write weights at an event.

    Keras also calls the methods with older names; a callback that does not
    inherit from Keras's class may lack some.

    Args:
        callback: the callback.
        event: the event.
        reads: whether other ranks have to take part in reading weights, too.
    """
    names = {event, event.replace("train_batch", "batch")}
    # Keras's callbacks that save weights have ``save_freq``.
    saves = getattr(callback, "save_freq", "epoch") != "epoch"
    is_harmless = "batch" in event and not (reads and saves)
    classes = _HARMLESS if is_harmless else _HARMLESS[:1]
    harmless = {vars(cls).get(name) for cls in classes for name in names}
    methods = [
        inspect.unwrap(getattr(callback, name))
        for name in names
        if hasattr(callback, name)
    ]
    functions = (getattr(method, "__func__", method) for method in methods)
    return hasattr(callback, event) and any(
        function not in harmless and not hasattr(function, NEVER_STOPS)
        for function in functions
    )


def _value(variable: keras.Variable) -> _Value:
    # Ranks write variables in shards together.
    if spans_ranks(variable):
        return None
    value = variable._value
    if is_deferred(variable):
        return value.first_value
    if isinstance(value, ShardedVariable):
        # The whole would be a copy.
        parts = itertools.chain(*value.shards)
        return [part.read_value() for part in parts]
    return [copy_on_tower(value).read_value()]


def _is_same(before: _Value, after: _Value) -> bool:
    if before is after:
        return True
    # One that is computed has been used in a graph, or written.
    first, second = (
        [value()] if callable(value) else value for value in (before, after)
    )
    if first is None or second is None:
        return True
    return all(map(_is_same_tensor, first, second))


def _is_same_tensor(before: tf.Tensor, after: tf.Tensor) -> bool:
    if before.dtype == tf.string:
        return True
    # TensorFlow writes into a new buffer while the old one is referenced.
    if "CPU" in before.device and np.shares_memory(before, after):
        return True
    # As bytes: what is no number equals nothing.
    octets = messages.bytes_of(before), messages.bytes_of(after)
    return bool(tf.reduce_all(tf.equal(*octets)))
