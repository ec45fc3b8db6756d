"""The output of many processes on one terminal, tagged by rank."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import rich.console
from rich.text import Text

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.system import make_writable

_MAX_LINE_BYTES = 1 << 20
_TAIL_BYTES = 16 << 10
# Output of TensorFlow's C++ code: notices before its first log line and of the
# library that it computes with, warnings about operations cancelled at the end
# of training or after another operation failed, whose error is reported itself,
# and the continuation lines of such warnings. Of Horovod's: that another rank
# has ended, whose end is reported.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) "
    rb"|[EIW]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] (oneDNN custom operations are "
    rb"on|RecvTensor cancelled for |Aborting Ring|BaseCollectiveExecutor::"
    rb"StartAbort |Local rendezvous is aborting with status: (CANCELLED|ABORTED"
    rb": (Cleanup|Step -?\d+ cancelled)|UNAVAILABLE: Collective ops is aborted"
    rb"|UNKNOWN: Horovod has been shut down))"
    rb"|\[[-\d]+ [\d:.]+: E \S+\.cc:\d+\] \[\d+\]: Horovod background loop "
    rb"uncaught exception: \[\S+/gloo/transport/\S+\] .*"
    rb"(Connection (reset|closed) by peer|Broken pipe)"
)
_CONTINUATION = re.compile(
    rb"\t \[\[|Additional GRPC error |:\w+:Error received |The error could be "
    rb"from a previous operation"
)
_TRACEBACK = b"Traceback (most recent call last):"
# A longer one is shown as it comes.
_MAX_TRACEBACK_LINES = 1000
# Fewer lines that ranks have in common are shown as they are.
_MIN_COMMON = 3
_COLORS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
)


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Leave out what TensorFlow logs in this block, whatever it is told.

    Other output to stderr appears at the end of the block.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            shown = (line for line in file if not _NOISE.match(line))
            os.write(2, b"".join(shown))


def tag(name: str, index: int, stream: TextIO) -> bytes:
    """The prefix of each line of a rank, in color on a terminal."""
    console = rich.console.Console(file=stream, highlight=False)
    if not console.is_terminal:
        return f"[{name}] ".encode()
    with console.capture() as capture:
        color = _COLORS[index % len(_COLORS)]
        console.print(Text(f"[{name}] ", style=color), end="")
    return capture.get().encode()


class Sink:
    """A stream to which many threads write whole lines, as bytes."""

    def __init__(self, stream: IO[Any], on_failed: Callable[[OSError], None]):
        self._stream = stream
        # A notebook's streams accept only text.
        self._binary: Any = getattr(stream, "buffer", stream)
        self._takes_text = isinstance(self._binary, io.TextIOBase)
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._closed = False

    def write(self, data: bytes) -> None:
        """Write and flush; after a failure, drop the data."""
        with self._lock:
            if self._closed:
                return
            text = data.decode(errors="replace") if self._takes_text else data
            try:
                self._binary.write(text)
                self._binary.flush()
                return
            except OSError as error:
                self._closed = True
                name = getattr(self._stream, "name", None)
                failed = type(error)(error.errno, error.strerror, name)
        self._on_failed(failed)

    def close(self) -> None:
        """Close the stream."""
        with self._lock:
            self._closed = True
            self._stream.close()


class Console:
    """The launcher's streams, shared by all ranks, with optional files.

    Args:
        folder: where to write one file per rank; None: no files.
        on_failed: called with the error if output cannot be written.
        launcher: the name that precedes the launcher's own messages.

    Attributes:
        inherited: whether processes inherit these streams, so that a single
            rank can write to them directly.
    """

    def __init__(
        self,
        folder: Path | None,
        on_failed: Callable[[OSError], None],
        launcher: str = "keras-towers run",
    ):
        self.folder = folder
        self.inherited: bool = (
            sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
        )
        self._launcher = launcher
        self._files: dict[str, Sink] = {}
        self._on_failed = on_failed
        self.sinks: dict[IO[str], Sink] = {
            stream: Sink(stream, on_failed)
            for stream in (sys.stdout, sys.stderr)
        }
        self.tracebacks: Tracebacks = Tracebacks()
        # Earlier output has to precede the output of ranks.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        if folder:
            make_writable(folder, "give another one to --output")

    def file(self, name: str) -> Sink | None:
        """The file that a rank's output is copied to, if any."""
        if self.folder is None:
            return None
        # Several workers may have one name, in succession.
        if name not in self._files:
            path = self.folder / f"rank.{re.sub('[: ]', '.', name)}.txt"
            try:
                stream = path.open("wb", buffering=0)
            except OSError as error:
                raise TowerError(
                    f"cannot write to {path}: {error.strerror}"
                ) from error
            self._files[name] = Sink(stream, self._on_failed)
        return self._files[name]

    def close(self) -> None:
        """Close the files; the launcher's streams stay open."""
        for file in self._files.values():
            file.close()

    def say(self, text: str) -> None:
        """Write a message of the launcher itself."""
        line = f"{self._launcher}: {text}\n"
        self.sinks[sys.stderr].write(line.encode(errors="replace"))


class Tracebacks:
    """The last traceback that a rank has shown; others often fail alike."""

    def __init__(self) -> None:
        self._tag = b""
        self._lines: list[bytes] = []
        # By ``time.monotonic``.
        self._shown_at = 0.0
        self._lock = threading.Lock()

    def shorten(self, tag: bytes, lines: list[bytes]) -> list[bytes]:
        """Leave out the first lines if another rank has just shown them.

        In their place is a line that says where they are. The last line, which
        has the error, is always shown.

        Args:
            tag: the prefix of the rank.
            lines: its traceback.
        """
        now = time.monotonic()
        with self._lock:
            # ``commonprefix`` takes any sequences.
            equal = len(os.path.commonprefix([self._lines, lines[:-1]]))
            is_old = now - self._shown_at > settings.SAME_FAILURE_S
            if equal < _MIN_COMMON or is_old or tag == self._tag:
                self._tag, self._lines, self._shown_at = tag, lines, now
                return lines
            where = self._tag.strip().decode(errors="replace")
        folded = f"... {equal} lines as of {where} above ..."
        return [folded.encode(), *lines[equal:]]


class Tagger:
    """Splits one stream of a rank into tagged lines.

    A traceback is held back until ``release``, so that it is not mixed with
    those of other ranks.

    Args:
        sink: where it writes them.
        tag: the prefix of each line.
        tracebacks: those of all ranks; None: there is only one rank.

    Attributes:
        tail: the last bytes of the stream.
    """

    def __init__(
        self, sink: Sink, tag: bytes, tracebacks: Tracebacks | None = None
    ):
        self.tail: bytes = b""
        self._sink = sink
        self._tag = tag
        self._tracebacks = tracebacks
        self._held: list[bytes] = []
        self._held_since = 0.0
        self._line = b""
        self._last_drawn = 0.0
        self._in_noise = False

    def feed(self, data: bytes) -> None:
        """Process the next bytes."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES:
            lines.append(self._line)
            self._line = b""
        self._put([_final(line) for line in lines if not self._is_noise(line)])
        if lines:
            self._last_drawn = 0.0
        if not self.holds:
            self._write(self._redraw())

    def close(self) -> None:
        """Write what is left, and an unfinished last line."""
        if self._line.strip(b"\r\b "):
            self._put([_final(self._line)])
        self._line = b""
        self.release()

    @property
    def holds(self) -> bool:
        """Whether a traceback is held back."""
        return bool(self._held)

    def release(self) -> None:
        """Write the traceback that is held back, if any."""
        lines, self._held = self._held, []
        while lines and not lines[-1].strip():
            lines.pop()
        if lines and self._tracebacks is not None:
            lines = self._tracebacks.shorten(self._tag, lines)
        self._write(lines)

    def _put(self, lines: list[bytes]) -> None:
        """Write lines, or hold them back."""
        begin = 0
        if not self.holds:
            begin = len(lines)
            begins = [i for i, x in enumerate(lines) if _TRACEBACK in x]
            if begins and self._tracebacks is not None:
                begin = begins[0]
            self._write(lines[:begin])
            self._held_since = time.monotonic()
        self._held += lines[begin:]
        is_old = time.monotonic() - self._held_since > settings.MAX_TRACEBACK_S
        if is_old or len(self._held) > _MAX_TRACEBACK_LINES:
            self.release()

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            tagged = [self._tag + line + b"\n" for line in lines]
            self._sink.write(b"".join(tagged))

    def _is_noise(self, line: bytes) -> bool:
        """Whether a line belongs to a useless message."""
        continues = self._in_noise and _CONTINUATION.match(line)
        self._in_noise = bool(continues or _NOISE.match(line))
        return self._in_noise

    def _redraw(self) -> list[bytes]:
        """The current state of a redrawn line, if it is due."""
        if b"\r" not in self._line:
            return []
        now = time.monotonic()
        if not self._last_drawn:
            # A bar that finishes within the first interval is shown once.
            self._last_drawn = now
        # Overwritten states are dropped.
        done, _, rest = self._line.rpartition(b"\r")
        state = _final(done)
        self._line = state + b"\r" + rest
        if now - self._last_drawn < settings.REDRAW_S or not state.strip():
            return []
        self._last_drawn = now
        return [state]


def _final(line: bytes) -> bytes:
    """The last state of a redrawn line, as a terminal shows it."""
    if b"\r" not in line:
        return line
    for part in reversed(line.split(b"\r")):
        part = part.replace(b"\b", b"")
        if part.strip():
            return part
    return b""
