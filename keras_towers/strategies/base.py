"""The base of all strategies: a TensorFlow strategy of three components.

The components are in ``fit/components.py``, ``fit/update/weight_update.py`` and
``fit/calls/tower_runner.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import keras
import tensorflow as tf

from keras_towers.fit import keras_patches
from keras_towers.fit.calls import saving, tower_call
from keras_towers.fit.calls.tower_runner import TowerRunner
from keras_towers.fit.components import (
    KerasStrategy,
    TowerConfig,
    words_for_another,
)
from keras_towers.fit.context import thread_state
from keras_towers.fit.options import (
    Batches,
    Shards,
    StrategyOptions,
    check_names,
    divided_by,
)
from keras_towers.fit.step.plan.device_memory import DoesNotFit
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.shards import NoValueError
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import announce, logger, silence
from keras_towers.foundation.system import defer_interrupts
from keras_towers.foundation.tf_strategy import MirroredStrategy
from keras_towers.jobs.rendezvous import separate_training, tf_config
from keras_towers.jobs.rendezvous.rank_checks import Peers
from keras_towers.strategies import description, modes
from keras_towers.strategies.device_mesh import Mesh
from keras_towers.strategies.layout_map import ShardedOverMesh
from keras_towers.strategies.tower_extended import TowerExtended
from keras_towers.transport import (
    NoRank,
    SingleProcess,
    Transport,
    devices as devices_lib,
)

_KERAS_2 = "tf_keras"
_OTHER_KERAS = (
    "this is a model of tf_keras (Keras 2), but strategies of keras_towers "
    "train models of Keras 3: import keras instead of tf_keras, and unset "
    "TF_USE_LEGACY_KERAS."
)

# TensorFlow numbers the collectives of every strategy from this base; two
# strategies of different size in one process must not share numbers.
_collective_key_bases = itertools.count(1_000_000, 100_000)


class _StrategyClass(type):
    """The type of strategies' classes, which explains wrong use."""

    if not TYPE_CHECKING:  # Checkers know the constructors themselves.

        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            """Make a strategy of arguments that fit its constructor."""
            signature = cls.__signature__
            try:
                given = signature.bind(*arguments, **options)
            except TypeError as error:
                check_names(cls.__name__, options, [*signature.parameters])
                untyped = [
                    parameter.replace(annotation=inspect.Parameter.empty)
                    for parameter in signature.parameters.values()
                ]
                form = signature.replace(parameters=untyped)
                raise TowerError(
                    f"{cls.__name__} does not take these arguments: {error}. "
                    f"Write {cls.__name__}{form}, and name the options."
                ) from None
            try:
                strategy = super().__call__(*arguments, **options)
            except separate_training.NoRankError as error:
                return _inert(cls, error, given.arguments.get("towers"))
            if "_config" not in vars(strategy):
                raise TowerError(
                    f"{cls.__module__}.{cls.__name__} is not complete: its "
                    "constructor must call super().__init__()."
                )
            return strategy

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, as of any class."""
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        _, *parameters = constructor.parameters.values()
        return constructor.replace(parameters=parameters)

    def __enter__(cls) -> NoReturn:
        raise TowerError(
            f"{cls.__name__} is a class, not a strategy: write `with "
            f"{cls.__name__}():`."
        )

    def __exit__(cls, *error: object) -> None: ...


class BaseStrategy(MirroredStrategy, KerasStrategy, metaclass=_StrategyClass):
    """A ``tf.distribute.Strategy`` made of the components ``fit/`` needs.

    A subclass calls this constructor, which creates ``_config``. Then it calls
    ``_compose``, with its own update and runner, if it has any. Its towers are
    devices, or the rows of a ``Mesh``.
    """

    # Overrides the name of the mode.
    _mode_name: str | None = None

    def __init__(
        self,
        devices: Sequence[str] | Mesh,
        options: StrategyOptions | None = None,
        *,
        transport: Transport | None = None,
        job: Peers | None = None,
        gradient_factor: float = 1.0,
    ):
        self._mesh = devices if isinstance(devices, Mesh) else None
        if isinstance(devices, Mesh):
            rows = devices.rows
        else:
            rows = [[device] for device in devices]
        devices = [row[0] for row in rows]
        # Refuse a malformed TF_CONFIG before TensorFlow reads it.
        tf_config.read_config()
        options = options or StrategyOptions()
        self._mode = modes.choose([*itertools.chain(*rows)], options)
        # An elastic job may have a single rank for the time being.
        connects = transport is not None or (job is not None and job.size > 1)
        if connects:
            separate_training.permit_training()
        transport = transport or SingleProcess()
        self._collective_key_base = next(_collective_key_bases)
        tf.distribute.Strategy.__init__(
            self, TowerExtended(self, devices, transport)
        )
        job = job or transport
        if not options.average:
            gradient_factor *= len(devices) * job.size
        self._config = TowerConfig(
            strategy=self,
            devices=tuple(self.extended.worker_devices),
            job=job,
            transport=transport,
            options=options,
            gradient_factor=gradient_factor,
            prefetches_to_towers=not devices_lib.all_on_host(devices)
            and job.size == 1,
            other_columns=[row[1:] for row in rows],
        )
        self._entered: contextlib.ExitStack | None = None

    def _compose(
        self,
        update: WeightUpdate | None = None,
        runner: TowerRunner | None = None,
    ) -> None:
        """Assemble the components; by default gradients are all-reduced."""
        self._follows_options = update is runner is None
        if update is None:
            config, mesh, sharding = self._config, self._mesh, None
            if mesh is not None:
                sharding = ShardedOverMesh(
                    config, mesh, lambda: self._adoption.models
                )
            self._mode = modes.fall_back_unless_tried(
                self._mode, config, config.options
            )
            update = modes.create_update(config, self._mode, sharding)
        self._update = update
        self._runner = runner or TowerRunner(update)

    def _for_dry_run(self, transport: Transport) -> BaseStrategy:
        """Return a strategy like this one, to plan with; it never runs."""
        devices = self._config.devices if self._mesh is None else self._mesh
        return strategy_for_dry_run(devices, self._config.options, transport)

    def _divide(self, shards: Shards) -> None:
        config = self._config
        options = divided_by(config.options, shards)
        devices = [*itertools.chain(*config.mesh)]
        mode = modes.choose(devices, options)
        self._mode = modes.fall_back_unless_tried(mode, config, options)
        self._update.divide(
            modes.choose_sharding(config, options),
            self._mode.collectives,
            self._mode.gradients,
        )

    @property
    def mode(self) -> str:
        """How the towers work together."""
        return self._mode_name or self._mode.name

    @property
    def rank(self) -> int:
        """The rank of this process, 0 to size - 1."""
        return self._config.job.rank

    @property
    def size(self) -> int:
        """The number of processes that train the model."""
        return self._config.job.size

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, from 0."""
        return self._config.job.local_rank

    @property
    def local_size(self) -> int:
        """The number of processes on this machine."""
        return self._config.job.local_size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def num_towers(self) -> int:
        """The number of towers of this process."""
        return self._config.num_towers

    @property
    def num_replicas(self) -> int:
        """The number of towers of all processes."""
        return self.num_towers * self.size

    @property
    def first_tower(self) -> int:
        """The index of this process's first tower among all towers."""
        return self.num_towers * self.rank

    @property
    def average(self) -> bool:
        """Whether gradients are averaged over replicas, as on one device."""
        return self._config.options.average

    @property
    def batches(self) -> Batches:
        """Whether the global batch is split, or each tower draws one."""
        return self._config.options.batches

    @property
    def sync_every_epoch(self) -> bool:
        """Whether all towers are synchronized at the end of each epoch."""
        return self._config.options.sync_every_epoch

    @property
    def updates(self) -> str:
        """Where the weights are updated: ``"once"``, ``"each"``, ..."""
        return self._update.name

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers of all processes; 1 inside a step of ``fit``.

        In a step, the strategy itself averages over the towers: do not divide a
        loss by their number. Keras divides losses only in functions that
        ``run`` runs. ``tf.distribute.get_replica_context()`` always has the
        number of towers of all processes.
        """
        inside = thread_state.current_step() is not None
        return 1 if inside else self.num_replicas

    def run(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run a function on each tower, as ``tf.distribute.Strategy`` does.

        A step of a call of Keras, such as ``fit``, runs on all towers together.
        This recognizes a model of tf_keras by the module of its step function:
        no other call shows what it is.

        Raises:
            TowerError: the function is a step of a model of tf_keras.
        """
        module = getattr(fn, "__module__", None) or ""
        if module.partition(".")[0] == _KERAS_2:
            error = TowerError(_OTHER_KERAS)
            # AutoGraph would wrap the message in its own.
            vars(error)["ag_pass_through"] = True
            raise error
        step = tower_call.step_of(fn)
        if step is not None:
            return step(*args)
        if tower_call.current() is None:
            with tf.init_scope():
                self._update.variables.unfold_for_replicas()
                self._adoption.share_created()
        return super().run(fn, args, kwargs, options)

    def describe(self) -> str:
        """Describe the towers, what runs on them, and why.

        Example:
            >>> print(TowerStrategy(4).describe())
            TowerStrategy: 4 towers (/device:CPU:0 to /device:CPU:3)
              mode "host": all towers are CPUs, ...
        """
        lines = (f"  {line}" for line in self._description_lines())
        return "\n".join([repr(self), *lines])

    def __repr__(self) -> str:
        mesh = self._config.mesh
        names = [devices_lib.short_name(d) for row in mesh for d in row]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        towers = f"{self.num_towers} tower{'s' if self.num_towers > 1 else ''}"
        if len(mesh[0]) > 1:
            towers += f" of {len(mesh[0])} devices each"
        size = self._config.transport.size
        each = f" in each of {size} processes" if size > 1 else ""
        return f"{type(self).__name__}: {towers} ({span}){each}"

    def _description_lines(self) -> list[str]:
        """The lines of ``describe`` after the first."""
        return description.lines_of(self, self._mode)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Make this the current strategy, as with any TensorFlow strategy.

        A model that is built in this scope stays on the towers permanently. A
        model that is built in ``with strategy:`` is an ordinary model after the
        block, but its training still runs on the towers.
        """
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy() and current is not self:
            raise TowerError(
                f"{type(self).__name__} cannot be entered inside the scope of "
                f"another {words_for_another(current, self)}: leave that "
                "scope first."
            )
        if type(self._config.job) is SingleProcess:
            _warn_if_in_job(type(self).__name__)
        if self._config.transport.size > 1:
            saving.let_one_rank_write(self._config.transport.rank)
            keras_patches.note_writes()
        with keras_patches.installed(), super().scope():
            yield self

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise TowerError(
                f"this {type(self).__name__} has been entered already: a "
                "strategy can be entered only once at a time."
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.scope())
            if self._config.divides:
                block = thread_state.OpenBlock(
                    f"the block of {type(self).__name__} was entered",
                    "Enter it",
                )
                stack.enter_context(thread_state.entered_block(block))
            self._announce()
            self._entered = stack.pop_all()
        self._adoption.in_block = True
        return self

    def _announce(self) -> None:
        """Announce the strategy in one line."""
        alone = isinstance(self._config.job, SingleProcess)
        plain = alone and self._runner.runs_plain_keras
        if plain and len(devices_lib.devices_of(None)) == 1:
            logger.warning(
                "%r: this process sees no other device, so training runs as "
                "without a strategy. To try several towers on a CPU, call "
                "keras_towers.virtual_towers(4) before anything else, or give "
                "`keras-towers run` --towers 4.",
                self,
            )
        elif self._config.job.rank == 0:
            announce(repr(self))

    def __exit__(self, *error: Any) -> None:
        stack, self._entered = self._entered, None
        access = self._update.variables.access
        # All ranks have refused a model at the same place.
        ends_well = error[0] is None or isinstance(error[1], DoesNotFit)
        if access.may_need_all:
            # A script may end in the block, and other ranks still read.
            left = error[1]
            is_exit = isinstance(left, SystemExit) and not left.code
            ends_well = ends_well or is_exit
        is_alone, meets = self._config.transport.size == 1, False
        try:
            if ends_well and not is_alone:
                self._end_together()
            meets = ends_well or is_alone
        finally:
            if stack is not None:
                stack.__exit__(*error)
            # At the end of the script, nobody needs to know what is lost.
            is_end = isinstance(error[1], SystemExit)
            quietly = silence() if is_end else contextlib.nullcontext()
            # A second Ctrl-C here would leave a model half on the towers.
            with defer_interrupts(), quietly:
                try:
                    # The other ranks may not take part after an error.
                    self._adoption.release(asks_ranks=meets)
                finally:
                    if access.may_need_all:
                        access.serve_at_exit()
                    self._config.transport.note_wait("")

    def _end_together(self) -> None:
        """Meet the other ranks at the end of the block."""
        access = self._update.variables.access
        self._config.transport.note_wait("the end of the block")
        self._adoption.end_rounds()
        if access.may_need_all:
            # This block does without what an earlier one has left in shards,
            # once a rank has ended.
            needs_all = self._update.sharding.divides_over_ranks
            unneeded = () if needs_all else (NoValueError,)
            with contextlib.suppress(*unneeded):
                access.serve("is at the end of the block")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # Models are bound to this strategy: their copies share it.
        return self

    def adopt(self, model: keras.Model) -> None:
        """Put a built model on the towers now instead of at its first ``fit``.

        Raises:
            TowerError: the model belongs to another strategy, or is not a
                model of Keras 3.
        """
        if not isinstance(model, keras.Model):
            raise TowerError(
                f"adopt takes a keras.Model of Keras 3, but got {model!r}."
            )
        if self._config.divides:
            self._adoption.claim(model)
            with self.scope():
                self._adoption.bind(model)


def _inert(
    kind: Any, error: separate_training.NoRankError, towers: Any
) -> BaseStrategy:
    """Return a strategy in a process that a rank has started.

    It has the numbers of the rank's own, and refuses every exchange.
    """
    with contextlib.suppress(RuntimeError):  # TensorFlow has started.
        # The GPUs are the rank's.
        tf.config.set_visible_devices([], "GPU")
    number = len(towers) if isinstance(towers, list | tuple) else towers or 1
    devices = [f"/device:CPU:{index}" for index in range(number)]
    strategy: BaseStrategy = kind.__new__(kind)
    BaseStrategy.__init__(strategy, devices, transport=NoRank(error))
    strategy._compose()
    return strategy


def strategy_for_dry_run(
    devices: Sequence[str] | Mesh,
    options: StrategyOptions,
    transport: Transport | None = None,
) -> BaseStrategy:
    """Return a strategy to plan with: it never runs, and needs no devices."""
    strategy = BaseStrategy(devices, options, transport=transport)
    strategy._compose()
    return strategy


@functools.cache
def _warn_if_in_job(name: str) -> None:
    """Warn if each process of a job would train its own model."""
    member = separate_training.member_of_job(certainly=True)
    if member is not None:
        cause = f"{name} trains within one process"
        logger.warning(separate_training.describe(member, cause))
