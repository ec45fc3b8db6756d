"""Shows the examples of docstrings as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads the heading "Example:" as "Examples:", which alone is known."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of anything that has one."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )
