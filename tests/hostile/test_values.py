"""Any JSON value at any place of a file: its reader takes it or refuses it in one line.

Readers are called in this process, so that there is time for many values; `python -m studies.hostile` puts a
table of values through whole commands.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from drafttrain.calibration.calibration import Calibration
from drafttrain.classifier.model import Classifier
from drafttrain.drafters.auto import load_drafter
from drafttrain.hidden_states.store import read_manifest
from drafttrain.pipeline.config import PipelineConfig, SimulateConfig
from drafttrain.reasoning.config import ReasonConfig
from drafttrain.reasoning.trace import Trace
from drafttrain.report.raw import read_benchmark
from drafttrain.run.recipe import load_recipe, load_settings
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import read_record
from tests.hostile.cases import FULL, make
from tests.hostile.mutations import changed, places, without

EXAMPLES = 30  # for each file
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "../x", "a\0b", "\n", "auto", "1e9", "nan", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
READERS: dict[str, Callable[[Path], object]] = {
    "bundle/config.json": lambda path: load_drafter(path.parent, target(path.parent.parent)),
    "bundle/classifier.json": lambda path: Classifier.load(path.parent),
    "calibration/calibration.json": Calibration.load,
    "ngrams/ngrams.json": lambda path: CorpusCache.open(path.parent),
    "runs/benchmark/benchmark.json": lambda path: read_benchmark(path.parent),
    "runs/benchmark/measurements.jsonl": lambda path: read_benchmark(path.parent),
    "runs/reason/1.json": Trace.load,
    f"{FULL}/corpus/stage.json": lambda path: read_record(path.parent),
    f"{FULL}/hidden_states/train/manifest.json": lambda path: read_manifest(path.parent),
    "recipe.yaml": load_recipe,
    "full.yaml": load_recipe,
    "reason.yaml": lambda path: load_settings(ReasonConfig, path),
    "simulate.yaml": lambda path: load_settings(SimulateConfig, path),
    "pipeline.yaml": lambda path: load_settings(PipelineConfig, path),
}


@functools.cache
def target(world: Path) -> FrozenTarget:
    return load_target(str(world / "target"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    place = tmp_path_factory.mktemp("values") / "world"
    make(place)
    return place


def decoded(path: Path) -> object:
    """Return a file's JSON or YAML, of JSON lines the first."""
    text = path.read_text(encoding="utf-8")
    return (
        yaml.safe_load(text)
        if path.suffix == ".yaml"
        else json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    )


def encoded(value: object, path: Path) -> str:
    return yaml.safe_dump(value) if path.suffix == ".yaml" else json.dumps(value) + "\n"


@pytest.mark.parametrize("name", READERS)
def test_any_value_is_read_or_refused(name, world, tmp_path_factory):
    path, read = world / name, READERS[name]
    before, valid = path.read_text(encoding="utf-8"), decoded(path)
    spots = places(valid, 10**6)

    @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(spots), VALUES, st.booleans())
    def put(spot, value, removed):
        spoiled = without(valid, spot) if removed else changed(valid, spot, value)
        path.write_text(encoded(spoiled, path), encoding="utf-8")
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error), error

    try:
        read(path)
        put()
    finally:
        path.write_text(before, encoding="utf-8")
