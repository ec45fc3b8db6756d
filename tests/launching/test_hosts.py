"""How hosts are written, and which of them are this machine."""

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import hosts
from keras_towers.launching.discovery import from_script, patient

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not ''"),
        ("a:1:2", "not 'a:1:2'"),
        ("a:0", "the host a needs at least one slot"),
        ("a:1,a:2", "the host a is given twice"),
        ("a;rm -rf:1", "not 'a;rm -rf:1'"),
    ],
)
def test_what_is_no_host_is_named(text, said):
    with pytest.raises(TowerError, match=said):
        hosts.parse_hosts(text)


def test_hosts_and_their_slots(tmp_path):
    found = hosts.parse_hosts("a:2, b-1.net:1,c")
    assert found == {"a": 2, "b-1.net": 1, "c": 1}
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:3  # old\nc\n")
    assert hosts.parse_hostfile(path) == {"a": 2, "b": 3, "c": 1}
    for text, said in (("# none\n", "no host was"), ("a slots\n", "'a slots'")):
        path.write_text(text)
        with pytest.raises(TowerError, match=f"hostfile .*{said}"):
            hosts.parse_hostfile(path)


def test_which_hosts_are_this_machine():
    assert hosts.is_local("localhost")
    assert hosts.is_local("127.0.0.7")
    assert not hosts.is_local("192.0.2.1")  # An address for documents.


def test_ssh_failure_is_one_line(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nprintf 'first\\nno such key\\n' >&2; exit 255")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TowerError, match="reach host b by ssh: no such key$"):
        hosts.check_reachable(["b"])


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "discover.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


def test_discovered_hosts(script):
    found = from_script(script("echo a:2; echo b"), 3)()
    assert found == {"a": 2, "b": 3}
    # There may be some later.
    assert from_script(script("true"), 3)() == {}
    for text, said in (
        ("echo no cluster >&2; exit 3", "exit code 3: no cluster"),
        ("printf '\\377'", "not '\ufffd'"),
    ):
        with pytest.raises(TowerError, match=said) as caught:
            from_script(script(text), 1)()
        assert "the host discovery script" in str(caught.value)
        assert "-H" not in str(caught.value)


def test_discovery_that_fails_for_a_while():
    answers = iter(
        [{"b": 1}, *3 * [TowerError("x")], {}, TowerError("x"), TowerError("y")]
    )

    def discover():
        answer = next(answers)
        if isinstance(answer, TowerError):
            raise answer
        return answer

    said = []
    find = patient(discover, {"a": 1}, said.append)
    found = [find() for _ in range(7)]
    assert found == [*4 * [{"b": 1}], *3 * [{}]]
    assert [line[0] for line in said] == ["x", "x", "y"]
