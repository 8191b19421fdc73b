"""`drafttrain report`: one HTML page from raw files, which reads without a network and without scripts."""

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup, escape

from drafttrain.evaluation.sweep import Point
from drafttrain.report.bundles import costs, operating_points, reliability, training
from drafttrain.report.panels import Panel, Tree
from drafttrain.report.raw import (
    Benchmark,
    BundleFiles,
    points_file,
    read_benchmark,
    read_bundle,
    read_points,
    source,
)
from drafttrain.report.rows import (
    Headline,
    Measured,
    acceptance,
    headline,
    speed,
    styles,
    verify_accept,
)
from drafttrain.report.sections import Section
from drafttrain.report.svg import draw, swatch
from drafttrain.report.trace import Trace
from drafttrain.report.traced import text_section, tree_section
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import versions


@dataclass
class Tile:
    """A number at the head of the page, with what it is and what to know about it."""

    name: str
    value: str
    note: str = ""
    long: bool = False


@dataclass
class Page:
    """All that the page says.

    Attributes:
        title, subtitle: at its head.
        tiles: key numbers.
        claims: what they rest on.
        sections: the figures.
        best: method whose rows stand out.
        sources: name and hash of each raw file.
    """

    title: str
    subtitle: str
    tiles: list[Tile]
    claims: list[str]
    sections: list[Section]
    best: str | None
    sources: list[tuple[str, str]]


def write_report(
    benchmark: str | os.PathLike,
    out: str | os.PathLike,
    bundles: Sequence[str | os.PathLike] = (),
    sweeps: Sequence[str | os.PathLike] = (),
    trace: str | os.PathLike | None = None,
    png: str | os.PathLike | None = None,
) -> Path:
    """Writes the page, and its figures as pictures if asked to.

    Args:
        benchmark: folder with `measurements.jsonl`, or such a file.
        out: HTML file to write.
        bundles: folders or Hub ids with calibration, training log and the like.
        sweeps: `points.jsonl` of sweeps.
        trace: what `drafttrain trace` wrote.
        png: folder for pictures.

    Raises:
        UserError: a raw file is missing, unreadable or of another format.
    """
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name an HTML file to write")
    found = {str(bundle): read_bundle(bundle) for bundle in bundles}
    for bundle, name in zip(found.values(), distinct([one.name for one in found.values()], list(found))):
        bundle.name = name
    points = {str(file): read_points(file) for file in map(points_file, sweeps)}
    page = make_page(
        read_benchmark(benchmark),
        list(found.values()),
        dict(zip(distinct(list(map(_sweep_name, points)), list(points)), points.values())),
        None if trace is None else Trace.load(trace),
    )
    page.sources += [source(Path(path)) for path in [*points, *([trace] if trace else [])]]
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(render(page), encoding="utf-8")
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    if png is not None:
        from drafttrain.report.png import write_pictures  # matplotlib takes a second to import

        write_pictures(page.sections, Path(png))
    return out


def make_page(
    benchmark: Benchmark,
    bundles: Sequence[BundleFiles],
    sweeps: dict[str, list[Point]],
    trace: Trace | None,
) -> Page:
    """What the page says, from raw data.

    Args:
        bundles: with names of their own.
        sweeps: by name.
    """
    measured = [Measured.of(group) for group in benchmark.groups]
    found, style = headline(benchmark, measured), styles(measured)
    best = found.method if found else None
    sections = [
        speed(measured, best),
        acceptance(measured, style),
        verify_accept(measured, style, sweeps),
        reliability(bundles),
        costs(bundles, operating_points(bundles, found)),
        training(bundles),
        tree_section(trace),
        text_section(trace),
    ]
    if benchmark.unfinished:
        sections[0].notes.append(
            "Measurements that were cut off or of an unfinished repeat are left out: "
            f"{benchmark.unfinished}. The command that measures continues them."
        )
    sources = [source(file) for file in [*benchmark.files, *(f for bundle in bundles for f in bundle.files)]]
    tiles, claims = _tiles(benchmark, found, measured)
    return Page(_title(benchmark), _subtitle(benchmark), tiles, claims, sections, best, sources)


def distinct(names: list[str], places: list[str]) -> list[str]:
    """Names, and in place of those that several have the places that they come from."""
    return [place if names.count(name) > 1 else name for name, place in zip(names, places)]


def _sweep_name(path: str) -> str:
    """Folder or file name, whichever tells more."""
    place = Path(path)
    name = place.stem.removeprefix("points").strip("_-. ") if place.suffix else place.name
    return name or place.resolve().parent.name


def _title(benchmark: Benchmark) -> str:
    target = benchmark.settings.get("target")
    name = target.get("name") if isinstance(target, dict) else target
    return f"{str(name).rstrip('/').split('/')[-1]}: {benchmark.name}" if name else benchmark.name


def _subtitle(benchmark: Benchmark) -> str:
    settings, target = benchmark.settings, benchmark.settings.get("target")
    parts = ["drafts measured against plain decoding, batch 1"]
    dtype = settings.get("dtype") or (target.get("dtype") if isinstance(target, dict) else None)
    if dtype:
        parts.append(str(dtype))
    inner = settings.get("settings")
    limit = settings.get("max_new_tokens") or (isinstance(inner, dict) and inner.get("max_new_tokens"))
    if limit:
        parts.append(f"at most {limit} new tokens")
    if settings.get("measured"):
        parts.append(f"measured {str(settings['measured'])[:10]}")
    return ", ".join(parts)


def _tiles(
    benchmark: Benchmark, found: Headline | None, measured: Sequence[Measured]
) -> tuple[list[Tile], list[str]]:
    tiles, claims = [], []
    if found is not None:
        row = found.row
        if row.speedup is not None:
            low, high = row.speedup_interval
            tiles.append(Tile("speedup", f"{row.speedup:.2f}×", f"95 % interval {low:.2f} to {high:.2f}"))
        if row.speedup_transformers is not None:
            low, high = row.speedup_transformers_interval
            text = f"95 % interval {low:.2f} to {high:.2f}"
            tiles.append(Tile("against transformers' generate", f"{row.speedup_transformers:.2f}×", text))
        length = row.accept_len_nonrepeated
        alone = "–" if length is None else f"{length:.2f}"
        repeats = f"{alone} without repeats ({row.repetition:.0%} of tokens)"
        tiles.append(Tile("accept_len, tokens per forward", f"{row.accept_len:.2f}", repeats))
        tiles.append(Tile("tokens per second", f"{row.tokens_per_second:.1f}", "prompts included"))
        chosen = f"the fastest of {found.of} methods on these very prompts"
        if found.tuned:
            chosen = "the method that was chosen on tuning prompts"
        elif found.of == 1:
            chosen = "the only drafting method here"
        claims.append(
            f"These numbers are of {found.method}, {chosen}, over {row.prompts} answers of "
            f"{', '.join(found.tasks)}. Speedup is the ratio of tokens per second against autoregressive "
            "decoding by the same engine."
        )
        claims += [f"⚑ {flag}." for flag in row.flags]
    tiles.append(Tile("machine", *_machine(benchmark), long=True))
    lossless = benchmark.settings.get("lossless")
    counts = ("prompts", "mismatches")
    if isinstance(lossless, dict) and all(isinstance(lossless.get(name), int) for name in counts):
        same = lossless["prompts"] - lossless["mismatches"]
        tiles.append(
            Tile("same output in fp32", f"{same} of {lossless['prompts']}", "against plain decoding")
        )
    return tiles, claims


def _machine(benchmark: Benchmark) -> tuple[str, str]:
    machine = benchmark.settings.get("machine")
    if not isinstance(machine, dict):
        return "not recorded", "with these measurements"
    name = machine.get("gpu") or machine.get("processor") or "unknown"
    threads = f"{machine['threads']} threads" if "threads" in machine else ""
    cores = f" of {machine['cores']} cores" if threads and "cores" in machine else ""
    return str(name), threads + cores


def render(page: Page) -> str:
    """The page as HTML; everything that comes from raw files is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    numbers = iter(range(10_000))

    def drawn(panels: Sequence[Panel]) -> Iterator[tuple[Panel, Markup, bool]]:
        for panel in panels:
            yield panel, draw(panel, next(numbers)), isinstance(panel, Tree)

    environment.filters |= {"inline_code": inline_code, "breakable": breakable, "drawn": drawn}
    template = environment.from_string((files("drafttrain.report") / "page.html").read_text(encoding="utf-8"))
    return template.render(vars(page), swatch=swatch, version=versions().get("drafttrain", ""))


def breakable(words: str) -> Markup:
    """Escaped words that may be broken behind every comma: policies have no spaces."""
    return Markup(re.sub(r",(?=\S)", ",<wbr>", str(escape(words))))


def inline_code(words: str) -> Markup:
    """The same, with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(breakable(words))))
