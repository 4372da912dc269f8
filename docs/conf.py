# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The site: ``make docs`` writes it to build/site, without network.

Sphinx reads from the root of the repository, so that a link to ``../benchmarks/README.md`` leads to the same
page on the site, in an editor and on a forge. Notebooks show the outputs they are stored with.
"""

import logging
from pathlib import Path
import sys
import tomllib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "ebmpp"
author = "Contributors to the ebmpp Project"
copyright = author  # noqa: A001
version = release = _PROJECT["version"]

logging.getLogger("arviz").setLevel(logging.WARNING)  # which backends it finds is no news of ours

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "formulas", "names", "signatures"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**.rst",
    "tutorials/*.ipynb",
    "benchmarks/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "build", "dist", "ebmpp", "tests", "demo", "run", "runs", "**/.ipynb_checkpoints"]

# -- what is read --------------------------------------------------------------------------------

nb_execution_mode = "off"  # tests/test_tutorials.py sees to it that outputs are stored
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # [text](page.md#a-heading), as forges make them
nitpicky = True  # a reference that leads nowhere is an error

# -- the reference -------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autosummary_generate = False
add_module_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

# -- how it looks --------------------------------------------------------------------------------

html_theme = "furo"
html_title = "ebmpp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # an index.html that leads from the root to this one
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
templates_path = []
