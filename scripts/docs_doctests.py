"""Examples in docstrings as code in the API reference: Markdown takes `>>>` for a quotation, and a
list that it prints for a link.

In:    the docstrings that `make docs` reads
Out:   the same, their examples between fences
Never: changes a source file
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with its examples, each up to an empty line, as blocks of code."""
    return EXAMPLE.sub(lambda found: f"```text\n{found[0]}\n```", text)


class Doctests(griffe.Extension):  # type: ignore[misc]  # it comes with the extra docs
    def on_object(self, *, obj: Any, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
