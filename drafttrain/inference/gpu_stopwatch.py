"""Seconds of calls on a GPU, which is not waited for: it notes itself when a call begins and ends."""

from collections import deque
from threading import Lock

import torch

from drafttrain.inference.stats import Stopwatch


class GpuStopwatch(Stopwatch):
    """Seconds that a GPU has spent in some calls so far. What it has not ended yet counts later."""

    def __init__(self, device: torch.device):
        self.device, self._ended = device, 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # begin and end of a call
        self._lock = Lock()  # threads may share a proposer

    def begin(self) -> torch.cuda.Event:
        return self._passed()

    def end(self, begun: torch.cuda.Event) -> None:
        with self._lock:
            self._running.append((begun, self._passed()))
        _ = self.seconds  # so that few wait

    @property
    def seconds(self) -> float:
        with self._lock:
            while self._running and self._running[0][1].query():
                begun, ended = self._running.popleft()
                self._ended += begun.elapsed_time(ended) / 1e3
        return self._ended

    def _passed(self) -> torch.cuda.Event:
        """Return the event that the GPU has done all that it has been given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
