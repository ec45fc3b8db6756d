"""What a host is asked before it gets ranks, and what those inherit."""

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.launching.rank_process import check_reachable, exported
from tests.kit.scripts import write_executable

pytestmark = pytest.mark.core


def test_ssh_failure_is_one_line(tmp_path, monkeypatch):
    write_executable(
        tmp_path / "ssh", "printf 'first\\nno such key\\n' >&2; exit 255"
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        TowerError, match="reach host b by ssh, .*: no such key$"
    ):
        check_reachable(["b"])


def test_what_belongs_to_this_machine_is_not_exported():
    here = {"PATH": "/a", "HOME": "/b", "SSH_AUTH_SOCK": "c", "PYTHONPATH": "d"}
    assert exported(here) == {"PATH": "/a", "PYTHONPATH": "d"}
