"""Signals are noted and no more, in the main thread, and afterwards do what they did before."""

import os
import signal
import threading

from dflash_train.launch import StopRequest


def test_signals_are_noted_and_the_earlier_handlers_come_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, handler) for number, handler in zip(numbers, (signal.SIG_IGN, signal.SIG_DFL), strict=True)]
    try:
        for number in numbers:
            with StopRequest() as stop:
                assert not stop.came
                os.kill(os.getpid(), number)
                assert stop.came
            assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN, signal.SIG_DFL]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_in_another_thread_nothing_changes() -> None:
    before, within = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopRequest() as stop:
            within.append((signal.getsignal(signal.SIGTERM), stop.came))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert within == [(before, False)]
