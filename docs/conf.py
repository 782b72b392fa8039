"""Sphinx reads this: `scripts/docs`, or `sphinx-build -W docs docs/_build/html`."""

import os
import re
from html import escape
from typing import Any

import anybatch

project = "anybatch"
author = "anybatch contributors"
copyright = author
release = version = anybatch.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
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
pygments_dark_style = (
    "github-dark"  # the default underlines the names of modules, as if they were links
)
html_title = f"anybatch {release}"
html_baseurl = os.environ.get(
    "DOCS_URL", ""
)  # where the folder of this version is served, for links from elsewhere
html_static_path = ["static"]
html_css_files = ["anybatch.css"]
html_favicon = "static/favicon.svg"
html_theme_options = {
    "light_logo": "logo-light.svg",
    "dark_logo": "logo-dark.svg",
    "sidebar_hide_name": True,
}
if tags.has("check"):  # noqa: F821 - of Sphinx. The theme makes a tree of all pages on each: half of the time.
    html_theme, html_theme_options = "basic", {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_show_sphinx = False
html_copy_source = False

DESCRIPTION = (
    "Exact gradient accumulation for PyTorch within a memory budget, proved on your own step; and a doctor that says "
    "why a model does not learn."
)
_LITERAL = re.compile(r"(``.*?``)")


def _keep_bars(
    app: Any, what: str, name: str, object_: Any, options: Any, lines: list[str]
) -> None:
    """Bars in a docstring are norms, as in |G|^2, and no substitutions of reStructuredText."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = _LITERAL.split(line)
            lines[number] = "".join(
                part if part.startswith("``") else part.replace("|", r"\|") for part in parts
            )


def _add_card(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What a link to the page looks like where it is shared; a picture has to be named by its whole address."""
    address = f"{html_baseurl.rstrip('/')}/" if html_baseurl else ""
    facts = {
        "og:type": "website",
        "og:site_name": "anybatch",
        "og:title": re.sub(r"<[^>]+>", "", context.get("title", "anybatch")),
        "og:description": DESCRIPTION,
        "og:image": f"{address}_static/card.png",
        "og:image:alt": "anybatch: train any batch in any memory, and know why it does not learn",
        "twitter:card": "summary_large_image",
    }
    tags = "".join(
        f'<meta property="{name}" content="{escape(text)}">' for name, text in facts.items() if text
    )
    context["metatags"] = (
        f'{context.get("metatags", "")}<meta name="description" content="{DESCRIPTION}">{tags}'
    )


def setup(app: Any) -> None:
    """Registers what is done to docstrings, and to the head of each page."""
    app.connect("autodoc-process-docstring", _keep_bars)
    app.connect("html-page-context", _add_card)
