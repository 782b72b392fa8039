"""What a notebook shows of a record: its page, made by the report when it is asked for."""

import sys


class Shown:
    """A record that a notebook shows as a page, where jinja2 is installed, and as text everywhere else."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        from anybatch.report.notebook import html_of

        return html_of(self)

    def show(self) -> None:
        """Shows it: as a page in a notebook, as text elsewhere."""
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        else:
            sys.stdout.write(f"{self}\n")
