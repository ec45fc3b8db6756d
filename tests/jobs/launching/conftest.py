"""Jobs that have ended with the test that started them."""

import pytest

from tests.kit.processes import Launched


@pytest.fixture(autouse=True)
def stoppable(ctrl_c):
    """Let what a test starts inherit no ignored SIGINT."""


@pytest.fixture
def launch(tmp_path):
    """Start the launcher on a script, with options of both."""
    running = []

    def launch(options, source, *words, **variables):
        (tmp_path / "script.py").write_text(source)
        script = "script" if options.endswith("-m") else "script.py"
        arguments = *options.split(), script, *words
        running.append(Launched(tmp_path, *arguments, **variables))
        return running[-1]

    yield launch
    for job in running:
        job.kill_all()


@pytest.fixture
def run(launch):
    """Start it, and wait for its end."""
    return lambda *given, **variables: launch(*given, **variables).finish()
