"""How hosts are written, and which of them are this machine."""

import stat

import pytest

from keras_towers.errors import TowerError
from keras_towers.launching import hosts
from keras_towers.launching.discovery import from_script, patient

pytestmark = pytest.mark.core


def test_hosts_and_their_slots():
    assert hosts.parse_hosts("a:2, b-1.net:1,c") == {
        "a": 2,
        "b-1.net": 1,
        "c": 1,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not ''"),
        ("a:b", "not 'a:b'"),
        ("a:1:2", "not 'a:1:2'"),
        ("a:0", "the host a needs at least one slot"),
        ("a:1,a:2", "the host a is given twice"),
        ("a;rm -rf:1", "not 'a;rm -rf:1'"),
    ],
)
def test_what_is_no_host_is_named(text, said):
    with pytest.raises(TowerError, match=said):
        hosts.parse_hosts(text)


def test_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:3  # old\nc\n")
    assert hosts.parse_hostfile(path) == {"a": 2, "b": 3, "c": 1}


@pytest.mark.parametrize("text", [None, "# none\n", "a slots\n"])
def test_bad_hostfile(tmp_path, text):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TowerError, match="hostfile"):
        hosts.parse_hostfile(path)


def test_which_hosts_are_this_machine():
    assert hosts.is_local("localhost")
    assert hosts.is_local("127.0.0.7")
    assert not hosts.is_local("192.0.2.1")  # An address for documents.


def test_unknown_host_is_one_line():
    with pytest.raises(TowerError, match="unknown host no.such.invalid"):
        hosts.is_local("no.such.invalid")


def test_local_ranks_meet_on_loopback():
    assert hosts.meeting_address([]) == "127.0.0.1"


def test_ssh_failure_is_one_line(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho first >&2\necho no such key >&2\nexit 255\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(TowerError, match="reach host b by ssh: no such key$"):
        hosts.check_reachable(["b"])


def test_remote_command_is_quoted_once():
    line = hosts.ssh_command("b", 2222, ["python", "a b", "$c"])
    assert line[0] == "ssh"
    assert line[-4:] == ["-p", "2222", "b", "python 'a b' '$c'"]


@pytest.fixture
def script(tmp_path):
    def write(text, mode=0o755):
        path = tmp_path / "discover.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(mode)
        return path

    return write


def test_discovered_hosts(script):
    assert from_script(script("echo a:2; echo b"), 3)() == {"a": 2, "b": 3}


def test_no_host_for_now(script):
    assert from_script(script("true"), 1)() == {}


def test_failing_discovery(script):
    discover = from_script(script("echo no cluster >&2; exit 3"), 1)
    with pytest.raises(TowerError, match="exit code 3: no cluster"):
        discover()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("echo a:2; echo Loading modules", "'Loading modules'"),
        ("printf '\\377'", "'\ufffd'"),
    ],
)
def test_discovery_that_prints_something_else(script, text, named):
    with pytest.raises(TowerError) as caught:
        from_script(script(text), 1)()
    assert "discover.sh has to print lines like 'host:2'" in str(caught.value)
    assert named in str(caught.value)
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


def test_discovery_script_that_cannot_run(script, tmp_path):
    with pytest.raises(TowerError, match="chmod"):
        from_script(script("", stat.S_IRUSR), 1)
    with pytest.raises(TowerError, match="host discovery script not found"):
        from_script(tmp_path / "none", 1)
