"""What the console shows of a long work, with a clock that the test moves."""

import pytest

from dflash_train.progress import Progress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("dflash_train.progress.time", clock)
    return clock


def test_rate_and_time_left_count_this_launch_only(clock: Clock) -> None:
    progress = Progress("train", total=100, unit="steps")
    progress.skip(40)
    assert progress.seconds_left is None
    clock.now = 5.0
    progress.advance(10)
    assert (progress.rate, progress.seconds_left) == (2.0, 25.0)


def test_a_line_shows_share_rate_time_left_and_the_note(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=100, unit="steps") as progress:
        clock.now = 20.0
        progress.advance(10, "loss 2")
        progress.say("step 10: tau 2")
    line = "train  10.0% 10/100 steps, 0.50 steps/s, 3:00 left · loss 2"
    assert capsys.readouterr().err.splitlines() == [line, "step 10: tau 2", line]


def test_a_bar_is_never_wider_than_the_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress("train", total=100, unit="steps")
    clock.now = 20.0
    progress.advance(10, "a note that does not fit")
    shown = capsys.readouterr().err.removeprefix("\r\x1b[K")
    assert len(shown) == 39 and "\n" not in shown
    progress.say("a line that stays")
    assert capsys.readouterr().err == "\r\x1b[Ka line that stays\n"


def test_other_processes_show_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("train", total=10, unit="steps", enabled=False) as progress:
        clock.now = 20.0
        progress.advance(10)
        progress.say("a line")
    assert capsys.readouterr().err == ""
