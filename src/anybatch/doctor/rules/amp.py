"""Rules of the family amp: scaling of losses, and clipping of gradients."""

from anybatch.doctor.rules import amp_clipping as _clipping
from anybatch.doctor.rules import amp_scaling as _scaling

_ = _clipping, _scaling
