"""The sections of Keras's docstrings that Google's form reads differently, in its terms."""

import re
import textwrap

import griffe

CALL_ARGUMENTS = re.compile(r"^Call arguments:$", re.MULTILINE)
# Lines that are indented or empty: a paragraph and its list here, where Google's form has a type.
RETURNS = re.compile(r"^Returns:\n(?P<text>(?:(?: {4}.*)?\n)*(?: {4}.*)?)", re.MULTILINE)
# Lines that are not indented, up to the end or the next that begins with a word.
EXAMPLE = re.compile(r"^Example:\n(?P<text>.*?)(?=\n\n\w|\Z)", re.DOTALL | re.MULTILINE)


class KerasDocstrings(griffe.Extension):
    """Makes `Call arguments:`, `Returns:` and `Example:` what Griffe shows well."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of an object; Griffe calls this for every one."""
        if obj.docstring is not None:
            text = CALL_ARGUMENTS.sub("Other Parameters: Call arguments:", obj.docstring.value)
            text = RETURNS.sub(lambda section: f"**Returns:**\n\n{dedented(section)}\n\n", text)
            text = EXAMPLE.sub(
                lambda section: "Examples:\n" + textwrap.indent(dedented(section), "    "), text
            )
            obj.docstring.value = text


def dedented(section: re.Match) -> str:
    """The text of a section without its indentation."""
    return textwrap.dedent(section["text"]).strip()
