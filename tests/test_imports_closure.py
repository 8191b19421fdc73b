"""How much of the package decoding and training import: lines of the files that they have really loaded."""

from studies import goals
from studies.figures import structure
from studies.goals import Run

# lines, to be lowered to the goals of `studies/figures/structure.py`
DECODE, TRAIN = 7_000, 11_170


def test_imports_to_decode_and_to_train(monkeypatch, tmp_path):
    monkeypatch.setattr(goals, "RAW", tmp_path)
    found = structure.imports(Run("structure", quick=True))
    assert 1000 < found["imports_to_decode"]["value"] <= DECODE
    assert found["imports_to_decode"]["value"] < found["imports_to_train"]["value"] <= TRAIN
    assert found["imports_to_train"]["folders"]["drafttrain/training"] > 0
    assert found["decode_imports"]["imported"] == []
