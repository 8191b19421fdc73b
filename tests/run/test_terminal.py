"""The output of `drafttrain generate`."""

import io
import re
import warnings

import pytest
from rich.console import Console

from drafttrain.decoder import Piece, Result
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.run import terminal

PIECES = [
    Piece("\tdef f():\n", [1], 0, None),
    Piece("    [bold]é", [2, 3], 1, None),
    Piece(" 🙂" * 40, [4], 0, "stop"),
]
FAST = DecodeStats(prompts=1, new_tokens=4, steps=2, seconds=2.0)


class FakeDecoder:
    """Streams `PIECES`; without drafts it is half as fast and says what `plain_ids` are."""

    plain_ids = [1, 2, 3, 4]
    warning = None
    proposer = NoProposer()

    @classmethod
    def from_pretrained(cls, path, target, dtype, tree, calibration, ngrams):
        if cls.warning:
            warnings.warn(cls.warning, stacklevel=2)
        return cls()

    def generate(self, prompt, max_new_tokens):
        return None

    def stream(self, prompt, max_new_tokens, stats, sampling, stop):
        self.sampling = sampling
        vars(stats).update(vars(FAST))
        yield from PIECES

    def autoregressive(self, prompt, max_new_tokens, sampling, stop):
        assert sampling == self.sampling
        stats = DecodeStats(prompts=1, new_tokens=4, steps=3, seconds=4.0)
        return Result("", self.plain_ids, "stop", stats)


def printed(monkeypatch, color=False, **options) -> str:
    monkeypatch.setattr(terminal, "SpeculativeDecoder", FakeDecoder)
    system = "truecolor" if color else None
    console = Console(
        file=io.StringIO(), width=40, force_terminal=color, color_system=system, highlight=False
    )
    terminal.generate("bundle", "prompt", console=console, **options)
    return console.file.getvalue()


def test_text_is_printed_unchanged(monkeypatch):
    text, _, line = printed(monkeypatch).rpartition("\n\n")
    assert text == "".join(piece.text for piece in PIECES)  # no wrapping, no markup, tabs kept
    figures = "accept_len 1.50, 2.0 tokens/s, speedup 2.00 against autoregressive decoding (1.0 tokens/s)"
    assert line == figures + ", same output\n"


def test_each_iteration_has_its_color(monkeypatch):
    text = printed(monkeypatch, color=True)
    colors = [
        re.search(r"\x1b\[(\d+)m$", text[: text.index(piece.text.strip()[:5])].rstrip(" \t"))[1]
        for piece in PIECES
    ]
    assert len(set(colors)) == 3


WARNING = "calibrated elsewhere; measure again: drafttrain calibrate runs/[/x]/[red]drafter --prompts FILE"


def test_a_warning_is_printed_unchanged(monkeypatch):
    """It names the user's folder, which is no markup."""
    monkeypatch.setattr(FakeDecoder, "warning", WARNING)
    assert printed(monkeypatch).startswith(WARNING + "\n")
    assert printed(monkeypatch, color=True).startswith("\x1b[33m" + WARNING)


def test_without_comparison(monkeypatch):
    assert printed(monkeypatch, compare=False).splitlines()[-1] == "accept_len 1.50, 2.0 tokens/s"


@pytest.mark.parametrize("plain_ids, first", [([1, 9, 3, 4], 2), ([1, 2, 3], 4), ([1, 2, 3, 4, 5], 5)])
def test_other_output_is_reported(monkeypatch, plain_ids, first):
    monkeypatch.setattr(FakeDecoder, "plain_ids", plain_ids)
    assert f"output differs from token {first} on (a near-tie" in printed(monkeypatch)
    monkeypatch.setattr(NoProposer, "draws", True)
    assert "another text of the same distribution" in printed(monkeypatch)
