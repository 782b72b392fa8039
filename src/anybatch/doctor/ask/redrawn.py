"""Are the weights of a net drawn anew again and again while its optimizer goes on?"""

from collections.abc import Iterator
from itertools import pairwise

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.trials import told
from anybatch.doctor.samples.redraws import related
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST, _RARE = 3, 5
"""The least times, and the least steps between them: small weights at a high rate become others in one step."""


def about_redrawn(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether weights become others between two steps of one optimizer, which were never there before."""
    for number, one in kept.redraws.optimizers.items():
        steps, came = [step for step, _ in one.drawn], [values for _, values in one.drawn]
        put_back = any(related(old, new) for place, new in enumerate(came) for old in came[:place])
        is_rare = all(later - earlier >= _RARE for earlier, later in pairwise(steps))
        if len(steps) >= _LEAST and is_rare and not put_back:
            every = (steps[-1] - steps[0]) // (len(steps) - 1)
            yield told("redrawn", optimizer=number, times=len(steps), every=every)
