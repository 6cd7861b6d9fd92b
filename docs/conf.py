"""How Sphinx builds the site: `python docs/build.py` runs it."""

from importlib.util import find_spec
from pathlib import Path

from sphinx.util.fileutil import copy_asset

import jax_softmax

project = "jax_softmax"
version = release = jax_softmax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
mathjax_path = "tex-chtml.js"  # of the site itself: setup copies it

autodoc_typehints = "none"  # the docstrings say them in words
napoleon_use_ivar = True
default_role = "literal"  # in docstrings `x` is code
# Python's own names, and a class that the docstring describes.
nitpick_ignore = [("py:exc", name) for name in ("TypeError", "ValueError", "RuntimeError")]
nitpick_ignore += [("py:class", "jax_softmax.runtime.explain.Launch")]

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {release}"
html_sidebars = {"*": []}  # of pages that have no others beside them
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": ["search-button"],
    "navbar_end": ["version-switcher", "theme-switcher"],
    "header_links_before_dropdown": 4,
    # build.py writes the list, beside the folders of the versions.
    "switcher": {"json_url": "../versions.json", "version_match": release},
    "check_switcher": False,
    "footer_end": [],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
}


def copy_mathjax(app, error):
    mathjax = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    fonts = Path("output", "chtml", "fonts", "woff-v2")
    copy_asset(mathjax / mathjax_path, app.outdir / "_static")
    copy_asset(mathjax / fonts, app.outdir / "_static" / fonts)


def setup(app):
    app.connect("build-finished", copy_mathjax)
