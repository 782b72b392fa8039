"""What a notebook shows of a record: its page, made by the report when it is asked for."""

import sys
from typing import Any

from anybatch.records.plainvalues import Plain


def page_of(record: Any) -> str | None:
    """The markup of a record's page; ``None`` if jinja2 is not installed, so that a notebook shows its text."""
    from anybatch.report.notebook import html_of

    return html_of(record)


class Shown(Plain):
    """A record that a notebook shows as a page, where jinja2 is installed, and as text everywhere else."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return page_of(self)

    def show(self) -> None:
        """Shows it: as a page in a notebook, as text elsewhere."""
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        else:
            sys.stdout.write(f"{self}\n")
