"""A plan that is made by hand, for the tests of what is shown of plans."""

from anybatch.records.plans import ModuleShare, Plan, PlanRow

MIB = 2**20

WHOLE = PlanRow(64, 1, peak_bytes=40 * MIB, seconds=0.050)
HALVES = PlanRow(32, 2, peak_bytes=30 * MIB, seconds=0.052)
CHOSEN = PlanRow(32, 2, recompute=("h.0", "h.1", "h.2"), peak_bytes=23 * MIB, seconds=0.058)
QUARTERS = PlanRow(16, 4, peak_bytes=20 * MIB, seconds=0.070)
EIGHTHS = PlanRow(
    8, 8, offload=("h.4",), head="head", loss_chunks=4, peak_bytes=12 * MIB, seconds=0.11, confidence="estimated"
)
SMALLEST = PlanRow(4, 16, recompute=("h.0",), peak_bytes=10 * MIB, confidence="estimated")

PLAN = Plan(
    CHOSEN,
    (WHOLE, HALVES, CHOSEN, QUARTERS, EIGHTHS, SMALLEST),
    budget=24 * MIB,
    samples=64,
    device="cpu",
    whole_bytes=40 * MIB,
    smallest_bytes=10 * MIB,
    at_peak={"parameters": 4 * MIB, "activations": 12 * MIB, "gradients": 4 * MIB, "buffers": 0, "inputs": 3 * MIB},
    binding="The peak is in the backward of h.1, where the activations of 32 samples are kept.",
    modules=tuple(ModuleShare(f"h.{n}", (n + 1) * MIB, MIB, 0.001 * (n + 1)) for n in range(10)),
    shapes={"batch['x']": (8,)},
    fingerprint={"model": "<b>&", "torch": "2.13.0"},
)
