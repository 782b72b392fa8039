"""Rules of the family accumulation: several backwards for one step."""

from anybatch.doctor.rules import accumulation_weights as _weights
from anybatch.doctor.rules import accumulation_windows as _windows

_ = _weights, _windows
