"""Imports the models that a user names, and makes examples for them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_towers.foundation.errors import (
    TowerError,
    described,
    did_you_mean,
    shorten,
)
from keras_towers.foundation.system import working_folder
from keras_towers.jobs.launching.script_source import check_module

if TYPE_CHECKING:
    import keras
    import numpy as np


def check_named(target: str) -> None:
    """Check MODULE:FUNCTION, without importing it.

    Raises:
        TowerError: it names no function, or of no module; or the module does
            not compile.
    """
    module, _, name = target.partition(":")
    if not (module and name):
        raise TowerError(
            f"{target!r} names no function: give MODULE:FUNCTION, such as "
            "my_module:build"
        )
    if module.endswith(".py") and Path(module).is_file():
        dotted = module.removesuffix(".py").replace("/", ".")
        raise TowerError(
            f"{target!r} names a file, not a module: leave out .py, as in"
            f" {dotted}:{name}"
        )
    try:
        check_module(module)
    except TowerError as error:
        raise TowerError(f"{target} cannot be imported: {error}") from None


def find_named(target: str, *takes: str) -> Callable[..., object]:
    """Import MODULE:FUNCTION, also from the current folder.

    Args:
        target: the text.
        *takes: what each argument of the function is, for an error.

    Returns:
        The function; what it raises becomes a TowerError that names it.

    Raises:
        TowerError: it cannot be imported, or takes other arguments.
    """
    check_named(target)
    module, _, name = target.partition(":")
    if (here := str(working_folder())) not in sys.path:
        sys.path.insert(0, here)
    with naming(target, "cannot be imported"):
        imported = importlib.import_module(module)
        try:
            function = operator.attrgetter(name)(imported)
        except AttributeError as error:
            own = [n for n, value in vars(imported).items() if callable(value)]
            raise TowerError(
                f"{target} cannot be imported: {error}{did_you_mean(name, own)}"
            ) from None
    try:
        inspect.signature(function).bind(*takes)
    except TypeError:
        wanted = " and ".join(takes) or "without arguments"
        raise TowerError(
            f"{target} must be a function {wanted}, but is "
            f"{described(function)}"
        ) from None
    except ValueError:  # Not all that can be called has a signature.
        pass

    def call(*args: object) -> Any:
        with naming(target, "failed"):
            return function(*args)

    return call


@contextlib.contextmanager
def naming(target: str, what: str) -> Iterator[None]:
    """In this block, name the function and the line of an error.

    Args:
        target: the function of the user.
        what: what happened to it, if the error is none of this package.
    """
    try:
        yield
    except Exception as error:
        said = f"{target} {what}: {shorten(error)}"
        if isinstance(error, TowerError):
            said = str(error)
            if not said.startswith(target):
                said = f"{target}: {said}"
        raise TowerError(f"{said}{_place_of(error)}") from error


def _place_of(error: Exception) -> str:
    """Return the innermost line outside of installed packages, or ""."""
    folders = sysconfig.get_paths()
    libraries = (
        *(folders[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and not frame.filename.startswith(libraries):
            return f" ({path.name}, line {frame.lineno})"
    return ""


FIT_FORMS = ("x", "x, y", "x, y, sample_weight", "dataset")
"""The data that may come with a model, as for ``fit``."""


def model_and_data(
    built: Any, source: str, forms: Sequence[str] = FIT_FORMS
) -> tuple[keras.Model, list[Any]]:
    """Return the model and the data that a user's function has returned.

    Args:
        built: a compiled model, alone or in a tuple with data.
        source: the function, for an error.
        forms: what the data may be.

    Raises:
        TowerError: it is anything else.
    """
    import keras

    model, *data = built if isinstance(built, (tuple, list)) else (built,)
    numbers = {0, *(len(form.split(",")) for form in forms)}
    if not isinstance(model, keras.Model) or len(data) not in numbers:
        *some, last = (f"(model, {form})" for form in forms)
        pairs = f"{', '.join(some)} or {last}" if some else last
        raise TowerError(
            f"{source} must return a compiled keras.Model, alone or as "
            f"{pairs}, but returned {described(built)}"
        )
    if not model.compiled:
        raise TowerError(
            f"{source} returned model {model.name!r}, which is not compiled: "
            "call model.compile(optimizer, loss) in it"
        )
    return model, data


def random_examples(
    model: keras.Model, source: str, examples: int
) -> tuple[np.ndarray | list[np.ndarray], np.ndarray]:
    """Make examples from a model's inputs, outputs and compiled loss."""
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    inputs = getattr(model, "inputs", None) or []
    outputs = model.outputs if inputs else []
    shapes = [tensor.shape[1:] for tensor in (*inputs, *outputs)]
    if len(outputs) != 1 or any(None in shape for shape in shapes):
        raise TowerError(
            f"{source} returned a model without data, and examples cannot be "
            "made for it: its inputs have no known shape, or it has several "
            "outputs. Return (model, x, y)"
        )
    # Ids that every embedding accepts.
    ids = min(
        (
            layer.input_dim
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.Embedding)
        ),
        default=2,
    )

    def examples_for(tensor: keras.KerasTensor) -> np.ndarray:
        shape = (examples, *tensor.shape[1:])
        if "int" in str(tensor.dtype):
            return random.integers(ids, size=shape, dtype=np.int32)
        return random.random(shape, dtype=np.float32)

    x = [examples_for(tensor) for tensor in inputs]
    y = examples_for(outputs[0])
    # The loss may be a name, an object or a function.
    if "sparse" in repr(model.loss).lower():
        y = random.integers(y.shape[-1], size=y.shape[:-1])
    return x[0] if len(x) == 1 else x, y
