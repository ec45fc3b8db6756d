"""A worker: all checks of two ranks, since starting a job takes long."""

from tests.kit.ranks import main
from tests.processes import (  # noqa: F401
    compression,
    distribution,
    leaving,
    steps,
    timeline,
    training,
)

if __name__ == "__main__":
    main()
