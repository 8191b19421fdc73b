"""The output of `drafttrain benchmark --table texts`; its outputs are compared in `test_stages.py`."""

import io
from types import SimpleNamespace

from rich.console import Console

from drafttrain.evaluation import compare

WARNING = "calibrated elsewhere; measure again: drafttrain calibrate runs/[/x]/[red]drafter --prompts FILE"


def test_a_warning_is_printed_without_markup(monkeypatch):
    """It names the user's folder, which is no markup."""
    target = SimpleNamespace(tokenizer=None, dtype="torch.bfloat16")
    loaded = SimpleNamespace(warning=lambda tree: WARNING, target=target)
    monkeypatch.setattr(compare, "load_bundle", lambda *args, **rest: loaded)
    monkeypatch.setattr(compare, "read_prompts", lambda *args: [])
    console = Console(file=io.StringIO(), width=40)
    compare.compare("bundle", "prompts", console=console)
    assert console.file.getvalue().startswith(WARNING + "\n0 of 0 outputs are equal in bfloat16; ")
