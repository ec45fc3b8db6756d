"""A worker: all checks of two ranks in one job, whose start takes long."""

from tests.kit.ranks import main
from tests.processes import compression, training  # noqa: F401

if __name__ == "__main__":
    main()
