"""Small scripts with one fault each, in different styles, and the lines that mend them."""

from fix_scripts import graphs, settings, wiring

FAULTY: dict[str, tuple[str, str, str]] = {**wiring.FAULTY, **graphs.FAULTY, **settings.FAULTY}
"""For a name of a case that of the finding, the script, and a line that the patch brings in."""
