"""Finding out why a step on towers differs from one device.

What can be made equal is made equal first: towers get the rows of one device's
random draws, and BatchNormalization the statistics of the whole batch. What
differs then is due to the step itself. Afterwards one of them at a time is left
as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.contract import NamedGradients
from keras_towers.fit.verify.runs import Run
from keras_towers.verification import compare, wording
from keras_towers.verification.compare import Differences
from keras_towers.verification.rehearsal import Options, Rehearsal
from keras_towers.verification.remedies import MATCHED_DRAWS, REMEDIES
from keras_towers.verification.report import Finding, Kind

# Deep networks with BatchNormalization amplify rounding, and towers round in
# more places than the weights.
_TIMES_ROUNDING = 30.0


def of(rehearsal: Rehearsal, tolerance: float) -> list[Finding]:
    """Find why a step differs on towers.

    Args:
        rehearsal: has run it on one device.
        tolerance: the largest relative difference that counts as rounding.

    Returns:
        The findings, the most severe first; none if it does not differ.
    """
    return _Causes(rehearsal, tolerance).all()


class _Causes:
    def __init__(self, rehearsal: Rehearsal, tolerance: float):
        self._rehearsal = rehearsal
        self._options = rehearsal.options
        self._whole = rehearsal.whole
        self._tolerance = tolerance

    def all(self) -> list[Finding]:
        run = self._rehearsal.on_towers(self._options)
        if run.error is not None:
            return [wording.of_failure(self._rehearsal.model, run.error)]
        if len(run.updates) != len(self._whole.updates):
            return [self._of_updates(run)]
        if not self._is_same(run) and not self._can_repeat():
            return [self._random(self._worst(run))]
        found, logs = self._of_gradients(run), self._of_logs(run)
        if found and logs:
            # What differs in a step differs in its logs.
            names = wording.named(finding.name for finding in logs)
            message = f"{found[0].message}; logs differ too ({names})"
            found[0] = dataclasses.replace(found[0], message=message)
            logs = []
        found += [*self._of_state(run), *logs]
        return found + self._of_batch_norm() + self._of_draws(run)

    def _differing(self, run: Run, whole: Run | None = None) -> Differences:
        """All that differs in a run, by name: first gradients, then logs."""
        whole = whole or self._whole
        return {
            **self._gradients_of(run, whole.updates),
            **self._over(compare.logs(whole.logs, run.logs)),
            **self._over(self._rehearsal.state_differences(whole, run)),
        }

    def _is_same(self, run: Run, whole: Run | None = None) -> bool:
        return run.error is None and not self._differing(run, whole)

    def _worst(self, run: Run) -> tuple[str, float]:
        return next(iter(self._differing(run).items()), ("the step", 1.0))

    def _can_repeat(self) -> bool:
        """Whether draws are equal, so that other causes can be told."""
        return not self._rehearsal.draws.missed and self._is_same(
            self._rehearsal.again()
        )

    def _of_updates(self, run: Run) -> Finding:
        here, there = len(run.updates), len(self._whole.updates)
        message = (
            f"the optimizers are called {there} times on the whole batch, "
            f"but {here} times on its parts"
        )
        return wording.finding(Kind.UPDATES, "the step", message)

    def _of_gradients(self, run: Run) -> list[Finding]:
        off = self._gradients_of(run, self._whole.updates)
        if not off:
            return []
        other = self._options.replace(average=not self._options.average)
        if self._matches(other):
            return [wording.sum_or_mean(self._options, off)]
        if self._options.average and self._is_partly_sum(run):
            message = f"a part of the loss of {wording.named(off)} is a sum"
            return [wording.finding(Kind.SUM, off, f"{message} over examples")]
        coupled = off
        by_hand: Differences = {}
        substituted = self._rehearsal.on_towers(
            self._options, self._whole.tapes
        )
        if self._whole.tapes and substituted.error is None:
            coupled = self._over(
                compare.gradients(self._whole.tapes, substituted.tapes)
            )
            by_hand = off if not coupled else self._changed(run)
        found = []
        if coupled:
            message = (
                f"the gradients of {wording.named(coupled)} are not the mean "
                "of those of the batch's parts: the loss couples the examples "
                "of a batch"
            )
            found.append(wording.finding(Kind.COUPLES, coupled, message))
        if by_hand:
            message = (
                f"the gradients of {wording.named(by_hand)} are changed "
                "between the tape and the optimizer: on a tower these are "
                "gradients of its part of the batch"
            )
            found.append(
                wording.finding(Kind.CHANGED_BY_HAND, by_hand, message)
            )
        return found

    def _changed(self, run: Run) -> Differences:
        """What the step makes of the towers' gradients when summed first."""
        summed_first = self._rehearsal.again(run.tapes)
        if summed_first.error is not None:
            return {}
        return self._gradients_of(run, summed_first.updates)

    def _gradients_of(
        self, run: Run, whole: Sequence[NamedGradients]
    ) -> Differences:
        return self._over(compare.gradients(whole, run.updates))

    def _matches(self, options: Options) -> bool:
        other = self._rehearsal.on_towers(options)
        return other.error is None and not self._gradients_of(
            other, self._whole.updates
        )

    def _is_partly_sum(self, run: Run) -> bool:
        """Whether gradients are those of a mean and a sum over examples.

        Gradients m of a mean and s of a sum are m + s on one device, and on
        average m + s / K on K towers.
        """
        towers = self._options.towers
        if self._rehearsal.rows % (2 * towers):
            return False
        twice = self._rehearsal.on_towers(
            self._options.replace(towers=2 * towers)
        )
        if twice.error is not None:
            return False
        told = [
            NamedGradients(
                few.names,
                [
                    None if a is None else _plus(a, b, towers)
                    for a, b in zip(few.grads, many.grads, strict=True)
                ],
            )
            for few, many in zip(run.updates, twice.updates, strict=False)
        ]
        off = compare.gradients(self._whole.updates, told)
        return not compare.over(off, 10 * towers * self._tolerance)

    def _over(self, differences: Differences) -> Differences:
        """What is more than rounding, also in a step that amplifies it."""
        off = compare.over(differences, self._tolerance)
        if not off:
            return off
        rounding = self._rounding
        return {
            name: size
            for name, size in off.items()
            if size > _TIMES_ROUNDING * rounding.get(name, 0.0)
        }

    @functools.cached_property
    def _rounding(self) -> Differences:
        """What the last bits of the weights change on one device."""
        run = self._rehearsal.nearby()
        if run.error is not None:
            return {}
        changed = compare.logs(self._whole.logs, run.logs)
        for other in (
            self._rehearsal.state_differences(self._whole, run),
            compare.gradients(self._whole.updates, run.updates),
        ):
            for name, size in other.items():
                changed[name] = max(size, changed.get(name, 0.0))
        return changed

    def _of_state(self, run: Run) -> list[Finding]:
        off = self._over(self._rehearsal.state_differences(self._whole, run))
        found = []
        for name, size in off.items():
            plain = name in self._rehearsal.plain_variables
            kind = Kind.PLAIN_VARIABLE if plain else Kind.STATE
            message = (
                f"{'tf.Variable ' * plain}{name} is written from the batch, "
                "with something else than a mean over its examples"
            )
            found.append(wording.finding(kind, {name: size}, message))
        return found

    def _of_logs(self, run: Run) -> list[Finding]:
        off = self._over(compare.logs(self._whole.logs, run.logs))
        found = []
        for name, size in off.items():
            one = wording.brief(self._whole.logs[name])
            many = wording.brief(run.logs.get(name))
            message = (
                f"the log {name!r} is {one} on one device, {many} on towers"
            )
            found.append(wording.finding(Kind.LOG, {name: size}, message))
        return found

    def _of_batch_norm(self) -> list[Finding]:
        moments = self._rehearsal.moments
        if not moments.layers:
            return []
        whole = self._rehearsal.with_batch_norm()
        run = self._rehearsal.on_towers(
            self._options.replace(equal_batch_norm=False), whole=whole
        )
        off = self._differing(run, whole)
        if run.error is not None or not moments.differ or not off:
            return []
        layers = list(dict.fromkeys(moments.differ))
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        message = (
            f"BatchNormalization ({', '.join(layers[:3])}{more}) normalizes "
            "with the statistics of a tower's part of the batch; "
            f"{wording.named(off)} differ"
        )
        return [wording.finding(Kind.BATCH_NORM, off, message)]

    def _of_draws(self, equal: Run) -> list[Finding]:
        if not self._rehearsal.draws.made:
            return []
        run = self._rehearsal.on_towers(
            self._options.replace(equal_draws=False)
        )
        off = self._differing(run, equal)
        if run.error is not None or not self._rehearsal.draws.differ or not off:
            return []
        return [self._random(next(iter(off.items())))]

    def _random(self, worst: tuple[str, float]) -> Finding:
        name, size = worst
        message = (
            "the step draws random numbers, on towers others than on one "
            f"device; {name} differs"
        )
        remedy = REMEDIES[Kind.RANDOM]
        if self._options.random == "global":
            remedy = MATCHED_DRAWS
        return Finding(Kind.RANDOM, name, message, remedy, size)


def _plus(few: Any, many: Any, towers: int) -> Any:
    """The gradient on one device, if it is that of a mean and a sum."""
    a, b = tf.convert_to_tensor(few), tf.convert_to_tensor(many)
    return (2 * b - a) + 2 * towers * (a - b)
