"""`drafttrain report`: make one HTML page from raw files; it needs neither a network nor scripts."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from drafttrain.calibration.calibration import BINS
from drafttrain.evaluation.sweep import Point
from drafttrain.report import measured as of
from drafttrain.report.bundles import costs, operating_points, reliability, training
from drafttrain.report.measured import Headline, cell
from drafttrain.report.panels import FEW, Panel, Section, Tree
from drafttrain.report.pictures import stylesheet, write_pictures
from drafttrain.report.raw import (
    Benchmark,
    BundleFiles,
    points_file,
    read_benchmark,
    read_bundle,
    read_points,
    source,
)
from drafttrain.report.svg import HATCH, draw, swatch
from drafttrain.report.trace import Trace
from drafttrain.report.traced import text_section, tree_section
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import versions
from drafttrain.utils.shares import below_all
from drafttrain.utils.writing import write_text


@dataclass
class Tile:
    """A number at the head of the page, with its name and a note."""

    name: str
    value: str
    note: str = ""
    long: bool = False


@dataclass
class Page:
    """The content of the page.

    Attributes:
        title, subtitle: at its head.
        tiles: key numbers.
        claims: what the key numbers were measured on, and their flags.
        sections: the figures.
        best: method whose rows are highlighted.
        sources: name and hash of each raw file.
    """

    title: str
    subtitle: str
    tiles: list[Tile] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    best: str | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)


def write_report(
    benchmark: str | os.PathLike,
    out: str | os.PathLike,
    bundles: Sequence[str | os.PathLike] = (),
    sweeps: Sequence[str | os.PathLike] = (),
    trace: str | os.PathLike | None = None,
    png: str | os.PathLike | None = None,
) -> Path:
    """Write the page, and its figures as pictures if asked to.

    Args:
        benchmark: folder with `measurements.jsonl`, or such a file.
        out: HTML file to write.
        bundles: folders or Hub ids with calibration, training log and the like.
        sweeps: `points.jsonl` of sweeps.
        trace: file of a `Trace`.
        png: folder for pictures.

    Raises:
        UserError: a raw file is missing, unreadable or of another format.
    """
    out = Path(out)
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name an HTML file to write")
    read = {str(bundle): read_bundle(bundle) for bundle in bundles}
    for bundle, name in zip(read.values(), distinct([bundle.name for bundle in read.values()], list(read))):
        bundle.name = name
    points = {str(file): read_points(file) for file in map(points_file, sweeps)}
    page = make_page(
        read_benchmark(benchmark),
        list(read.values()),
        dict(zip(distinct(list(map(_sweep_name, points)), list(points)), points.values())),
        None if trace is None else Trace.load(trace),
    )
    page.sources += [source(Path(path)) for path in [*points, *([trace] if trace else [])]]
    write_text(out, render(page))
    if png is not None:
        write_pictures(page.sections, Path(png))
    return out


def make_page(
    benchmark: Benchmark,
    bundles: Sequence[BundleFiles],
    sweeps: dict[str, list[Point]],
    trace: Trace | None,
) -> Page:
    """Return the content of the page from raw data.

    Args:
        bundles: with distinct names.
        sweeps: by name.
    """
    measured = benchmark.groups
    whole, head, style = of.joined(measured), of.headline(benchmark, measured), of.styles(measured)
    page = Page(_title(benchmark), _subtitle(benchmark), best=head.method if head else None)
    page.sections = [
        of.speed(measured, page.best),
        of.context(whole, style),
        of.time_and_memory(whole),
        of.acceptance(measured, style),
        of.verify_accept(measured, style, sweeps),
        reliability(bundles),
        costs(bundles, operating_points(bundles, head)),
        training(bundles),
        tree_section(trace),
        text_section(trace),
    ]
    if benchmark.unfinished:
        page.sections[0].notes.append(
            f"Left out, so that every turn counts with as many repeats: {benchmark.unfinished} measurements. "
            "The command that measures continues them."
        )
    page.sources = [source(file) for part in (benchmark, *bundles) for file in part.files]
    if head is not None:
        page.tiles, page.claims = _tiles(head), _claims(head)
    page.tiles += _conditions(benchmark)
    return page


def distinct(names: list[str], places: list[str]) -> list[str]:
    """Return the names, replaced by the corresponding places where a name occurs more than once."""
    return [place if names.count(name) > 1 else name for name, place in zip(names, places)]


def _sweep_name(path: str) -> str:
    """Return the name of a sweep: its file's, or its folder's if the file is just called points."""
    place = Path(path)
    name = place.stem.removeprefix("points").strip("_-. ") if place.suffix else place.name
    return name or place.resolve().parent.name


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of the settings; empty where it is missing or no object."""
    return settings[name] if isinstance(settings.get(name), dict) else {}


def _title(benchmark: Benchmark) -> str:
    target = benchmark.settings.get("target")
    name = target.get("name") if isinstance(target, dict) else target
    return f"{str(name).rstrip('/').split('/')[-1]}: {benchmark.name}" if name else benchmark.name


def _dtype(settings: dict[str, Any]) -> str | None:
    return settings.get("dtype") or _part(settings, "target").get("dtype")


def _subtitle(benchmark: Benchmark) -> str:
    settings = benchmark.settings
    parts = ["drafts measured against plain decoding, batch 1"]
    if dtype := _dtype(settings):
        parts.append(str(dtype))
    if limit := settings.get("max_new_tokens") or _part(settings, "settings").get("max_new_tokens"):
        parts.append(f"at most {limit} new tokens")
    if settings.get("measured"):
        parts.append(f"measured {str(settings['measured'])[:10]}")
    return ", ".join(parts)


def _tiles(head: Headline) -> list[Tile]:
    row, tiles = head.row, []
    for name, value, interval in (
        ("speedup", row.speedup, row.speedup_interval),
        ("against transformers' generate", row.speedup_transformers, row.speedup_transformers_interval),
    ):
        if value is not None:
            bounds = "95 % interval {:.2f} to {:.2f}".format(*interval) if interval else "a single prompt"
            tiles.append(Tile(name, f"{value:.2f}×", bounds))
    repeats = f"{cell(row.accept_len_nonrepeated, '{:.2f}')} without repeats ({row.repetition:.0%} of tokens)"
    tiles.append(Tile("accept_len, tokens per forward", f"{row.accept_len:.2f}", repeats))
    tiles.append(Tile("tokens per second", f"{row.tokens_per_second:.1f}", "prompts included"))
    if row.identical is not None:
        note = f"of {row.prompts} texts, to plain decoding in the timed dtype"
        tiles.append(Tile("identical texts", f"{below_all(row.identical):.0%}", note))
    if row.peak_bytes is not None:
        tiles.append(Tile("peak memory", f"{row.peak_bytes / 1e9:.2f} GB", "all loaded models included"))
    return tiles


def _claims(head: Headline) -> list[str]:
    chosen = f"the fastest of {head.of} methods on these very prompts"
    if head.tuned:
        chosen = "the method that was chosen on tuning prompts"
    elif head.of == 1:
        chosen = "the only drafting method here"
    claim = (
        f"These numbers are of {head.method}, {chosen}, over {head.row.prompts} answers of "
        f"{', '.join(head.tasks)}. Speedup is the ratio of tokens per second against autoregressive "
        "decoding by the same engine."
    )
    return [claim, *(f"⚑ {flag}." for flag in head.row.flags)]


def _conditions(benchmark: Benchmark) -> list[Tile]:
    """Return tiles on the machine, the dtypes, and the comparison in fp32, as far as they are recorded."""
    settings, tiles = benchmark.settings, []
    machine, lossless = _part(settings, "machine"), _part(settings, "lossless")
    name = machine.get("gpu") or machine.get("processor")
    threads = f"{machine['threads']} threads" if "threads" in machine else ""
    cores = f" of {machine['cores']} cores" if threads and "cores" in machine else ""
    load = machine.get("load")
    taken = f", {load:.2f} cores taken by other processes" if isinstance(load, float) else ""
    unknown = "not recorded", "with these measurements"
    tiles.append(Tile("machine", *((str(name), threads + cores + taken) if name else unknown), long=True))
    if dtype := _dtype(settings):
        stock = _part(settings, "transformers") or _part(_part(settings, "methods"), "transformers")
        note = ", ".join(filter(None, [stock.get("dtype") and f"transformers in {stock['dtype']}"]))
        kernel = machine.get("kernel") and f"kernels: {machine['kernel']}"
        tiles.append(Tile("dtype", str(dtype), "; ".join(filter(None, [note, kernel])), long=True))
    prompts, mismatches = lossless.get("prompts"), lossless.get("mismatches")
    if isinstance(prompts, int) and isinstance(mismatches, int):
        tiles.append(Tile("same text in fp32", f"{prompts - mismatches} of {prompts}", "as plain decoding"))
    return tiles


def render(page: Page) -> str:
    """Return the page as HTML; everything that comes from raw files is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    numbers = itertools.count()

    def drawn(panels: Sequence[Panel]) -> Iterator[tuple[Panel, Markup, bool]]:
        for panel in panels:
            yield panel, draw(panel, next(numbers)), isinstance(panel, Tree)

    environment.filters |= {"inline_code": inline_code, "breakable": breakable, "drawn": drawn}
    template = environment.from_string((files("drafttrain.report") / "page.html").read_text(encoding="utf-8"))
    constants = {"swatch": swatch, "hatch": HATCH, "figures": Markup(stylesheet()), "few": FEW, "bins": BINS}
    return template.render(vars(page), **constants, version=versions().get("drafttrain", ""))


def breakable(words: str) -> Markup:
    """Escape words and allow line breaks after commas, because policies have no spaces."""
    return Markup(re.sub(r",(?=\S)", ",<wbr>", str(escape(words))))


def inline_code(words: str) -> Markup:
    """Escape words as `breakable` does, and show the text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(breakable(words))))
