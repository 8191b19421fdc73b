"""The studies of PipeDec on tiny models."""

import pytest

from drafttrain.drafters.auto import load_drafter
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.outlook import known_texts
from studies.pipedec import hits, modes
from studies.seed.pairs import Pair


def test_hits_grow_with_width_and_fall_with_stages(tiny_target, tiny_bundle):
    drafter = load_drafter(tiny_bundle, tiny_target)
    pair = Pair("B", tiny_target, drafter)
    texts = known_texts(tiny_target, drafter.config.tapped_blocks, [[5, 6, 7], [8]], 16, SamplingParams())
    narrow, wide, deep = (
        hits.count(pair, texts, *shape) for shape in ((2, 1, 1), (2, 64, 128), (6, 64, 128))
    )
    tokens = sum(len(text.answer) - 1 for text in texts)
    assert narrow["tokens"] == wide["tokens"] == deep["tokens"] == tokens
    assert narrow["hit_rate"] <= wide["hit_rate"] and narrow["static_share"] <= wide["static_share"]
    for row, groups in ((narrow, 2), (wide, 2), (deep, 6)):
        assert 1 <= row["timesteps_per_token"] <= groups and row["nodes_per_timestep"] > 0


def test_ratios_are_medians_over_prompts(capsys):
    rates = {"pp": (10, 10, 40), "stpp": (20, 5, 10), "pipedec": (30, 30, 40)}
    rows = [
        {"prompt": str(i), "repeat": repeat, "mode": mode, "tokens": [1] * 120, "seconds": 120 / rate[i]}
        for mode, rate in rates.items()
        for i in range(3)
        for repeat in range(2)
    ]
    modes.show(rows, 0.25)
    out = capsys.readouterr().out
    assert "stpp: 0.500 times" in out and "pipedec: 3.000 times" in out and "25.00%" in out
    assert "the same" in out
    rows[0]["tokens"] = [2] * 120
    modes.show(rows, 0.0)
    assert "different" in capsys.readouterr().out


@pytest.mark.parametrize("study", [hits, modes])
def test_studies_explain_themselves(study, capsys):
    with pytest.raises(SystemExit) as end:
        study.main(["--help"])
    assert end.value.code == 0 and f"python -m {study.__name__}" in capsys.readouterr().out
