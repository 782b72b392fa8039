"""Draws from distributions whose parameters are learnt, and what was made of their log-probabilities."""

from dataclasses import dataclass

from anybatch.records.lines import Fact, fact


@fact("drawn")
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Fact):
    """A module was given what ``sample()`` drew, without a gradient, from a distribution that has ``rsample()``."""

    root: int = -1  # the number of the root of the module
    module: str = ""  # its name in that root
    distribution: str = ""
    width: int = 1  # the size of the last dim of the draw, 1 if it has no dims
    file: str = ""  # of the user's line that drew
    line: int = 0
    code: str = ""  # that line


@fact("scored")
@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(Fact):
    """The first log-probability with a gradient of one kind of distribution and one width."""

    distribution: str = ""
    width: int = 1  # the size of the last dim of the value, 1 if it has no dims
