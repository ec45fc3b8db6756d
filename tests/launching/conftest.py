"""Every launcher can be stopped by Ctrl-C, however the suite was started."""

import pytest


@pytest.fixture(autouse=True)
def stoppable(ctrl_c):
    """Let what a test starts inherit no ignored SIGINT."""
