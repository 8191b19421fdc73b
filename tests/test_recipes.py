"""Every recipe is read strictly, has a tiny twin of the same stages, and the twin runs from end to end."""

from functools import cache
from pathlib import Path

import pytest

from drafttrain import SpeculativeDecoder
from drafttrain.run.cli import main
from drafttrain.run.recipe import Recipe, load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.utils.files import read_json

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = sorted((ROOT / "recipes" / "large").glob("*.yaml"))


@pytest.fixture(scope="module")
def tiny_target(tiny_llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    model, tokenizer = tiny_llama
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@cache
def loaded(path: Path) -> Recipe:
    """Read a recipe once for all tests, which change nothing of it."""
    return load_recipe(path)


def stages(recipe) -> list[str]:
    return [stage.name for stage in STAGES if stage.enabled(recipe)]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_and_twin_run_the_same_stages(path):
    recipe, twin = loaded(path), loaded(path.parent / "tiny" / path.name)
    assert stages(recipe) == stages(twin)
    assert recipe.drafter.tapped_blocks == twin.drafter.tapped_blocks
    assert recipe.corpus.exclude == twin.corpus.exclude


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_file_a_recipe_names_is_in_the_repository(path):
    recipe = loaded(path)
    named = [source.path for source in recipe.corpus.sources] + recipe.corpus.exclude
    named += [prompts.path for prompts in recipe.evaluate.prompts]
    sets = [recipe.classifier.prompts, recipe.calibrate.prompts, recipe.evaluate.tune_prompts]
    named += [prompts.path for prompts in sets if prompts]
    named += [p for p in (recipe.training.init_from, recipe.training.eval_prompts) if p]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", [*RECIPES, *LARGE], ids=lambda path: path.stem)
def test_no_recipe_trains_on_what_it_measures_or_tunes_with(path):
    """Also not on other benchmarks: a drafter is compared on all of `data/eval` later."""
    recipe = loaded(path)
    exclude, evaluate = [Path(name) for name in recipe.corpus.exclude], recipe.evaluate
    assert Path("data/eval") in exclude
    sets = [*evaluate.prompts, evaluate.tune_prompts, recipe.classifier.prompts, recipe.calibrate.prompts]
    held_out = [prompts.path for prompts in sets if prompts]
    held_out += [recipe.training.eval_prompts] if recipe.training.eval_prompts else []
    assert [name for name in held_out if not {Path(name), *Path(name).parents} & {*exclude}] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("hasty_calibration")
def test_the_twin_runs_and_its_bundle_decodes(path, tiny_target, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    command = ["run", f"recipes/tiny/{path.name}", "--target.model", str(tiny_target), "--output", str(out)]
    assert main(command) == 0
    if "evaluate" in stages(loaded(path)):
        assert read_json(out / "summary.json")["lossless"] is True
    decoder = SpeculativeDecoder.from_pretrained(str(out / "bundle"), dtype="float32")
    prompt = "Could you please explain"
    assert decoder.generate(prompt, 12).token_ids == decoder.autoregressive(prompt, 12).token_ids
    written = (out / "bundle" / "stage.json").stat().st_mtime_ns
    assert main(command) == 0  # all up to date: nothing is written again
    assert (out / "bundle" / "stage.json").stat().st_mtime_ns == written
