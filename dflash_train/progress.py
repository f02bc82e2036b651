"""Progress with rate and time left: a live bar on a terminal, a plain line now and then elsewhere (log files, CI)."""

import shutil
import sys
import time
from types import TracebackType


class Progress:
    """Counts `unit`s of work up to `total`. Only the main process passes `enabled=True`.

    >>> with Progress("extract", total=1000, unit="tokens", enabled=True) as progress:
    ...     progress.advance(100)
    """

    def __init__(self, title: str, total: float, unit: str, enabled: bool = True, seconds_between_lines: float = 10.0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0.0
        self._note = ""
        self._first = 0.0
        self._enabled = enabled
        self._terminal = sys.stderr.isatty()
        self._seconds_between_lines = 0.2 if self._terminal else seconds_between_lines
        self._started = self._last_shown = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._enabled and kind is None:
            self._show()
            if self._terminal:
                print(file=sys.stderr)

    def skip(self, amount: float) -> None:
        """Counts work that an earlier launch has done: it moves the bar, not the rate."""
        self.done += amount
        self._first += amount

    def advance(self, amount: float, note: str = "") -> None:
        """Counts `amount` more units; `note` is shown at the end of the line."""
        self.done += amount
        self._note = note or self._note
        if self._enabled and time.monotonic() - self._last_shown >= self._seconds_between_lines:
            self._show()

    def say(self, line: str) -> None:
        """Prints a line that stays, where the bar stands."""
        if self._enabled:
            print(f"\r\x1b[K{line}" if self._terminal else line, file=sys.stderr, flush=True)

    @property
    def rate(self) -> float:
        """Units per second of this launch, pauses included."""
        return (self.done - self._first) / max(time.monotonic() - self._started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Until `total`, at the rate so far; None before the first unit."""
        return (self.total - self.done) / self.rate if self.done > self._first else None

    def _show(self) -> None:
        self._last_shown = time.monotonic()
        rate, seconds_left = self.rate, self.seconds_left
        left = "unknown" if seconds_left is None else _clock(seconds_left)
        share = self.done / self.total if self.total else 1.0
        line = f"{self.title} {share:6.1%} {self.done:,.0f}/{self.total:,.0f} {self.unit}, {_rate(rate)} {self.unit}/s, {left} left"
        line += f" · {self._note}" if self._note else ""
        if self._terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be written over
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size_text(num_bytes: float) -> str:
    """Bytes for the eye, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"


def duration_text(seconds: float) -> str:
    """Seconds for the eye, in the largest unit of which there are two."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"
