"""A doctor that the callback of a trainer attaches at the beginning of a run, and that reports at its end."""

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.errors import BatchError

if TYPE_CHECKING:
    from rich.console import Console


class AttachedDoctor:
    """The base class of the doctor's callbacks.

    Args:
        output: a file for the HTML page; ``None`` for none.
        console: where to print the report; ``None`` for standard output.
        options: further arguments of ``anybatch.Doctor``, such as ``path``, ``every`` and ``on_finding``.

    Attributes:
        doctor: the doctor of the current or last run; ``None`` before the first.

    Raises:
        BatchError: the folder of ``output`` does not exist.

    Example:
        >>> import torch
        >>> watching = AttachedDoctor()
        >>> watching.begin(torch.nn.Linear(2, 1))
        >>> watching.end(is_reporting=False)
        >>> watching.doctor.findings
        ()
    """

    def __init__(self, *, output: str | Path | None = None, console: "Console | None" = None, **options: Any) -> None:
        signature(Doctor).bind(**options)  # a wrong one is refused at once, not when the training begins
        self._output = None if output is None else Path(output)
        if self._output is not None and not self._output.parent.is_dir():
            raise BatchError(f"output={str(output)!r}; expected a file in a folder that exists")
        self._console, self._options = console, options
        self.doctor: Doctor | None = None

    def begin(self, *subjects: Any) -> None:
        """Attaches a new doctor to models and optimizers."""
        if self.doctor is not None:
            self.doctor.detach(ask=False)
        self.doctor = Doctor(*subjects, **self._options)
        self.doctor.attach()

    def end(self, *, error: BaseException | None = None, is_reporting: bool = True) -> None:
        """Detaches the doctor, which puts its questions, and reports; does nothing before ``begin``.

        Args:
            error: the exception that ended the run, ``None`` if there was none.
            is_reporting: whether to print the report and write the page.
        """
        if self.doctor is None:
            return
        self.doctor.__exit__(None if error is None else type(error), error, None)
        if not is_reporting:
            return
        from rich.console import Console

        from anybatch.report.diagnosis_terminal import show

        run = self.doctor.run
        found = diagnosis(run)
        show(found, run, self._console or Console())
        if self._output is not None:
            from anybatch.report import diagnosis_page

            self._output.write_text(diagnosis_page.page(found, run), encoding="utf-8")
