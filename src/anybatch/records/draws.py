"""Samples drawn from distributions with learned parameters, and the use of their log-probabilities."""

from anybatch.records.lines import Fact, fact


@fact("drawn")
class Drawn(Fact):
    """A module's input was drawn with ``sample()``, which has no gradient, although ``rsample()`` exists."""

    root: int = -1  # the number of the module's root
    module: str = ""  # its qualified name in that root
    distribution: str = ""  # the name of the distribution's class
    width: int = 1  # the size of the last dim of the draw; 1 if it has no dims
    file: str = ""  # file and line of the user's call of ``sample()``
    line: int = 0
    code: str = ""  # the text of that line


@fact("scored")
class Scored(Fact):
    """``log_prob`` gave a value with a gradient: recorded once per class of distribution and width."""

    distribution: str = ""  # the name of the distribution's class
    width: int = 1  # the size of the last dim of the value; 1 if it has no dims
