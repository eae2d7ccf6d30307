"""What mkdocs cannot know by itself: the README is the first page, the API comes from the code.

In:    README.md, docs/*.md, the public names of src/penstock/__init__.py
Out:   pages index.md and api.md, and a copy of each file of the project that a page links to
Keeps: links of the project work in the site; one that leads nowhere fails `mkdocs build --strict`
Never: imports penstock, writes outside of build/docs
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!\w+://|#)([^)#\s]+)((?:#[^)\s]*)?)\)")


def public_names() -> dict[str, str]:
    """Each public name with the module that it is defined in, read and not imported."""
    tree = ast.parse((ROOT / "src" / "penstock" / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError("src/penstock/__init__.py has no _HOMES")


def api() -> str:
    """The page that mkdocstrings fills in."""
    names = "\n\n".join(
        f"::: {home}.{name}\n    options:\n      heading: penstock.{name}"
        for name, home in public_names().items()
    )
    return (
        "# API reference\n\nMade from the code. Every name is imported from `penstock` itself.\n\n"
        f"{names}\n\n## Errors\n\n::: penstock.errors\n    options:\n      heading_level: 3\n"
    )


def copied(path: Path) -> str:
    """Where a file of the project lies in the site; as text, so that browsers show it."""
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix in (".svg", ".json") else f"source/{name}.txt"


def linked(markdown: str, folder: Path) -> str:
    """A page whose links lead into the site, the page lying in `folder`."""

    def lead(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"]({path.relative_to(ROOT / 'docs').as_posix()}{match[2]})"
        if path == ROOT / "README.md":
            return f"](index.md{match[2]})"
        if path.is_dir():
            return "](index.md)"  # a folder has no page
        return f"]({copied(path)})" if path.is_file() else match[0]

    return LINK.sub(lead, markdown)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the files that pages link to."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    targets = {
        path
        for page in pages
        for link, _ in LINK.findall(page.read_text("utf-8"))
        if (path := (page.parent / link).resolve()).is_file()
        and not path.is_relative_to(ROOT / "docs")
        and path != ROOT / "README.md"
    }
    readme = linked((ROOT / "README.md").read_text("utf-8"), ROOT)
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "api.md", content=api()))
    for path in sorted(targets):
        files.append(File.generated(config, copied(path), content=path.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Lead the links of a page of docs/ into the site."""
    made = page.file.src_uri in ("index.md", "api.md")
    return markdown if made else linked(markdown, ROOT / "docs")
