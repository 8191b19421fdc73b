"""Progress of work that is counted in conversations and measured in tokens per second."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drafttrain.progress import LOG_EVERY_S


class TokenProgress:
    """A progress bar on a terminal; elsewhere (a log file) a line a minute."""

    def __init__(self, name: str, total: int, console: Console):
        """Args: name: what is going on. total: conversations."""
        self.name, self.total, self.console = name, total, console
        self.tokens, self.done, self.first_done = 0, 0, None
        self.bar = Progress(
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=300,
        )

    def __enter__(self) -> "TokenProgress":
        self.begun = self.logged = time.monotonic()
        self.bar.start()
        self.task = self.bar.add_task(self.name, total=self.total, tokens=0, rate=0.0)
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()

    def advance(self, tokens: int, done: int) -> None:
        """Adds tokens and sets the number of conversations that are done."""
        if self.first_done is None:
            self.first_done = done
        self.tokens, self.done = self.tokens + tokens, done
        now = time.monotonic()
        rate = self.tokens / max(now - self.begun, 1e-6)
        self.bar.update(self.task, completed=done, tokens=self.tokens, rate=rate)
        if not self.console.is_terminal and now - self.logged >= LOG_EVERY_S:
            self.logged = now
            left = "unknown"
            if done > self.first_done:
                minutes = (self.total - done) * (now - self.begun) / (done - self.first_done) / 60
                left = f"{minutes:.0f} min"
            self.console.print(
                f"{self.name}: {done} of {self.total} conversations, {self.tokens} tokens, "
                f"{rate:.0f} tokens/s, {left} left",
                highlight=False,
                soft_wrap=True,
            )
