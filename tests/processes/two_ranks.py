"""A worker: all checks of two ranks, since starting a job takes long."""

from tests.kit.ranks import main
from tests.processes import compression, steps, training  # noqa: F401

if __name__ == "__main__":
    main()
