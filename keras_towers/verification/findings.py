"""Findings on a step: of its analysis, of ``fit``, and of the rehearsal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit import told as told_lib
from keras_towers.fit.calls.synchronous import fixed_inputs, stateful_layers
from keras_towers.fit.capture.verdict import Reason
from keras_towers.fit.verify import snapshot
from keras_towers.verification.rehearsal import OnTowers, Seen
from keras_towers.verification.report import Finding, Kind

_REMEDIES = {
    Kind.GRADIENT: (
        "where examples meet, use keras_towers.gather(x), or "
        "keras_towers.mean(values, mask) for a mean; change what "
        "keras_towers.reduce_gradients(gradients) returns; or "
        "TowerStrategy(average=False) for a loss that is a sum"
    ),
    Kind.LOG: (
        "return the result of a keras.metrics metric, or a mean over the "
        "examples of the batch: keras_towers.mean(values)"
    ),
    Kind.STATE: (
        "write what all towers have in common to a keras.Variable: "
        "keras_towers.gather(x) for the rows of the whole batch (a queue), "
        "keras_towers.mean(values) for a mean"
    ),
    Kind.BATCH_NORM: (
        'TowerStrategy(batch_norm="global"), or exact=True; or '
        "BatchNormalization(synchronized=True)"
    ),
    Kind.RANDOM: (
        'leave random="tower" out, or accept other draws, which are as random'
    ),
    Kind.ROWS: (
        "give all parts of a batch the same number of rows, or hold what is "
        "not one row for each example in the model"
    ),
    Kind.STATEFUL: "use stateful=False, or train this model on one device",
    Kind.FIXED_BATCH: (
        "leave the batch size open: keras.Input(shape), without batch_size or "
        "batch_shape"
    ),
    Kind.UPDATES: (
        "decide on updates with what all towers have in common, such as "
        "optimizer.iterations or keras_towers.mean(values)"
    ),
    Kind.FAILS: (
        "make the step one that a tf.function can trace, for batches of every "
        "size, and call optimizers at its top level"
    ),
}
_MATCHED_DRAWS = (
    "draw with keras.random, Keras's layers or tf.random.stateless_*, for each "
    "example of the batch or in a fixed shape, and neither in a loop nor in a "
    "tf.function that the step calls; and compile the model without "
    "run_eagerly: other draws cannot be those of one device"
)
_KINDS = {"couples": Kind.GRADIENT, "plain-variable": Kind.STATE}
_CALLED = {
    Kind.UPDATES: "the number of updates in",
    Kind.GRADIENT: "the gradient of",
    Kind.LOG: "the log",
    Kind.STATE: "the variable",
}


def of(
    model: keras.Model, given: OnTowers, compared: OnTowers, seen: Seen
) -> tuple[list[Finding], list[str]]:
    """Return what differs, the most severe first, and what is not proven."""
    # ``seen`` is what differed in the rehearsal, and ``compared`` its step.
    for error in (given.error, compared.error):
        if error is not None:
            return [of_failure(model, error, "on towers")], []
    names = _Names(model)
    reasons = _reasons_of(given)
    of_analysis = [
        _of_reason(reason, seen, names)
        for reason in reasons
        if not reason.is_open
    ]
    analysed = {
        names.shown(name)
        for reason in reasons
        for difference in reason.differences
        for name in difference.names
    }
    known = {one.about for one in given.told}
    told = [*given.told, *(t for t in compared.told if t.about not in known)]
    of_fit = [_of_told(one, names) for one in told]
    if model.run_eagerly or tf.config.functions_run_eagerly():
        # Eager steps tell the same of batches of every size.
        of_fit = list({(one.kind, one.name): one for one in of_fit}.values())
    why = _reasons_of(compared)
    unexplained = {
        (kind, name): size
        for (kind, name), size in seen.items()
        if not _is_explained(kind, name, why, compared.told, names)
    }
    findings = [
        *_of_numbers(unexplained, why),
        *of_analysis,
        *(o for o in dict.fromkeys(of_fit) if o.name not in analysed),
    ]
    return findings, [reason.message for reason in reasons if reason.is_open]


def of_failure(model: keras.Model, error: Exception, where: str) -> Finding:
    """Tell why a step fails that one device can run eagerly."""
    # ``where`` is where it fails, such as "on towers".
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    # TensorFlow begins with a traceback where it has converted the code.
    said = lines[-1 if lines[0].endswith("in user code:") else 0].strip()
    if not isinstance(error, TowerError) and len(said) > 200:
        said = f"{said[:200]}..."
    for name in stateful_layers(model):
        message = f"{name} keeps a state for each row of a batch ({said})"
        return _finding(Kind.STATEFUL, name, message)
    for _, name in fixed_inputs(model):
        message = f"input {name} has a fixed batch size ({said})"
        return _finding(Kind.FIXED_BATCH, name, message)
    message = f"the step works eagerly on one device, but fails {where}: {said}"
    return _finding(Kind.FAILS, type(error).__name__, message)


def of_rows(name: str, message: str) -> Finding:
    """Tell that a part of a batch cannot be divided like the others."""
    return _finding(Kind.ROWS, name, message)


class _Names:
    """Names of variables in a report, by what the analysis calls them."""

    # That knows of no model: its names are those of ``tf.Variable``s.

    def __init__(self, model: keras.Model):
        self._shown: dict[str, str] = {}
        self.by_id: dict[int, str] = {}
        for name, variable in snapshot.compared(model).items():
            inner = getattr(variable, "_value", variable)
            self._shown.setdefault(inner.name.partition(":")[0], name)
            self.by_id[id(variable)] = name

    def shown(self, name: str) -> str:
        return self._shown.get(name, name)


def _reasons_of(found: OnTowers) -> list[Reason]:
    """Why the step differs, or may, as its last trace says."""
    return found.judged[-1] if found.judged else []


def _of_reason(reason: Reason, seen: Seen, names: _Names) -> Finding:
    message = f"the step {reason.message}"
    if not reason.differences:
        return Finding(Kind.EFFECT, "the step", message, reason.remedy)
    found: dict[str, float | None] = {}
    for difference in reason.differences:
        # The state of a metric is seen in its log.
        what = "log" if difference.what == "metric" else difference.what
        for name in map(names.shown, difference.names):
            found[name] = seen.get((Kind(what), name))
    name, size = max(found.items(), key=lambda item: item[1] or 0.0)
    kind = Kind(reason.differences[0].what)
    return Finding(kind, name, message, reason.remedy, size)


def _of_told(one: told_lib.Told, names: _Names) -> Finding:
    subject = one.subject
    if not isinstance(subject, str):
        subject = names.by_id.get(id(subject), subject.name)
    kind = _KINDS.get(one.about) or Kind(one.about)
    found = _finding(kind, subject, f"fit says: {one.message}")
    if kind == Kind.RANDOM and "random layers" not in subject:
        return dataclasses.replace(found, remedy=_MATCHED_DRAWS)
    return found


def _is_explained(
    kind: Kind,
    name: str,
    reasons: Sequence[Reason],
    told: Sequence[told_lib.Told],
    names: _Names,
) -> bool:
    """Whether a difference is explained already."""
    for one in told:
        about = _KINDS.get(one.about, one.about)
        if about in (Kind.RANDOM, Kind.ROWS):
            return True
        if about == Kind.GRADIENT and kind != Kind.STATE:
            return True
        if about == kind and _of_told(one, names).name == name:
            return True
    differences = [d for r in reasons if not r.is_open for d in r.differences]
    if kind == Kind.LOG:
        return any(d.what in ("log", "metric") for d in differences)
    return any(
        d.what == kind and name in map(names.shown, d.names)
        for d in differences
    )


def _of_numbers(seen: Seen, reasons: Sequence[Reason]) -> Iterator[Finding]:
    """Tell what differs in the rehearsal for no reason that is known."""
    why = [reason.message for reason in reasons if reason.is_open]
    said = (
        "The step " + " It ".join(why)
        if why
        else "The analysis says that it does not: that is a defect of "
        "keras_towers. Please report it, with the model."
    )
    for kind, what in _CALLED.items():
        sizes = {name: size for (k, name), size in seen.items() if k == kind}
        if not sizes:
            continue
        name, size = max(sizes.items(), key=lambda item: item[1])
        more = f" (and of {len(sizes) - 1} more)" if len(sizes) > 1 else ""
        message = (
            f"{what} {name!r}{more} differs from one device's in a rehearsal. "
            f"{said}"
        )
        yield Finding(kind, name, message, _REMEDIES[kind], size)


def _finding(kind: Kind, name: str, message: str) -> Finding:
    return Finding(kind, name, message, _REMEDIES[kind])
