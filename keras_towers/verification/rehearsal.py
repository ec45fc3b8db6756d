"""A few steps of a model on one device, and on towers that share it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from keras_towers import devices as devices_lib
from keras_towers import reduction
from keras_towers.fit import told as told_lib
from keras_towers.fit.calls.synchronous import TowerCalls, check_splits
from keras_towers.fit.capture import compare, verdict
from keras_towers.fit.context import patches
from keras_towers.fit.contract import KerasCall
from keras_towers.fit.verify import snapshot, steps
from keras_towers.fit.verify.steps import RecordedStep, Run
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.options import Options
from keras_towers.verification.report import Kind

Seen: TypeAlias = dict[tuple[Kind, str], float]
"""Sizes of differences of gradients, logs and states in the rehearsal."""

_HALF = ("float16", "bfloat16")
_IN_HALF_PRECISION = 3e-2
_IN_SINGLE_PRECISION = 1e-4
# Deep networks with BatchNormalization amplify rounding, and towers round in
# more places than the weights.
_TIMES_ROUNDING = 30.0


@dataclasses.dataclass
class OnTowers:
    """The runs of a step on towers, and the findings before them."""

    # What ``fit`` would warn of.
    told: list[told_lib.Told]
    # For each trace of the step why it differs, or may.
    judged: list[list[verdict.Reason]]
    # The steps; empty if they did not run.
    runs: list[Run] = dataclasses.field(default_factory=list)
    # What they raised instead.
    error: Exception | None = None


class SharedDeviceStrategy(BaseStrategy):
    """Towers that share one device, whose gradients are recorded."""

    def __init__(self, towers: int, options: Options):
        super().__init__(devices_lib.resolve(None)[:1] * towers, options)
        reduce = reduction.sum_on_host
        self._compared = steps.ComparedUpdate(self._config, reduce)
        self._calls = TowerCalls(self._compared)
        self._compose(self._compared, self._calls)

    def step_of(
        self, model: keras.Model, spec: Any, wholes: Sequence[Run]
    ) -> RecordedStep:
        """Place a model; return its step on all towers."""
        # ``wholes`` are the steps on one device, whose gradients are applied.
        check_splits(model, self._config)
        self.adopt(model)
        self._calls.adoption.mark_trained()
        step = steps.step_of(model)
        asked = KerasCall("train_on_batch", step, model, {})
        call = self._calls.open(asked, False, None)
        run = self._compared.recorded(functools.partial(call.run_step, step))
        return RecordedStep(run, spec, wholes[0].updates, call.retrying)


class Rehearsal:
    """Runs steps of a built model, and leaves it as it was."""

    # What has mixed precision runs in single precision. Relative differences up
    # to ``tolerance`` count as rounding; None: those of the model's precision.

    def __init__(
        self,
        model: keras.Model,
        batches: Sequence[Any],
        spec: Any,
        tolerance: float | None,
    ):
        self._model = model
        self._batches = batches
        self._spec = spec
        self._variables = snapshot.all_of(model)
        self._before = snapshot.values_of(self._variables)
        self._is_mixed = _computes_in_half(model)
        with _in_float32(model):
            is_half = _computes_in_half(model)
        usual = _IN_HALF_PRECISION if is_half else _IN_SINGLE_PRECISION
        self._tolerance = usual if tolerance is None else tolerance

    def on_one_device(self, near: Sequence[dict[int, Any]] = ()) -> list[Run]:
        """Run the steps on one device."""
        # ``near`` has the states before each step, from which the trained
        # weights are to differ in their last bits.
        with (
            snapshot.restored(self._model),
            _in_float32(self._model),
        ):
            step = RecordedStep(steps.on_one_device(self._model), self._spec)
            runs = []
            for index, batch in enumerate(self._batches):
                if near:
                    snapshot.load(self._variables, near[index])
                    snapshot.other_last_bits(self._model)
                runs.append(self._recorded(step(batch)))
            return runs

    def on_towers(
        self, towers: int, options: Options, wholes: Sequence[Run]
    ) -> tuple[OnTowers, OnTowers]:
        """Run the steps on towers, where one device's gradients are applied."""

        def differs(told: Sequence[told_lib.Told]) -> bool:
            return self._is_mixed or _alike(options, told) != options

        # A trace with the given options, and steps whose options differ from
        # these only where results would differ by design.
        given = self._on_towers(towers, options, wholes, differs)
        if given.error is not None or not differs(given.told):
            return given, given
        with _in_float32(self._model):
            others = _alike(options, given.told)
            return given, self._on_towers(towers, others, wholes)

    def _on_towers(
        self,
        towers: int,
        options: Options,
        wholes: Sequence[Run],
        traced_only: Callable[[list[told_lib.Told]], bool] = lambda told: False,
    ) -> OnTowers:
        with (
            snapshot.restored(self._model),
            told_lib.heard() as told,
            verdict.heard() as judged,
        ):
            found = OnTowers(told, judged)
            strategy = SharedDeviceStrategy(towers, options)
            try:
                with strategy:
                    run = strategy.step_of(self._model, self._spec, wholes)
                    for batch, whole in zip(self._batches, wholes, strict=True):
                        found.runs.append(
                            self._recorded(run(batch, whole.updates))
                        )
                        # What the first one has told.
                        if traced_only(told):
                            break
            except Exception as error:
                found.error = error
        return found

    def _recorded(self, run: Run) -> Run:
        state = snapshot.values_of(self._variables)
        return dataclasses.replace(run, state=state)

    def differences(self, wholes: Sequence[Run], runs: Sequence[Run]) -> Seen:
        """Return differences beyond rounding, which steps may amplify."""
        states = [self._before, *(whole.state for whole in wholes)]
        over = {
            what: size
            for what, size in self._sizes(states, wholes, runs).items()
            if size > self._tolerance
        }
        if not over:
            return over
        others = self.on_one_device(states[:-1])
        rounding = self._sizes(states, wholes, others)
        return {
            what: size
            for what, size in over.items()
            if size > _TIMES_ROUNDING * rounding.get(what, 0.0)
        }

    def _sizes(
        self,
        states: Sequence[dict[int, Any]],
        wholes: Sequence[Run],
        runs: Sequence[Run],
    ) -> Seen:
        found: Seen = {}
        for before, one, other in zip(states, wholes, runs, strict=False):
            if not compare.are_of_the_same(one.updates, other.updates):
                # What follows differs, too.
                return {(Kind.UPDATES, "the step"): math.inf}
            values = {
                name: compare.values(
                    *(s[id(v)] for s in (before, one.state, other.state))
                )
                for name, v in snapshot.compared(self._model).items()
                if id(v) in before
            }
            for kind, group in (
                (Kind.GRADIENT, compare.gradients(one.updates, other.updates)),
                (Kind.LOG, compare.logs(one.logs, other.logs)),
                (Kind.STATE, values),
            ):
                for name, size in group.items():
                    found[kind, name] = max(size, found.get((kind, name), 0.0))
        return found


def _alike(options: Options, told: Iterable[told_lib.Told]) -> Options:
    """Return options with which nothing that was told differs by design."""
    kinds = {one.about for one in told}
    return dataclasses.replace(
        options,
        batch_norm="global" if "batch-norm" in kinds else options.batch_norm,
        random="global" if "random" in kinds else options.random,
    )


@contextlib.contextmanager
def _in_float32(model: keras.Model) -> Iterator[None]:
    """Compute in float32 where weights have that type, inside a block."""
    # Rounding to half precision would hide differences of other causes.
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            policy = getattr(layer, "_dtype_policy", None)
            if _is_mixed(policy):
                other = {"_dtype_policy": keras.DTypePolicy("float32")}
                stack.enter_context(patches.shadowed(layer, other))
        yield


def _computes_in_half(model: keras.Model) -> bool:
    """Whether a layer computes in half precision."""
    return any(
        layer.compute_dtype in _HALF for layer in model._flatten_layers()
    )


def _is_mixed(policy: Any) -> bool:
    return (
        type(policy) is keras.DTypePolicy
        and policy.variable_dtype == "float32"
        and policy.compute_dtype in _HALF
    )
