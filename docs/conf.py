"""Configuration of the documentation site: `make docs` builds it into build/docs."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]

from command_line import write_command_line  # noqa: E402  (the folder of this file has to be on the path first)

import shiftmend  # noqa: E402

project = "shiftmend"
version = release = shiftmend.__version__
copyright = "the shiftmend authors, Apache License 2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["results/notes"]
# Tables of generated pages have headings of one level; functions in the settings cannot be cached.
suppress_warnings = ["myst.header", "config.cache"]

html_theme = "furo"
html_title = "shiftmend"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
# Notes in the docstrings are written as Markdown has it: one backtick is code.
default_role = "literal"

maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "ExampleTitleSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    # Seconds say more about the machine than about the script.
    "min_reported_time": 3600,
    "remove_config_comments": True,
    "capture_repr": (),
}

GENERATED = ROOT / "docs" / "generated"
"""Pages that are made from the command line and from files in the root of the repository."""

INCLUDED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}

OPTIONAL = {name: ROOT / "docs" / f"{name}.md" for name in ("tables", "integrations", "deploy", "generated/security")}
"""Lines of the table of contents that are left out where their file is missing."""


def write_pages(_: Any) -> None:
    """Write the generated pages; a page that has not changed keeps its time stamp, so that Sphinx does not read it."""
    GENERATED.mkdir(exist_ok=True)
    pages = {"command-line.md": write_command_line()}
    for name, page in INCLUDED.items():
        if (ROOT / name).exists():
            pages[page] = re.sub(r"\]\((?:docs/)?(?!https?:|#)", "](../", (ROOT / name).read_text())
    for page, text in pages.items():
        path = GENERATED / page
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def read_source(_: Any, name: str, source: list[str]) -> None:
    """Turn links that work in the repository into links of the site."""
    text = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](/gallery/\1.rst)", source[0])
    for file, page in INCLUDED.items():
        text = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}\)", f"](/generated/{page})", text)
    if name == "index":
        text = "\n".join(line for line in text.split("\n") if OPTIONAL.get(line, ROOT).exists())
    if name == "results/README":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    source[0] = text


def setup(app: Any) -> None:
    # Scripts of the gallery warn of what their pages explain.
    logging.getLogger("shiftmend").setLevel(logging.ERROR)
    # Figures on a page should come out the same everywhere.
    torch.set_num_threads(1)
    os.environ.setdefault("COLUMNS", "100")
    app.connect("builder-inited", write_pages, priority=100)
    app.connect("source-read", read_source)
