"""Display of records in notebooks: as a page of the report."""

import sys
from typing import Any

from anybatch.records.reading import Plain


def page_of(record: Any) -> str:
    """The HTML of a record's page."""
    from anybatch.report.notebook import html_of

    return html_of(record)


class Shown(Plain):
    """A record that a notebook shows as a page; everywhere else it is shown as text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return page_of(self)

    def show(self) -> None:
        """Shows the record: as a page in a notebook, on standard output elsewhere."""
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        else:
            sys.stdout.write(f"{self}\n")
