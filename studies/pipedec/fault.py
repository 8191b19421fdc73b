"""Seconds from the loss of a rank to the last rank's error.

Three ranks decode; one is killed, or stopped, and the others have to end in one line each.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from studies import ROOT

RANKS, TIMEOUT = 3, 10
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
BEGUN = 120  # seconds in which the ranks must have decoded a prompt


def lose(recipe: str, lost: int, how: str, out: Path) -> dict[str, Any]:
    """Lose one rank; return the seconds until the last one has ended, and their messages; without statuses
    where one did not end in these seconds.

    Raises:
        UserError: the ranks have not begun to decode.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = {"stages.ranks": RANKS, "timeout_s": TIMEOUT, "pace.stage_ms": 20, "probe": "false", "out": out}
    keys |= {"limit": 4, "mode": "pp", "max_new_tokens": 64}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "drafttrain.run.cli", "pipeline", recipe, *words]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    logs = [out / f"{how}_{lost}_{rank}.txt" for rank in range(RANKS)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with open(log, "w") as file:
                environment = {**place, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file))
        end = time.monotonic() + BEGUN
        while "tokens/s" not in logs[0].read_text():  # rank 0 shows each prompt
            if time.monotonic() > end or any(rank.poll() is not None for rank in ranks):
                raise UserError(f"{logs[0]}: the ranks must decode by now, got none; see the logs beside it")
            time.sleep(0.1)
        ranks[lost].send_signal(SIGNALS[how])
        began = time.monotonic()
        others = [rank for i, rank in enumerate(ranks) if i != lost]
        statuses = [rank.wait(timeout=6 * TIMEOUT) for rank in others]
        seconds = time.monotonic() - began
    except subprocess.TimeoutExpired:  # one of them waits for ever
        statuses, seconds = [], 6.0 * TIMEOUT
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [line for log in logs for line in log.read_text().splitlines() if line.startswith("drafttrain: ")]
    return {"rank": lost, "how": how, "seconds": seconds, "statuses": statuses, "said": said}
