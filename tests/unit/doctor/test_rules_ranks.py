"""Rules of the family ranks: each fires on a run that has the fault, and is quiet on one that only looks like it."""

from typing import Any

from anybatch.records.lossfacts import Replicas
from rule_runs import RunBuilder, findings, simple


def spread(**facts: Any) -> RunBuilder:
    built = simple()
    entries: dict[str, Any] = {"world": 2, "wrapper": "DistributedDataParallel"}
    built.add(Replicas(**entries | facts))
    return built


def test_ddp_bypassed_fires_with_the_name_of_the_inner_model() -> None:
    (one,) = findings(spread(bypassed=("model",)), "DDP_BYPASSED")
    assert (one.place.module, one.place.line, one.severity) == ("model", 30, "error")
    (alone,) = findings(spread(bypassed=("model",), world=1), "DDP_BYPASSED")
    assert alone.severity == "warning"


def test_ddp_bypassed_is_quiet_where_the_wrapper_is_called() -> None:
    assert not findings(simple(), "DDP_BYPASSED")
    assert not findings(spread(), "DDP_BYPASSED")


def test_replicas_differ_fires_with_parameters() -> None:
    (one,) = findings(spread(differ=("norm.weight",)), "REPLICAS_DIFFER")
    assert one.place.parameters == ("norm.weight",)


def test_replicas_differ_is_quiet_on_shards() -> None:
    assert not findings(spread(differ=("norm.weight",), wrapper="FSDP"), "REPLICAS_DIFFER")
    assert not findings(spread(), "REPLICAS_DIFFER")
