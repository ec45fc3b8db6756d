"""Shows the options that stand behind ``**options``, with their defaults."""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_IN_ARGS = re.compile(r"^ {4}\*\*options: (.+(?:\n {8}.+)*)\n", re.MULTILINE)


class Options(griffe.Extension):
    """Replaces ``**options: Unpack[Keywords]`` by the keywords.

    Their defaults are those of the class ``StrategyOptions``. What a docstring
    says of ``**options`` becomes a paragraph, since no such argument is left.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change the constructors of all classes."""
        module = pkg["fit.options"]
        defaults = module["StrategyOptions"].attributes
        for cls in _classes(pkg):
            init = cls.members.get("__init__")
            parameters = getattr(init, "parameters", ())
            if "options" not in {parameter.name for parameter in parameters}:
                continue
            annotation = str(parameters["options"].annotation)
            unpacked = re.fullmatch(r"Unpack\[(\w+)\]", annotation)
            if unpacked is None:
                continue
            del parameters["options"]
            # Those of its bases, too.
            for keyword in module[unpacked[1]].attributes.values():
                parameters.add(
                    griffe.Parameter(
                        keyword.name,
                        annotation=keyword.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=defaults[keyword.name].value,
                    )
                )
            _move_text(cls.docstring)


def _classes(owner: Any) -> Iterator[Any]:
    for member in owner.members.values():
        if not member.is_alias and (member.is_module or member.is_class):
            if member.is_class:
                yield member
            yield from _classes(member)


def _move_text(docstring: Any) -> None:
    """Move the text of ``**options`` before the arguments."""
    said = docstring and _IN_ARGS.search(docstring.value)
    if said:
        text = " ".join(said[1].split())
        rest = _IN_ARGS.sub("", docstring.value)
        docstring.value = rest.replace(
            "Args:\n", f"Options: {text}\n\nArgs:\n", 1
        )
