"""What needs BytePS is skipped where it is not installed."""

import importlib.util
import socket

import pytest


@pytest.fixture(autouse=True)
def _needs_byteps(request):
    if importlib.util.find_spec("byteps") is None:
        pytest.skip("BytePS is not installed: make .venv/byteps-cpu")


@pytest.fixture
def free_port():
    # Nobody else gets it meanwhile; who reuses addresses can listen at it.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
