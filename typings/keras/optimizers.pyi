from collections.abc import Iterable, Sequence
from typing import Any, Self

from . import Variable

class Optimizer:
    built: bool
    name: str
    learning_rate: Any
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    @property
    def iterations(self) -> Variable: ...
    @property
    def variables(self) -> list[Variable]: ...
    def build(self, variables: Sequence[Any]) -> None: ...
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
    ) -> Any: ...
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> Any: ...
    def get_config(self) -> dict[str, Any]: ...
    def _apply_weight_decay(self, variables: Sequence[Any]) -> None: ...
    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self: ...
    def __getattr__(self, name: str) -> Any: ...

class LossScaleOptimizer(Optimizer):
    inner_optimizer: Optimizer

def __getattr__(name: str) -> Any: ...
