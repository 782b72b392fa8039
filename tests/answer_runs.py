"""Answers of questions to copies, as a run's record holds them."""

from collections.abc import Mapping
from typing import Any

from anybatch.records.lossfacts import Probed
from number_runs import Training

EVIDENCE: dict[str, dict[str, Any]] = {
    "constant derivative": {"op": "add"},
    "unused update": {"tensors": 4},
    "frozen copy": {"online": 0, "steps": 60},
    "slow copy": {"online": 0, "way": 0.02, "steps": 200, "loss": 1.4, "online_loss": 0.1},
    "copied buffers": {"online": 0, "buffers": 2, "first": "1.running_mean"},
    "own negative": {"op": "min"},
    "apart": {"share": 0.7, "masks": 90},
    "edges": {"op": "index_add", "nodes": 200, "graphs": 20, "last": 9, "edges": 400},
    "degrees": {"largest": 90, "nodes": 600},
    "easiest": {"op": "topk", "inactive": 1.0, "left": 0.1},
    "resumed": {"key": "sched", "loaded": 0.01, "highest": 0.1},
    "redrawn": {"optimizer": 0, "times": 9, "every": 40},
    "own state": {"cls": "Net", "tensors": 6},
    "written in evaluation": {"names": ["queue"], "count": 1},
    "evaluated inputs": {"mean": 0.0, "std": 1.0, "mean_evaluated": 120.0, "std_evaluated": 70.0},
    "sampling start": {"times": 3.0, "level": 59.0},
    "inputs alike": {"value": 0.0, "calls": 12, "symbols": False},
    "unread field": {"name": "done", "kind": "end"},
    "labels": {"samples": 300, "held_out": 2.31, "guess": 2.3},
    "itself": {"op": "kl_div"},
    "sums": {"rows": 32, "ratio": 4.0},
    "rows": {"rows": 32, "op": "view", "loss": 0.8, "permuted": 0.9},
    "plateau": {"mode": "min", "name": "accuracy", "first": 0.4, "last": 0.9, "rate": 1e-5, "rate_first": 0.1},
    "method backward": {"cls": "Reverse"},
    "function gradient": {"cls": "Scaled"},
    "softmax axis": {"dim": 1, "dims": 4, "summed": 3},
    "hidden tokens": {"op": "masked_fill"},
    "rewarded": {"slope": 0.4, "products": 1},
    "helped": {"critic": 1, "optimizer": 0, "of_critic": 0.4, "of_generator": 0.5},
    "close copy": {"online": 0, "share": 0.97},
    "shown": {"op": "cross_entropy", "share": 0.85},
    "target given": {"place": 29, "of": 30},
    "axes": {"op": "reshape", "before": [24, 24, 3], "after": [3, 24, 24]},
    "padding": {"share": 0.4, "value": 0, "tokens": 4000},
    "class weights": {"most_targets": 60, "most_weight": 8, "least_targets": 4, "least_weight": 1},
    "rates": {"op": "softplus"},
    "several classes": {"rows": 64, "least": 0, "most": 4},
    "misplaced": {"op": "sub"},
    "unlikely": {"op": "mean"},
    "far preferred": {"op": "sub", "near_loss": 0.0, "far": -2e5},
    "forgotten": {"steps": 12},
    "not carried": {"op": "gru_cell", "steps": 7, "zero": False},
    "quantised": {"op": "argmin"},
    "small value": {"critic": 1, "optimizer": 0},
    "evaluated scores": {"function": "cross_entropy"},
    "padding read": {"moved": 0.3, "spread": 0.1, "share": 0.6, "tokens": 60},
    "scaled apart": {"rows": 400, "columns": 4},
    "drawn targets": {"op": "mse_loss"},
    "indices": {"op": "argmax"},
    "related inputs": {"collapsed": True, "loss": -0.998, "others": -0.994, "rows": 64, "optimizer": 0},
    "drowned": {"share": 0.001, "rows": 64},
    "weighed away": {"op": "mul", "loss": 1.5, "there": 0.0, "far": 50.0},
    "weighed late": {"by": "mse_loss", "entries": 32, "rows": 32},
    "mixed apart": {"share": 0.8, "rest": 0.2, "heavy": 1.9, "light": 0.7},
    "repeated rows": {"times": 5, "rows": 500},
    "rounded": {"field": "stamp", "spacing": 128.0, "size": 1.7e9, "ties": 0.2},
    "reseeded": {"generator": "np.random", "value": "self.seed", "times": 12},
    "turned list": {"name": "returns"},
    "turned volume": {"loss": -4.2, "turned": 7.8},
    "turned quantiles": {"quantiles": [0.9, 0.5, 0.1], "first": 0.9, "last": 0.1},
    "flat scores": {"op": "cross_entropy", "scale": 0.1, "guess": 5.5, "best": 5.4, "width": 256},
    "evaluated apart": {"place": 9, "of": 9, "rows": 3000, "trained": 0.8, "evaluated": 0.05, "telling": 7},
    "columns": {"place": 9, "of": 9, "rows": 3000, "trained": 0.8, "evaluated": 0.05},
    "tokens": {"apart": 0.3, "alike": 0.02, "symbols": 35},
    "flat derivative": {"rows": 128},
    "far ahead": {"op": "cross_entropy", "shift": 2},
    "far positives": {"share": 0.9, "rows": 64},
    "torn edges": {"edges": 400, "seen": "make a list in the order of its nodes"},
    "worse preferred": {"op": "binary_cross_entropy_with_logits", "share": 1.0, "score": 4.0},
    "mirrored": {"pairs": 40, "across": "width"},
    "past sums": {"op": "mul", "discount": 0.98},
    "only agreeing": {"op": "kl_div", "optimizer": 0},
    "passed": {"entries": 2, "of": 4},
    "uncounted": {"number": 3, "share": 0.2, "classes": 4, "by": "mask"},
    "end uncounted": {"number": 2, "rows": 16},
    "signs": {"op": "cosine_embedding_loss", "others": [0.0], "share": 0.5},
    "punished": {"kind": "probability of", "terms": 1, "beside": 0},
    "layers": {"layers": ["8→16", "16→16", "16→10"]},
    "straight": {"layers": ["layers.0", "layers.1"]},
    "prior": {"initial": 14.2, "prior": 2.3},
    "one batch": {"before": 2.3, "after": 2.3, "steps": 40},
    "overlap": {"apart": 30, "pairs": 32},
    "outweighed": {"loss": 0.32, "alone": 0.14, "by": 39, "rows": 64},
    "unmoved": {"steps": 12},
    "unseen errors": {"share": 0.6, "rows": 32, "shape": [32, 4], "turned": 28, "boxes": True},
    "mispaired": {"rows": 250, "given": "i ^ 1", "other": "(i + n // 2) % n", "by": "inputs"},
    "worst kept": {"name": "val_acc", "keeps": "lowest"},
    "collate": {"collate": "pad", "samples": 13, "moved": 12, "apart": 7},
    "start": {"loss": 3.2, "guess": 0.69, "smaller": 0.7, "names": ["user.weight", "item.weight"], "tenth": 0.1},
    "blank": {"blank": 0, "blanks": 12, "too_long": 0, "rows": 16},
}


def asked(probe: str, answer: str, seen: Mapping[str, Any] | None = None, **values: Any) -> Training:
    """A training of which a question was asked, with more or other evidence."""
    evidence = EVIDENCE[probe] | dict(seen or {})
    one = Probed(probe=probe, answer=answer, evidence=evidence, file="train.py", line=7, **values)
    return Training(after=(one,))


def flat(step: int) -> float:
    """A loss that stays at that of a guess among ten."""
    return 2.3 + 0.01 * (step % 3)
