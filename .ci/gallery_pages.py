"""A hook of mkdocs: a page in the place of each report of the gallery that docs/gallery.py has not written."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_MISSING = (
    "<!doctype html><title>Gallery</title><p>This site was built without the gallery: run docs/gallery.py first.</p>"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is missing."""
    page = (Path(config.docs_dir) / "gallery.md").read_text()
    for name in re.findall(r"\((gallery/[^)]+\.html)\)", page):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=_MISSING))
    return files
