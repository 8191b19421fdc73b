"""The documentation holds: every command line is one that the program takes, of paths that
are there or that an earlier command of the page has made; what costs little is run. Links lead somewhere."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from drafttrain.drafters.config import DrafterConfig
from drafttrain.pipeline.config import PipelineConfig, SimulateConfig
from drafttrain.reasoning.config import ReasonConfig
from drafttrain.run import cli
from drafttrain.run.recipe import Recipe, _check_keys, load_recipe, load_settings
from drafttrain.trees.parse import policy_maker

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "data" / "README.md"]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"```.*?```", re.DOTALL)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_/0-9]*|you/[\w-]+|…")  # BUNDLE, FILE, USER/NAME
SCRIPTS = ("bash", "python", "torchrun", "deepspeed")
SETTINGS = {"reason": ReasonConfig, "pipeline": PipelineConfig}  # what their recipes hold
ELSEWHERE = ("source", "hf", "vllm")  # programs of others


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The words of each command of a page, in order; continued lines are one, braces are the shell's."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").split("\n")
    found = [shlex.split(re.sub(r"\{[^}]*\}", "1", line), comments=True) for line in lines]
    return [words for words in found if words]


def named(cases: list[tuple[Path, int]]) -> list:
    return [pytest.param(page, i, id=f"{page.stem}-{i}") for page, i in cases]


COMMANDS = named([(page, i) for page in PAGES for i in range(len(commands(page)))])


def parse(words: list[str]):
    """A command as the program reads it, with its recipe where it has one."""
    args = cli.parse(words)
    recipe = None
    if "recipe" in args and not PLACEHOLDER.fullmatch(args.recipe):
        if args.command in SETTINGS:
            recipe = load_settings(
                SETTINGS[args.command] if "simulate" not in args else SimulateConfig,
                args.recipe,
                args.overrides,
            )
        else:
            recipe = load_recipe(args.recipe, args.overrides)
    return args, recipe


def made_by(words: list[str]) -> list[str]:
    """Files and folders that a command of a page leaves behind."""
    if words[0] in ("torchrun", "deepspeed", "bash"):
        recipes = [word for word in words if word.startswith("recipes/") and word.endswith(".yaml")]
        if "scripts/pipeline.py" in words:
            return [load_settings(PipelineConfig, recipe).out for recipe in recipes]
        recipes += ["recipes/quickstart.yaml"] if "scripts/quickstart.sh" in words else []
        return [load_recipe(recipe).output for recipe in recipes]
    if words[0] != "drafttrain" or "--keys" in words or "--dry-run" in words:
        return []
    args, recipe = parse(words[1:])
    if recipe is not None:
        return [recipe.out if args.command in SETTINGS else recipe.output]
    return [getattr(args, name) for name in ("out", "trees", "trace") if name in args]


@pytest.mark.parametrize("page, number", COMMANDS)
def test_command(page, number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    program, *words = commands(page)[number]
    assert program in ("drafttrain", *SCRIPTS, *ELSEWHERE), program
    made = [place for earlier in commands(page)[:number] for place in made_by(earlier)]
    if program in SCRIPTS:
        script = next(word for word in words if word.startswith(("scripts/", "studies")))
        module = script.replace(".", "/")
        paths = (f"{module}.py", f"{module}/__main__.py") if "-m" in words else (script,)
        assert any((ROOT / path).is_file() for path in paths)
        if script == "scripts/train_drafter.py":
            assert words[words.index(script) + 1] == "--config"
            recipe, *overrides = words[words.index(script) + 2 :]
            load_recipe(recipe, ["--training.deepspeed" if o == "--deepspeed" else o for o in overrides])
    if program != "drafttrain" or "--keys" in words:
        return
    args, recipe = parse(words)
    for name, value in vars(args).items():
        if name in ("prompt", "overrides", "out", "repo", "trees", "tree", "features", "png", "trace"):
            continue
        for path in value if isinstance(value, list) else [value]:
            if args.command == "benchmark" and isinstance(path, str):
                path = (path.partition("=")[2] or path).partition("@")[0]  # NAME=FILE, NAME=BUNDLE@POLICY
            if isinstance(path, str) and "/" in path and not PLACEHOLDER.fullmatch(path):
                known = (ROOT / path).exists() or any(f"{path}/".startswith(f"{place}/") for place in made)
                assert known, f"{page.name}: {path} is neither there nor made by an earlier command"


def is_cheap(words: list[str]) -> bool:
    """Return True if a command takes seconds: plans, cards, dry runs, texts of the committed drafter."""
    if words[0] != "drafttrain" or any(PLACEHOLDER.fullmatch(word) for word in words[1:2]):
        return False
    if words[1] == "run" or "recipe" in cli.parse([word for word in words[1:] if word != "--keys"]):
        return "--dry-run" in words or "--keys" in words
    return words[1] in ("push", "generate") and "model_cards/smollm2-135m-edd" in words


CHEAP = named([(page, i) for page in PAGES for i, words in enumerate(commands(page)) if is_cheap(words)])


@pytest.mark.parametrize("page, number", CHEAP)
@pytest.mark.usefixtures("hasty_calibration")
def test_what_costs_little_is_run(page, number, monkeypatch, request, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    _, *words = commands(page)[number]
    if "runs/calibration" in words:  # made by the command before it, which takes minutes
        at = words.index("--calibration")
        del words[at : at + 2]
    if "--keys" in words:
        with pytest.raises(SystemExit):
            cli.main(words)
        return
    if words[0] == "collect":  # asks for the corpus, which the line before it builds
        words[0] = "run"
    if words[0] == "train":  # asks for hidden states, likewise
        words = ["run", *words[1:]]
    if words[0] == "push":
        words = [word for word in words if word != "--private"] + ["--dry-run"]
    if words[0] == "generate":
        request.getfixturevalue("smollm2")
        words += ["--max-new-tokens", "8", "--no-compare"]
    if words[0] == "push":
        words += ["--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip() or (tmp_path / "out").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_in_pages_have_real_keys(page):
    for text in blocks(page, "yaml"):
        _check_keys(Recipe, yaml.safe_load(text), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_pages_is_python_of_things_that_exist(page):
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")
        exec("\n".join(line for line in text.split("\n") if line.startswith(("from ", "import "))), {})


@pytest.mark.parametrize("page", ["python.md", "reasoning.md"])
@pytest.mark.usefixtures("hasty_calibration", "smollm2")
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path, capsys):
    for folder in ("data", "model_cards", "recipes"):  # what it writes stays out of the clone
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for text in blocks(ROOT / "docs" / page, "python"):
        exec(compile(text, page, "exec"), names)
        assert capsys.readouterr().out.strip()


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        place, _, anchor = link.partition("#")
        found = page.parent / place if place else page
        assert found.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(found), f"{page.name}: {link}"


@pytest.mark.parametrize("page", ["trees", "c2t"])
def test_settings_of_trees_have_the_defaults_of_the_code(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*=[^`]*)`", text, re.MULTILINE)
    assert len(rows) > 3
    for name, settings in rows:
        parameters = inspect.signature(policy_maker(name)).parameters
        for setting in settings.split(","):
            key, _, said = setting.partition("=")
            default = parameters[key].default
            if default is not inspect.Parameter.empty:  # what has none is shown by an example
                values = default if isinstance(default, tuple) else [default]
                assert said == "-".join(map(str, values)).lower(), f"{name}: {setting}"


def test_the_table_of_edd_has_the_defaults_of_the_code():
    text = (ROOT / "docs" / "edd.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text, re.MULTILINE)
    said = {
        key: value
        for keys, values in rows
        for key, value in zip(re.findall(r"`(\w+)`", keys), values.split(", "))
    }
    for key in ("kv_heads", "intermediate_size"):
        assert said.pop(key) == "the target's" and getattr(DrafterConfig(), key) is None
    assert len(said) > 5
    assert said == {key: str(getattr(DrafterConfig(), key)).lower() for key in said}


def test_the_paper_index_names_every_equation_algorithm_table_and_figure():
    text = (ROOT / "docs" / "paper_index.md").read_text(encoding="utf-8")
    papers = dict(re.findall(r"^## ([\w-]+)[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    # numbered in the papers: equations, algorithms, tables, figures
    counts = {"EDD": (5, 0, 4, 7), "C2T": (4, 1, 7, 11), "Self-Draft": (0, 1, 2, 8)}
    counts |= {"SEED": (0, 2, 4, 6), "PipeDec": (0, 4, 0, 8)}
    for paper, numbers in counts.items():
        for kind, most in zip(("eq.", "Algorithm", "Table", "Figure"), numbers):
            found = set()
            for listed in re.findall(
                rf"{kind}s? ((?:\d+[a-d]?(?:, [a-d]\b)?(?:,\s| and | to |\s+to\s)?)+)", papers[paper]
            ):
                for first, last in re.findall(r"(\d+)[a-d]?(?:\s+to\s+(\d+))?", listed):
                    found |= set(range(int(first), int(last or first) + 1))
            assert found >= set(range(1, most + 1)), (paper, kind, sorted(set(range(1, most + 1)) - found))


def test_the_index_has_every_page():
    links = re.findall(r"\]\(([\w/]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES} - {"README.md"} <= set(links)
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_functions_that_the_metrics_page_names_are_there():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for path, names in re.findall(r"`(drafttrain/[\w/]+\.py): ([\w, ]+)`", text):
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in names.split(", "):
            assert re.search(rf"^(?:    )?(?:def|class) {name}\b", source, re.MULTILINE), f"{path}: {name}"
    stats = (ROOT / "drafttrain" / "inference" / "stats.py").read_text(encoding="utf-8")
    first = text.partition("## Decoding")[2].partition("## Comparisons")[0]
    for row in re.findall(r"^\| `\w+` \|.*\| ([^|]*) \|$", first, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", row):
            assert f"def {name.removeprefix('DecodeStats.')}(" in stats, name


@pytest.mark.usefixtures("smollm2")
def test_the_simulation_of_the_pipelines_page_runs(monkeypatch, capsys):
    """The page's other program is for torchrun."""
    monkeypatch.chdir(ROOT)
    [text] = [text for text in blocks(ROOT / "docs" / "pipeline.md", "python") if "simulate(" in text]
    exec(compile(text, "pipeline.md", "exec"), {})
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["4 stages", "14 stages"]
