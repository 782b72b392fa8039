"""Sphinx reads this: `scripts/docs`, or `sphinx-build -W docs docs/_build/html`."""

import re
from typing import Any

import anybatch

project = "anybatch"
author = "anybatch contributors"
copyright = author
release = version = anybatch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes that are properties too are described once

html_theme = "furo"
html_title = f"anybatch {release}"
html_static_path = ["static"]
html_css_files = ["anybatch.css"]
html_favicon = "static/favicon.svg"
html_theme_options = {
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
    "sidebar_hide_name": True,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_show_sphinx = False
html_copy_source = False

_LITERAL = re.compile(r"(``.*?``)")


def _keep_bars(app: Any, what: str, name: str, object_: Any, options: Any, lines: list[str]) -> None:
    """Bars in a docstring are norms, as in |G|^2, and no substitutions of reStructuredText."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = _LITERAL.split(line)
            lines[number] = "".join(part if part.startswith("``") else part.replace("|", r"\|") for part in parts)


def setup(app: Any) -> None:
    """Registers what is done to docstrings."""
    app.connect("autodoc-process-docstring", _keep_bars)
