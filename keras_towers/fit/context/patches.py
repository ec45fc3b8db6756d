"""Temporary patches of classes, modules and single objects.

The docstring of ``keras_patches.py`` lists all of them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import CellType
from typing import Any, TypeAlias

Original: TypeAlias = Callable[..., Any]
"""What a patch replaces, and may call."""
Patch: TypeAlias = tuple[object, str, Callable[..., Any]]
"""An owner, the name of its attribute, and the function that replaces it."""


_lock = threading.RLock()
# By what is shared: the number of open blocks, and how to undo it.
_users: collections.Counter[Hashable] = collections.Counter()
_undo: dict[Hashable, contextlib.ExitStack] = {}


@contextlib.contextmanager
def while_used(
    shared: Hashable,
    enter: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Let blocks share another one, which they may enter in several threads.

    Args:
        shared: what they share.
        enter: returns the other block, which the first one enters, and the last
            one to exit leaves.
    """
    with _lock:
        _users[shared] += 1
    try:
        with _lock:
            if shared not in _undo:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(enter())
                    _undo[shared] = stack.pop_all()
        yield
    finally:
        with _lock:
            _users[shared] -= 1
            if not _users[shared] and shared in _undo:
                _undo.pop(shared).close()


def patched_while_used(
    patches: tuple[Patch, ...],
) -> contextlib.AbstractContextManager[None]:
    """Keep patches for the duration of blocks, as ``while_used`` says."""
    return while_used(patches, lambda: replaced(*patches))


@contextlib.contextmanager
def replaced(*patches: Patch) -> Iterator[None]:
    """Replace each ``owner.name`` with ``ours(original, ...)`` inside a block.

    A decorated method is replaced inside its decorator's closure, so that
    references taken earlier call ours too. Of a property, the getter is
    replaced.
    """
    with contextlib.ExitStack() as undo:
        for owner, name, ours in patches:
            undo.callback(_replace(owner, name, ours))
        yield


def _replace(
    owner: object, name: str, ours: Callable[..., object]
) -> Callable[[], None]:
    """Replace an attribute; return a function that puts it back."""
    attribute = getattr(owner, name)
    cell = _cell_of_wrapped(attribute)
    if cell is not None:
        original = cell.cell_contents

        def put(function: Callable) -> None:
            cell.cell_contents = attribute.__wrapped__ = function

        put(_calling(ours, original))
        return lambda: put(original)
    is_defined_here = name in vars(owner)
    if isinstance(attribute, property):
        assert attribute.fget is not None
        setattr(owner, name, attribute.getter(_calling(ours, attribute.fget)))
    else:
        setattr(owner, name, _calling(ours, attribute))
    if is_defined_here:
        return lambda: setattr(owner, name, attribute)
    return lambda: delattr(owner, name)


def _calling(ours: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ours(original, *args, **kwargs)

    return wrapper


def _cell_of_wrapped(function: object) -> CellType | None:
    """Return the closure cell where a decorated function keeps the original."""
    wrapped = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if wrapped is not None and cell.cell_contents is wrapped:
            return cell
    return None


Shadows: TypeAlias = Mapping[str, Callable[..., Any]]
"""Replacement functions by method name.

Each is called with the object, its original method, and the arguments of the
call.
"""


@contextlib.contextmanager
def overridden(
    instances: Iterable[Any], methods_of: Callable[[Any], Shadows]
) -> Iterator[None]:
    """Override methods of objects inside a block, as with ``shadowed``."""
    with contextlib.ExitStack() as stack:
        for each in instances:
            own = bind_to(each, methods_of(each))
            stack.enter_context(shadowed(each, own))
        yield


def bind_to(instance: object, methods: Shadows) -> dict[str, Any]:
    """Bind replacements to an object and its methods, for ``shadowed``."""
    return {
        name: functools.partial(ours, instance, getattr(instance, name))
        for name, ours in methods.items()
    }


@contextlib.contextmanager
def shadowed(
    instance: object, attributes: Mapping[str, object]
) -> Iterator[None]:
    """Override attributes of an object inside a block.

    Bypasses Keras's __setattr__, which tracks attributes. The object keeps its
    class, and ``super()`` calls reach the originals.
    """
    own = vars(instance) if attributes else {}
    before = {name: own[name] for name in attributes if name in own}
    try:
        own.update(attributes)
        yield
    finally:
        for name, ours in attributes.items():
            if own.get(name) is not ours:
                continue
            # The order of the others stays.
            if name in before:
                own[name] = before[name]
            else:
                del own[name]
