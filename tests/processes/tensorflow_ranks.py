"""A worker: checks of two ranks that TensorFlow's collectives connect."""

from tests.kit.ranks import main
from tests.processes import (  # noqa: F401
    compression,
    leaving,
    over_tensorflow,
    steps,
    training,
)

if __name__ == "__main__":
    main()
