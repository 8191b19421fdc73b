"""Convert answers that were saved as a web page's HTML, as in early ShareGPT dumps, to Markdown."""

import re

_DUMP = re.compile(
    r'\s*<(?:div class="[^"]*\bmarkdown\b[^"]*"|p|ol|ul)>.*</(?:div|p|ol|ul|pre)>\s*', re.DOTALL
)


def is_html_answer(text: str) -> bool:
    """Return whether a whole answer is rendered HTML, as opposed to an answer that shows HTML code."""
    return _DUMP.fullmatch(text) is not None


def html_to_markdown(text: str) -> str:
    """Return the Markdown of a rendered answer: lists, tables, headings, emphasis, links, code."""
    from bs4 import BeautifulSoup  # imported here, as few corpora need it
    from markdownify import MarkdownConverter

    page = BeautifulSoup(text, "html.parser")
    for block in page("pre"):
        if code := block.find("code"):
            block.clear()  # the frame around the code: its language, a button "Copy code"
            block.append(code)
    converter = MarkdownConverter(
        heading_style="atx",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        code_language_callback=_language,
    )
    return re.sub(r"[ \t]+$", "", converter.convert_soup(page), flags=re.MULTILINE).strip()


def _language(block) -> str:
    code = block.find("code")
    found = re.search(r"language-(\S+)", " ".join(code.get("class", []))) if code else None
    return found[1] if found else ""
