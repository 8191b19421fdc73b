"""The page of the committed raw data in a real browser, as a phone, a desk and a printer show it."""

import io
from pathlib import Path

import pytest
from PIL import Image

from drafttrain.report.build import write_report
from tests.browser import Browser, find_chromium
from tests.report.test_page import a_trace, measurements, written

ROOT = Path(__file__).parents[2]
RAW = ROOT / "docs/results/raw"
CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install one (Debian: apt-get install chromium) or set CHROMIUM"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    a_trace().save(folder / "trace.json")
    return write_report(
        RAW / "trees",
        folder / "report.html",
        bundles=[ROOT / "model_cards/smollm2-135m-edd", RAW / "c2t"],
        sweeps=[RAW / "c2t/points_mt_bench.jsonl"],
        trace=folder / "trace.json",
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_and_fetches_nothing(page, browser, width):
    browser.open(page, width)
    assert browser.evaluate("innerWidth") == width
    assert (
        browser.evaluate("document.documentElement.scrollWidth") <= width
    )  # the body does not scroll sideways
    assert browser.requests == [page.as_uri()]
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth, b.clientWidth])"
    )
    assert len(boxes) == 9  # four tables of speed, one of context, two of time, two trees
    assert any(inner > outer for inner, outer in boxes) == (width < 600)  # they scroll in boxes of their own
    size = browser.evaluate("Math.min(...[...document.querySelectorAll('main svg text')].map(t =>"
                            " parseFloat(getComputedStyle(t).fontSize) * t.getCTM().a))")  # fmt: skip
    assert size > 8.5  # letters of figures, in pixels


@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_not_blank(page, browser, width):
    pictures = []
    for scheme in ("light", "dark"):
        browser.open(page, width, scheme=scheme)
        with Image.open(io.BytesIO(browser.screenshot())) as picture:
            assert picture.width == width and picture.height > 3000
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 200
            pictures.append(picture.convert("RGB").getpixel((2, 2)))
    assert pictures == [(255, 255, 255), (20, 24, 29)]


def test_long_labels_and_flags_do_not_cover_each_other(browser, tmp_path):
    trees = ("eagle2:top_k=10,max_depth=6,total=50", "my own drafter with a rather long name")
    trees += ("pct:width=10,max_depth=10,min_confidence=0.0075,threshold=0.0075", "short")
    found = measurements("chat", methods={"autoregressive": 2.0} | {tree: 2.2 for tree in trees})
    for one in found:
        one.cpu_contention = 0.6  # a flag for all, besides that of slow rows
    browser.open(write_report(written(tmp_path, found), tmp_path / "report.html"), 390)
    places = browser.evaluate(
        "[...document.querySelectorAll('g.row')].map(row => {"
        " const value = row.querySelector('.value').getBoundingClientRect();"
        " const covers = [...row.querySelectorAll('.label')].map(l => l.getBoundingClientRect())"
        ".some(l => l.right > value.left && l.bottom - 3 > value.top && value.bottom - 3 > l.top);"
        " return [row.querySelector('.value').textContent.includes('⚑2'), covers] })"
    )
    assert places[: len(trees)] == [[True, False]] * len(trees)
    assert len(places) == 2 * len(trees) + 1 and not any(covers for _, covers in places)


RAW_FILES = ["trees", "speed_32_prompts.jsonl", "self_draft", "baselines/repeatability_first.jsonl.gz"]


@pytest.mark.parametrize("raw", RAW_FILES)
def test_labels_stay_within_their_figures(browser, tmp_path, raw):
    browser.open(write_report(RAW / raw, tmp_path / "report.html"), 390)
    outside = browser.evaluate(
        "[...document.querySelectorAll('main figure svg')].flatMap(svg => {"
        " const frame = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('text')].filter(t => { const box = t.getBoundingClientRect();"
        " return box.left < frame.left - 1 || box.right > frame.right + 1 })"
        ".map(t => t.textContent) })"
    )
    assert outside == []


def test_it_prints(page, browser):
    browser.open(page, 1280)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000
    browser.open(page, 688)  # A4 within its margins, at 96 dots per inch
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    cut = browser.evaluate(
        "[...document.querySelectorAll('main svg, main table, main p')]"
        ".filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.textContent.slice(0, 40))"
    )
    assert cut == []  # paper does not scroll
