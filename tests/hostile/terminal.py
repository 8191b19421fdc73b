"""A terminal for a command, and what its screen shows in the end."""

import fcntl
import os
import struct
import sys
import termios
import threading
from collections.abc import Callable

import pyte

LINES, COLUMNS = 2000, 400  # so large that nothing is wrapped or leaves the screen
BARS = ("█", "━", "it/s", "s/it")  # what progress bars are made of


def attach() -> Callable[[], None]:
    """Let standard output and error be a terminal, whose output goes where standard output went.

    Returns:
        what to call last.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    log = os.dup(1)
    os.environ["TERM"] = "xterm-256color"
    os.dup2(slave, 1)
    os.dup2(slave, 2)
    os.close(slave)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)

    def copy() -> None:
        try:
            while data := os.read(master, 1 << 16):
                os.write(log, data)
        except OSError:  # nobody has the terminal any more
            pass

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        thread.join(5)

    return end


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after this output."""
    shown = pyte.Screen(COLUMNS, LINES)
    pyte.Stream(shown).feed(output)
    return [line.rstrip() for line in shown.display if line.strip()]


def is_spoiled(line: str) -> bool:
    """Return whether a line has a message beside something else: after a bar's text, or over it."""
    return "drafttrain: " in line and (
        not line.startswith("drafttrain: ") or any(bar in line for bar in BARS)
    )
