"""Answers saved as HTML."""

from drafttrain.data.html import html_to_markdown, is_html_answer

DUMP = (
    '<div class="markdown prose w-full break-words dark:prose-invert light"><p>Two ways &amp; '
    "<strong>one</strong> rule:</p>\n<ol><li><p>First, use <code>a &lt; b</code></p></li>"
    "<li><p>Then:</p><ul><li>x</li><li>y</li></ul></li>"
    "</ol><pre><div>python<button>Copy code</button></div><div>"
    '<code class="language-python">if a &lt; b:\n    print("no  fold")\n</code></div></pre>'
    "<h2>End</h2><p>See<br>you.</p></div>"
)


def test_markdown_of_a_rendered_answer():
    assert is_html_answer(DUMP)
    text = html_to_markdown(DUMP)
    assert text.startswith("Two ways & **one** rule:\n\n1. First, use `a < b`\n2. Then:\n")
    assert "\n   - x\n   - y\n" in text  # as far as the text of "2. ", or it were no part of it
    assert '\n\n```python\nif a < b:\n    print("no  fold")\n```\n\n' in text
    assert text.endswith("## End\n\nSee\nyou.")
    assert "<" not in text.replace("a < b", "")


def test_answers_that_show_html_are_left_alone():
    for text in (
        '<div class="modal fade" id="x">\n <p>code</p></div>',
        "Use <p> and </p>.",
        "<p>Hi</p> is a paragraph.",
        "```html\n<p>Hi</p>\n```",
        "if a < b",
    ):
        assert not is_html_answer(text)
