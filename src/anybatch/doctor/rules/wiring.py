"""Rules of the family wiring: which parameters the optimizers have, which are frozen, tied and loaded."""

import anybatch.doctor.rules.wiring_freezing as _freezing
import anybatch.doctor.rules.wiring_optimizers as _optimizers
import anybatch.doctor.rules.wiring_twice as _twice
import anybatch.doctor.rules.wiring_values as _values

_ = _freezing, _optimizers, _twice, _values
