"""Objects that ranks send one another, signed with the job's secret.

For engines that anybody who reaches their ports may send to: nothing is
unpickled that does not come from a process that knows the secret.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.rendezvous import SECRET, same, sign

_SIGNATURE_BYTES = len(sign("", "", "", b""))


def sealed(rank: int, value: Any) -> bytes:
    """A picklable value with the signature of the rank that sends it."""
    data = pickle.dumps(value)
    return _signature(rank, data).encode() + data


def opened(rank: int, letter: bytes) -> Any:
    """The value that a rank has sent.

    Raises:
        TowerError: it is not signed with this job's secret.
    """
    signature, data = letter[:_SIGNATURE_BYTES], letter[_SIGNATURE_BYTES:]
    if not same(_signature(rank, data), signature.decode("latin-1")):
        raise TowerError(
            f"what came as from rank {rank} is not signed with this job's "
            f"secret: set {SECRET} to the same value on all ranks, and let "
            "nobody else reach their network."
        )
    return pickle.loads(data)


def _signature(rank: int, data: bytes) -> str:
    return sign(os.environ.get(SECRET, ""), "OBJECT", str(rank), data)
