"""Curves of accept_len: tokens are counted up to each evaluation, and the last point tests a line."""

import json
import math
from xml.etree import ElementTree

import pytest

from drafttrain.utils.errors import UserError
from studies.edd import curves


def log(levels, tokens=1_000_000, each=2):
    """A log with two rows of tokens before each evaluation, the first of them before any training."""
    rows = [{"eval_loss": 9.0, "eval_accept_len": 1.0, "step": 0}]
    for level in levels:
        rows += [{"loss": 1.0, "tokens": tokens}] * each + [{"eval_accept_len": level, "eval_loss": 1.0}]
    return rows


def test_tokens_are_those_seen_before_an_evaluation():
    curve = curves.read_curve("a", log([1.2, 1.3, 1.5]))
    assert (curve.tokens, curve.accept_len) == ([2.0, 4.0, 6.0], [1.2, 1.3, 1.5])
    kept = json.loads(json.dumps({"curve": curves.points(log([1.2, 1.3, 1.5]))}))
    assert curves.read_curve("a", kept) == curve


def test_the_last_point_is_left_out_of_its_prediction():
    levels = [1 + 0.25 * math.log(x) for x in (2, 4, 6)]
    for last in (1.0, 5.0):
        curve = curves.read_curve("a", log([*levels, last]))
        assert curve.predicted == pytest.approx(1 + 0.25 * math.log(8))


def test_curves_are_drawn_and_written(tmp_path, capsys):
    for name, levels in {"edd": [1.2, 1.3, 1.5], "anchored": [1.3, 1.5, 1.6]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(log(levels)))
    logs = [f"{name}={tmp_path / name}.json" for name in ("edd", "anchored")]
    status = curves.main(["--logs", *logs, "--out", str(tmp_path), "--pictures", str(tmp_path)])
    assert status == 0
    found = json.loads((tmp_path / "curves.json").read_text())
    assert [one["name"] for one in found] == ["edd", "anchored"] and found[1]["accept_len"][-1] == 1.6
    drawing = ElementTree.parse(tmp_path / "accept_len_curves.svg")
    texts = " ".join(element.text or "" for element in drawing.iter())
    assert "edd" in texts and "anchored" in texts and "tokens seen" in texts
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_log_without_enough_evaluations(tmp_path, capsys):
    with pytest.raises(UserError, match="a: must have 3 evaluations with accept_len at least, got 2"):
        curves.read_curve("a", log([1.2, 1.3]))
    assert curves.main(["--logs", "a.json", "--out", str(tmp_path)]) == 2
    assert "--logs: must be NAME=FILE, got a.json" in capsys.readouterr().err
