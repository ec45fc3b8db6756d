"""A worker: BytePS as a transport, and what users do with its strategy."""

from tests.byteps import dropin, engine  # noqa: F401
from tests.kit.ranks import main
from tests.processes import exact, training  # noqa: F401

if __name__ == "__main__":
    main()
