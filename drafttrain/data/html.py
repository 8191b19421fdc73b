"""Answers that were saved as the web page's HTML, as early ShareGPT dumps are, back to Markdown."""

import re
from html.parser import HTMLParser

_DUMP = re.compile(
    r'\s*<(?:div class="[^"]*\bmarkdown\b[^"]*"|p|ol|ul)>.*</(?:div|p|ol|ul|pre)>\s*', re.DOTALL
)
_BLOCKS = {"p", "div", "ol", "ul", "pre", "table", "tr", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"}
_MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*"}


def is_html_answer(text: str) -> bool:
    """Whether a whole answer is rendered HTML, as opposed to an answer that shows HTML code."""
    return _DUMP.fullmatch(text) is not None


def html_to_markdown(text: str) -> str:
    """Markdown of a rendered answer: paragraphs, lists, headings, emphasis, code."""
    parser = _Markdown()
    parser.feed(text)
    parser.close()
    blocks = "".join(parser.parts)
    return re.sub(r"\n{3,}", "\n\n", blocks).strip()


class _Markdown(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.lists: list[int | None] = []  # next number of each open list, None for bullets
        self.in_pre = self.in_code = False

    def handle_starttag(self, tag: str, attributes: list) -> None:
        if tag == "pre":
            self.in_pre = True
        elif tag == "code":
            self.in_code = True
            language = re.search(r"language-(\w+)", dict(attributes).get("class") or "")
            self.parts.append(f"\n\n```{language[1] if language else ''}\n" if self.in_pre else "`")
        elif self.in_pre:
            return  # frames around the code
        elif tag in ("ol", "ul"):
            self.lists.append(1 if tag == "ol" else None)
            self.parts.append("\n" if len(self.lists) > 1 else "\n\n")
        elif tag == "li":
            self._start_item()
        elif tag in _BLOCKS and not (tag == "p" and self._at_item()):
            self.parts.append("\n\n" + ("#" * int(tag[1]) + " " if re.fullmatch(r"h\d", tag) else ""))
        elif tag == "br":
            self.parts.append("\n")
        elif tag in _MARKS:
            self.parts.append(_MARKS[tag])

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.in_pre = False
        elif tag == "code":
            self.in_code = False
            newline = "" if self.parts and self.parts[-1].endswith("\n") else "\n"
            self.parts.append(f"{newline}```\n\n" if self.in_pre else "`")
        elif self.in_pre:
            return
        elif tag in ("ol", "ul"):
            if self.lists:
                self.lists.pop()
            self.parts.append("\n" if self.lists else "\n\n")
        elif tag in _BLOCKS and not self.lists:
            self.parts.append("\n\n")
        elif tag in _MARKS:
            self.parts.append(_MARKS[tag])

    def handle_data(self, data: str) -> None:
        if self.in_pre and not self.in_code:
            return  # "Copy code" and its like
        if not self.in_pre:
            data = re.sub(r"\s+", " ", data)
            if not data.strip() and (not self.parts or self.parts[-1].endswith("\n")):
                return  # layout between blocks
        self.parts.append(data)

    def _start_item(self) -> None:
        number = self.lists[-1] if self.lists else None
        if number is not None:
            self.lists[-1] = number + 1
        indent = "  " * max(0, len(self.lists) - 1)
        self.parts.append(f"\n{indent}{number}. " if number is not None else f"\n{indent}- ")

    def _at_item(self) -> bool:
        return bool(self.parts) and re.fullmatch(r"\n\s*(?:\d+\.|-) ", self.parts[-1]) is not None
