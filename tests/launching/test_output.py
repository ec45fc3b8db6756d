"""Tagged lines."""

import errno
import io

import pytest

from keras_towers.launching import output
from keras_towers.launching.output import Sink, Tagger


@pytest.fixture
def stream():
    return io.BytesIO()


@pytest.fixture
def tagger(stream):
    return Tagger(Sink(stream, lambda: None), b"[1] ")


def test_every_line_is_tagged(tagger, stream):
    tagger.feed(b"one\ntwo\n\nthr")
    assert stream.getvalue() == b"[1] one\n[1] two\n[1] \n"
    tagger.feed(b"ee")
    tagger.close()
    assert stream.getvalue().endswith(b"\n[1] three\n")


def test_bytes_pass_as_they_are(tagger, stream):
    text = "Größe ✓ 大\n".encode()
    for index in range(len(text)):
        tagger.feed(text[index : index + 1])
    tagger.feed(b"\xff\xfe\n")
    assert stream.getvalue() == b"[1] " + text + b"[1] \xff\xfe\n"


def test_finished_progress_bar_is_one_line(tagger, stream):
    for step in range(100):
        tagger.feed(f"\r{step}%".encode())
    tagger.feed(b"\b\b\b\r100%\n")
    assert stream.getvalue() == b"[1] 100%\n"


def test_windows_line_end(tagger, stream):
    tagger.feed(b"one\r\n")
    assert stream.getvalue() == b"[1] one\n"


def test_running_progress_bar_shows_now_and_then(tagger, stream, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    for step in range(1000):
        now[0] += 0.01  # Ten seconds in all.
        tagger.feed(f"step {step}\r".encode())
    lines = stream.getvalue().splitlines()
    assert 3 <= len(lines) <= 5
    assert all(line.startswith(b"[1] step ") for line in lines)
    tagger.close()
    assert stream.getvalue().endswith(b"[1] step 999\n")


def test_line_without_an_end_is_cut(tagger, stream):
    for _ in range(40):
        tagger.feed(b"x" * (1 << 16))
    assert stream.getvalue().startswith(b"[1] xxx")


def test_tail_is_kept(tagger):
    tagger.feed(b"x" * 100_000 + b"the end\n")
    assert tagger.tail.endswith(b"the end\n")
    assert len(tagger.tail) < 100_000


def test_closed_output_is_told_once():
    class Closed(io.RawIOBase):
        name = "<the terminal>"

        def write(self, data):
            raise BrokenPipeError(errno.EPIPE, "no reader")

    told: list[OSError] = []
    sink = Sink(Closed(), told.append)
    sink.write(b"a")
    sink.write(b"b")
    (error,) = told
    assert isinstance(error, BrokenPipeError)
    assert error.filename == "<the terminal>"


def test_a_full_disk_is_told_once():
    told: list[OSError] = []
    with open("/dev/full", "wb", buffering=0) as full:
        sink = Sink(full, told.append)
        sink.write(b"a")
        sink.write(b"b")
    (error,) = told
    assert (error.errno, error.filename) == (errno.ENOSPC, "/dev/full")


def test_colour_on_a_terminal_only(monkeypatch):
    assert output.tag("0", 0, io.StringIO()) == b"[0] "
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    first, second = (output.tag(str(i), i, io.StringIO()) for i in (0, 1))
    assert b"\x1b[" in first
    assert first.replace(b"0", b"") != second.replace(b"1", b"")
