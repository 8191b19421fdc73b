"""Limits on time and memory of a block."""

import resource
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from drafttrain.utils.limits import bounded


def test_time():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="more than 0.1 s"), bounded(0.1, 1 << 30):
        while True:
            pass
    assert time.monotonic() - began < 5
    with bounded(1.0, 1 << 30):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # no alarm is left


def test_a_process_that_was_stopped_gets_on():
    """Ctrl-Z, or a scheduler, while a chat is rendered."""
    with bounded(0.1, 1 << 30):
        time.sleep(0.5)  # no work, as while it is stopped


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit on memory here")
def test_blocks_that_overlap_leave_no_limit():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(bounded(10, 1 << 28))
        limited = resource.getrlimit(resource.RLIMIT_AS)
        second.enter_context(bounded(10, 1 << 27))
        assert resource.getrlimit(resource.RLIMIT_AS) == limited != before
        first.close()
        assert resource.getrlimit(resource.RLIMIT_AS) == limited
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_what_catches_an_interruption_gets_another():
    def stubborn():
        while True:
            try:
                while True:
                    pass
            except TimeoutError:
                return "caught"

    with pytest.raises(TimeoutError), bounded(0.1, 1 << 30):
        assert stubborn() == "caught"
        while True:
            pass


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit on memory here")
def test_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError), bounded(10, 1 << 28):
        bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(1 << 30)) == 1 << 30


def test_somebody_elses_alarm_still_comes():
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with bounded(5, 1 << 30):
            pass
        time.sleep(0.4)
        assert rang == [True]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_other_threads_have_no_limit_of_time():
    """Signals arrive in the main thread alone."""
    ended = []

    def work():
        with bounded(0.05, 1 << 30):
            time.sleep(0.2)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
