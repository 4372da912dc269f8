# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of the site, which ``make docs`` writes to build/site without network.

Sphinx reads from the root of the repository, so that a link to ``../benchmarks/README.md`` leads to the same
page on the site, in an editor and on a forge. Notebooks show their stored outputs. Only the sample report is
made each time, which takes half a minute.
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

logging.getLogger("arviz").setLevel(logging.WARNING)  # silence its list of backends

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "formulas",
    "forms",
    "names",
    "sample_report",
    "search_words",
    "signatures",
    "summaries",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**.rst",
    "tutorials/*.ipynb",
    "benchmarks/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
]
exclude_patterns = [".*", "build", "dist", "ebmpp", "tests", "demo", "run", "runs", "**/.ipynb_checkpoints"]

# -- sources --------------------------------------------------------------------------------

nb_execution_mode = "off"  # tests/test_tutorials.py compares stored outputs with new ones
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 4  # links such as [text](page.md#a-heading), as on forges
nitpicky = True  # a broken reference is an error

# -- the reference -------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autosummary_generate = False
add_module_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

# -- appearance --------------------------------------------------------------------------------

html_theme = "furo"
html_theme_options = {
    "source_view_link": f"{_PROJECT['urls']['Source']}/blob/main/{{filename}}",
    "source_edit_link": f"{_PROJECT['urls']['Source']}/edit/main/{{filename}}",
}
html_title = f"ebmpp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # an index.html at the root that redirects to docs/index
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
templates_path = []
