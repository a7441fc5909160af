"""A hook of mkdocs: links from the pages to files of the repository outside `docs/` work on the site, too.

Other Markdown files become pages below `project/`, and everything else becomes files below `files/`.
"""

import re
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=#[^)]*\)|\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside `docs/` that pages link to."""
    from mkdocs.structure.files import File

    pages = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))] + list(PROJECT)
    for page in PROJECT:
        files.append(File.generated(config, place(page), content=moved((ROOT / page).read_text(), page)))
    linked = {target for page in pages for target in targets((ROOT / page).read_text(), page)}
    for target in sorted(linked - set(PROJECT)):
        if not target.startswith("docs/") and (ROOT / target).is_file():
            files.append(File.generated(config, place(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page of `docs/` to their places on the site."""
    uri = page.file.src_uri
    return markdown if uri.startswith("project/") else moved(markdown, f"docs/{uri}")


def moved(markdown: str, page: str) -> str:
    """The text of a page of the repository with links that hold on the site."""
    folder = PurePosixPath(place(page)).parent
    return LINK.sub(lambda link: relpath(place(target(link[1], page)), folder), markdown)


def targets(markdown: str, page: str) -> Iterator[str]:
    """The files that a page links to, from the repository's root."""
    for link in LINK.finditer(markdown):
        yield target(link[1], page)


def target(link: str, page: str) -> str:
    """The file that a link of a page leads to, from the repository's root."""
    return relpath(ROOT / PurePosixPath(page).parent / link, ROOT)


def place(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"project/{path}" if path in PROJECT else f"files/{path}"
