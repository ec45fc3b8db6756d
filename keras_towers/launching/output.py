"""Output of many processes on one terminal, tagged by rank."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TextIO

import rich.console
from rich.text import Text

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.system import writable

_LONGEST_LINE = 1 << 20
_KEPT_BYTES = 16 << 10
# What TensorFlow's C++ code writes before its first message, and what it warns
# of where an operation is cancelled, as at the end of a training or where
# another one fails, whose error it tells by itself; and how such a message goes
# on in further lines.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) "
    rb"|W\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] (RecvTensor cancelled for |Local "
    rb"rendezvous is aborting with status: (CANCELLED|ABORTED: (Cleanup|Step "
    rb"-?\d+ cancelled)))"
)
_GOES_ON = re.compile(rb"\t \[\[|Additional GRPC error |:\w+:Error received ")
_COLOURS = (
    "cyan",
    "magenta",
    "green",
    "yellow",
    "blue",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
)


def tag(name: str, index: int, stream: TextIO) -> bytes:
    """The prefix of each line of a rank, in colour on a terminal."""
    console = rich.console.Console(file=stream, highlight=False)
    if not console.is_terminal:
        return f"[{name}] ".encode()
    with console.capture() as capture:
        colour = _COLOURS[index % len(_COLOURS)]
        console.print(Text(f"[{name}] ", style=colour), end="")
    return capture.get().encode()


class Sink:
    """A stream to which many threads write whole lines, as bytes."""

    def __init__(self, stream: IO[Any], on_failed: Callable[[OSError], None]):
        self._stream = stream
        # Streams of notebooks take only text.
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
    """The launcher's streams, shared by all ranks, with optional files."""

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
        self.sinks: dict[Any, Sink] = {
            stream: Sink(stream, on_failed)
            for stream in (sys.stdout, sys.stderr)
        }
        # What was printed before comes before what ranks print.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        if folder:
            writable(folder, "give another one to --output")

    def file(self, name: str) -> Sink | None:
        """The file that also gets a rank's output, if any."""
        if self.folder is None:
            return None
        # In an elastic job several ranks may use one name, one after another.
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


class Tagger:
    """Splits the bytes of one stream of a rank into tagged lines."""

    def __init__(self, sink: Sink, tag: bytes):
        self.tail: bytes = b""
        self._sink = sink
        self._tag = tag
        self._line = b""
        self._drawn = 0.0
        self._in_noise = False

    def feed(self, data: bytes) -> None:
        """Process the next bytes."""
        self.tail = (self.tail + data)[-_KEPT_BYTES:]
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _LONGEST_LINE:
            lines.append(self._line)
            self._line = b""
        out = [
            self._tag + _final(line) + b"\n"
            for line in lines
            if not self._is_noise(line)
        ]
        if lines:
            self._drawn = 0.0
        out += self._redraw()
        if out:
            self._sink.write(b"".join(out))

    def close(self) -> None:
        """Write an unfinished last line."""
        if self._line.strip(b"\r\b "):
            self._sink.write(self._tag + _final(self._line) + b"\n")
        self._line = b""

    def _is_noise(self, line: bytes) -> bool:
        """Whether a line belongs to a useless message."""
        goes_on = self._in_noise and _GOES_ON.match(line)
        self._in_noise = bool(goes_on or _NOISE.match(line))
        return self._in_noise

    def _redraw(self) -> list[bytes]:
        """The current state of a redrawn line, if it is due."""
        if b"\r" not in self._line:
            return []
        now = time.monotonic()
        if not self._drawn:
            # A bar that finishes within the first interval is shown once.
            self._drawn = now
        # Overwritten states are dropped.
        done, _, rest = self._line.rpartition(b"\r")
        state = _final(done)
        self._line = state + b"\r" + rest
        if now - self._drawn < settings.REDRAW_S or not state.strip():
            return []
        self._drawn = now
        return [self._tag + state + b"\n"]


def _final(line: bytes) -> bytes:
    """The last state of a redrawn line, as a terminal shows it."""
    if b"\r" not in line:
        return line
    for part in reversed(line.split(b"\r")):
        part = part.replace(b"\b", b"")
        if part.strip():
            return part
    return b""
