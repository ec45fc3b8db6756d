"""What the constructors of strategies take, read without importing them.

Importing a strategy imports TensorFlow, which takes seconds: a command that has
a wrong option is to end before.
"""

from __future__ import annotations

import ast
import functools
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

import keras_towers
from keras_towers.fit import options


@functools.cache
def hints_of(kind: str) -> Mapping[str, str]:
    """Return the parameters of a strategy's constructor, and their types.

    Args:
        kind: its class in ``keras_towers``.

    Returns:
        Annotations by name; empty ones for options that are declared in
        ``StrategyOptions``.
    """
    path = f"{keras_towers._home_of(kind)}".replace(".", "/")
    source = pkgutil.get_data("keras_towers", f"{path}.py")
    (given,) = (
        inner.args
        for node in ast.parse(source or b"").body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
    )
    hints = {
        each.arg: ast.unparse(each.annotation)
        for each in (*given.args[1:], *given.kwonlyargs)
        if each.annotation
    }
    if given.kwarg and given.kwarg.annotation:
        unpacked = given.kwarg.annotation  # Unpack[RankKeywords]
        assert isinstance(unpacked, ast.Subscript)
        keywords = getattr(options, ast.unparse(unpacked.slice))
        hints |= dict.fromkeys(keywords.__annotations__, "")
    return MappingProxyType(hints)
