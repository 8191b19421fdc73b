"""A drafter of bytes and the same one in bf16 decode in turn."""

import json

import pytest

from drafttrain.kernels.build import variant
from drafttrain.kernels.linear import NativeLinear
from studies import drafter_bytes


@pytest.mark.skipif(variant() in (None, "generic"), reason="no products of bytes here")
def test_both_forms_of_a_drafter_are_measured(tiny_bundle, tmp_path, monkeypatch):
    forms, made = set(), NativeLinear.__init__

    def spied(self, *args, **options):
        made(self, *args, **options)
        forms.add(self.scales is not None)

    monkeypatch.setattr(NativeLinear, "__init__", spied)
    monkeypatch.setattr(drafter_bytes, "NEW_TOKENS", 6)
    assert drafter_bytes.main(["--bundle", str(tiny_bundle), "--limit", "1", "--out", str(tmp_path)]) == 0
    assert forms == {True, False}
    found = json.loads((tmp_path / "drafter_bytes.json").read_text())
    assert set(found["trees"]) == set(drafter_bytes.TREES) and found["plain"] > 0
    for row in found["trees"].values():
        assert row["bytes_over_bf16"] == pytest.approx(row["speedup"]["bytes"] / row["speedup"]["bf16"])
