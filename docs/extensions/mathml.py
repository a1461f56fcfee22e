"""Formulas as MathML: browsers lay it out themselves, so that a page needs no script for it."""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# What `pymdownx.arithmatex` writes in its generic form.
FORMULA = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content: str, /, page, **kwargs) -> str:
    """Replace every formula of a page; MkDocs calls this once a page's Markdown is HTML."""

    def as_mathml(formula: re.Match) -> str:
        tex = html.unescape(formula["tex"])
        try:
            display = "block" if formula["kind"] == "[" else "inline"
            return f"<{formula['tag']}>{convert(tex, display=display)}</{formula['tag']}>"
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: {tex!r} is no formula: {error!r}") from error

    return FORMULA.sub(as_mathml, content)
