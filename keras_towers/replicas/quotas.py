"""How many gradients of an update each replica computes."""

from __future__ import annotations

from keras_towers.errors import TowerError
from keras_towers.replicas.accumulators import GRADIENTS


def most_of_one(aggregate: int, replicas: int, shared: bool) -> int:
    """How many gradients of an update one replica can compute, at most.

    Args:
        aggregate: gradients in an update, R.
        replicas: number of replicas, T.
        shared: whether any replica may take any token.

    Raises:
        TowerError: too many gradients in an update.
    """
    most = max(quotas(aggregate, replicas))
    if shared:
        most = max(aggregate, replicas)
    if replicas * most > GRADIENTS:
        raise TowerError(
            f"{replicas} replicas, with {aggregate} gradients in an "
            f"update{' and shared tokens' * shared}, are too many: at most "
            f"{GRADIENTS} gradients can be told apart."
        )
    return most


def quotas(aggregate: int, replicas: int) -> list[int]:
    """How many gradients of an update each replica computes.

    Args:
        aggregate: gradients in an update, R.
        replicas: number of replicas, T.

    Returns:
        T numbers: 1 each if there are replicas to spare, else R in total.
    """
    if replicas >= aggregate:
        return [1] * replicas
    each, more = divmod(aggregate, replicas)
    return [each + (replica < more) for replica in range(replicas)]
