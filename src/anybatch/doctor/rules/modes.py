"""Rules of the family modes: training and evaluation, dropout and batch norm."""

from anybatch.doctor.rules import modes_dropout as _dropout
from anybatch.doctor.rules import modes_norms as _norms
from anybatch.doctor.rules import modes_phases as _phases

_ = _dropout, _norms, _phases
