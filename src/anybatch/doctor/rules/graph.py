"""Rules of the family graph: what a loss reaches, what it should reach, and what it should not."""

import anybatch.doctor.rules.graph_cuts as _cuts
import anybatch.doctor.rules.graph_leaks as _leaks
import anybatch.doctor.rules.graph_losses as _losses

_ = _cuts, _leaks, _losses
