"""Settings of Sphinx, which makes the site: `sphinx-build -W docs build/docs`.
"""

import os
import sys

from docutils import nodes

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import accumgrad  # noqa: E402

project = "accumgrad"
author = "The accumgrad authors"
project_copyright = author
version = release = accumgrad.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# What stands in single backticks is code.
default_role = "code"
html_theme = "furo"
html_title = project
# Furo's own has no red and green for diffs.
pygments_style = "default"
html_show_sourcelink = False

# The docstrings tell types with their shapes and units.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False


def setup(app):
    """Sphinx calls this."""
    app.connect("doctree-read", _drop_headers_of_diffs)


def _drop_headers_of_diffs(app, doctree):
    # `literalinclude` with `diff` heads them with the files' absolute paths.
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.rawsource.split("\n", 2)[2]
            block.rawsource = text
            block.children = [nodes.Text(text)]
