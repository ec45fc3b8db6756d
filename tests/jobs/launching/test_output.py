"""Tagged lines."""

import contextlib
import io
import os

import pytest

from keras_towers.jobs.launching import output
from keras_towers.jobs.launching.output import Sink, Tagger


@pytest.fixture
def stream():
    return io.BytesIO()


@pytest.fixture
def tagger(stream):
    return Tagger(Sink(stream, lambda: None), b"[1] ")


CHARACTERS = [bytes([byte]) for byte in "Größe ✓ 大\n".encode()]
LONG = 20 * [b"x" * (1 << 16)]


@pytest.mark.parametrize(
    ("fed", "written"),
    [
        ([b"one\ntwo\n\nthr"], b"[1] one\n[1] two\n[1] \n"),
        ([b"one\r\n"], b"[1] one\n"),
        # Bytes pass as they are.
        (CHARACTERS, "[1] Größe ✓ 大\n".encode()),
        # A finished progress bar is one line.
        (
            [f"\r{step}%".encode() for step in range(100)]
            + [b"\b\b\b\r100%\n"],
            b"[1] 100%\n",
        ),
        # A line without an end is cut.
        (LONG, b"[1] " + b"".join(LONG[:17]) + b"\n"),
    ],
)
def test_every_line_is_tagged(tagger, stream, fed, written):
    for data in fed:
        tagger.feed(data)
    assert stream.getvalue() == written
    # The last line needs no end.
    tagger.feed(b"last")
    tagger.close()
    assert stream.getvalue().endswith(b"last\n")


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


def test_color_on_a_terminal_only(monkeypatch):
    assert output.tag("0", 0, io.StringIO()) == b"[0] "
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    first, second = (output.tag(str(i), i, io.StringIO()) for i in (0, 1))
    assert b"\x1b[" in first
    assert first.replace(b"0", b"") != second.replace(b"1", b"")


TRACEBACK = b"""\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "train.py", line 2, in main
    fit()
"""


def test_ranks_that_fail_in_the_same_way_show_it_once(stream, monkeypatch):
    sink, common = Sink(stream, lambda: None), output.Tracebacks()
    ranks = [Tagger(sink, b"[%d] " % n, common) for n in range(4)]

    def shown():
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return text.splitlines()

    # However their lines are mixed.
    for line in TRACEBACK.splitlines(keepends=True):
        for rank in ranks[:2]:
            rank.feed(line)
    ranks[0].feed(b"ValueError: 1\nand more")
    ranks[1].feed(b"ValueError: 1\n\n")
    assert not shown()
    ranks[0].close()
    ranks[1].release()
    lines = [*TRACEBACK.splitlines(), b"ValueError: 1"]
    assert shown() == [
        *(b"[0] " + line for line in lines),
        b"[0] and more",
        b"[1] ... 5 lines as of [0] above ...",
        b"[1] ValueError: 1",
    ]
    # What differs is shown.
    other = TRACEBACK.replace(b"fit()", b"fit(rank)")
    ranks[2].feed(b"before\n" + other + b"ValueError: 2\n")
    ranks[2].close()
    assert shown() == [
        b"[2] before",
        b"[2] ... 4 lines as of [0] above ...",
        b"[2]     fit(rank)",
        b"[2] ValueError: 2",
    ]
    # What it is about is no longer in sight.
    now = output.time.monotonic() + 2 * output.settings.SAME_FAILURE_S
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    ranks[3].feed(TRACEBACK + b"ValueError: 1\n")
    ranks[3].close()
    assert len(shown()) == 6


def test_a_traceback_is_held_back_for_a_short_time_only(
    stream, tagger, monkeypatch
):
    # A single rank has nothing to compare.
    tagger.feed(TRACEBACK)
    alone = stream.getvalue()
    assert alone.count(b"[1] ") == 5
    sink = Sink(stream, lambda: None)
    other = Tagger(sink, b"[2] ", output.Tracebacks())
    other.feed(TRACEBACK)
    assert stream.getvalue() == alone
    now = output.time.monotonic() + 2 * output.settings.REDRAW_S
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    other.feed(b"it goes on\n")
    assert stream.getvalue().endswith(b"[2] it goes on\n")


CANCELLED = b"""\
WARNING: All log messages before absl::InitializeLog() is called are written \
to STDERR
I0000 00:00:1795726785.182916   17729 port.cc:153] oneDNN custom operations \
are on. You may see slightly different numerical results.
W0000 00:00:1795575119.689 26314 local_rendezvous.cc:412] Local rendezvous is \
aborting with status: CANCELLED: RecvFromRemoteAsync is cancelled.
\t [[{{node Cast/_14}}]]
Additional GRPC error information from remote target /job:localhost/replica:0:
:UNKNOWN:Error received from peer  {grpc_message:"", grpc_status:1}
\t [[Identity_3/_20]] [type.googleapis.com/tensorflow.DerivedStatus='']
W0000 00:00:1795575119.694 26389 grpc_worker_service.cc:536] RecvTensor \
cancelled for -2508889085185673070
W0000 00:00:1795575114.997 26378 local_rendezvous.cc:412] Local rendezvous is \
aborting with status: ABORTED: Cleanup -12196 [DerivedStatus='']
W0000 00:00:1795575367.119 7796 local_rendezvous.cc:412] Local rendezvous is \
aborting with status: ABORTED: Step -28651 cancelled.  Cancelling rendezvous.
E0000 00:00:1795990169.565929 27293 ring_alg.cc:291] Aborting RingGather with \
UNAVAILABLE: recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0
:UNKNOWN:Error received from peer  {grpc_status:14}
E0000 00:00:1795990169.566035 27293 base_collective_executor.cc:252] \
BaseCollectiveExecutor::StartAbort UNAVAILABLE: recvmsg:Connection reset by peer
W0000 00:00:1795990169.566097 27385 local_rendezvous.cc:412] Local rendezvous \
is aborting with status: UNAVAILABLE: Collective ops is aborted by: recvmsg
The error could be from a previous operation. Restart your program to reset.
W0000 00:00:1795989975.581917 17120 local_rendezvous.cc:412] Local rendezvous \
is aborting with status: UNKNOWN: Horovod has been shut down. This was caused
[2026-11-30 03:57:46.940699: E /tmp/horovod/common/operations.cc:697] [0]: \
Horovod background loop uncaught exception: \
[/tmp/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error \
[127.0.0.1]:26800: Connection reset by peer
"""
FAULT = b"""\
W0000 00:00:1795575119.689 26314 local_rendezvous.cc:412] Local rendezvous is \
aborting with status: UNAVAILABLE: Socket closed
\t [[{{node Cast/_14}}]]
Additional GRPC error information from remote target /job:ps:
[2026-11-30 03:57:46.940699: E /tmp/horovod/common/operations.cc:697] [0]: \
Horovod background loop uncaught exception: std::bad_alloc
"""


def test_cancelled_operations_are_not_shown_and_faults_are(tagger, stream):
    tagger.feed(CANCELLED + b"one\n" + FAULT + CANCELLED + b"two\n")
    shown = (b"one\n" + FAULT + b"two\n").splitlines(keepends=True)
    assert stream.getvalue() == b"".join(b"[1] " + line for line in shown)
    # The tail decides which rank is to blame.
    assert tagger.tail.count(CANCELLED) == 2


def test_what_a_block_writes_is_shown_without_noise(capfd):
    with contextlib.suppress(KeyError), output.without_noise():
        os.write(2, CANCELLED + b"one\n")
        raise KeyError
    os.write(2, b"two\n")
    shown = capfd.readouterr().err
    assert "oneDNN" not in shown and shown.endswith("one\ntwo\n")
