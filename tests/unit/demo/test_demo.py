"""The demonstration: its text, its model, its comparison, its training and its page."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.demo import comparison, corpus, facts, presentation, training, transformer
from anybatch.errors import DoesNotFit
from anybatch.records.plans import Plan
from anybatch.report import frontier
from anybatch.report.svg import Curve, bar_chart, line_chart

SAMPLES = 19


def tiny_model(context: int = 16) -> transformer.ByteTransformer:
    return transformer.ByteTransformer(context=context, width=16, layers=2, heads=2)


@pytest.fixture(scope="module")
def text() -> corpus.SourceText:
    return corpus.read_sources()


@pytest.fixture(scope="module")
def batch(text: corpus.SourceText) -> dict[str, torch.Tensor]:
    return training.first_batch(training.as_tensor(text.train), SAMPLES, 128, 0)


@pytest.fixture(scope="module")
def planned(batch: dict[str, torch.Tensor]) -> Plan:
    return comparison.plan_update(transformer.make_model(0), batch, training.TrainingSettings(updates=2))


@pytest.fixture(scope="module")
def compared(batch: dict[str, torch.Tensor], planned: Plan) -> facts.GradientComparison:
    return comparison.compare_gradients(transformer.make_model(0), batch, plan=planned, rounds=1)


@pytest.fixture
def record(planned: Plan, compared: facts.GradientComparison) -> facts.DemoRecord:
    points = tuple(facts.CurvePoint(0.5 * n, n, None if n == 0 else 5.0 - n, 6.0 - n, 1e4, 2**28) for n in range(3))
    return facts.DemoRecord(
        versions={"anybatch": "1.2.3", "threads": 2},
        text=facts.TextFacts("/usr/lib/<python>", 90, 9000, 10, 1000, 4.5),
        plan=planned,
        comparison=compared,
        training=facts.TrainingCurve((5.0, 4.0), points, 20 * 2**20, 3, False),
        sample='def f(x):\n    return x < 3 and "</pre><script>alert(1)</script>"',
    )


# The text.


def test_the_text_is_the_same_every_time_and_split_by_files(text: corpus.SourceText) -> None:
    assert corpus.read_sources() == text
    assert not set(text.train_files) & set(text.validation_files)
    assert list(text.train_files) == sorted(text.train_files)
    assert len(text.validation_files) == (len(text.train_files) + len(text.validation_files)) // 10
    assert len(text.train) > 10**6
    held_out = (Path(text.root) / text.validation_files[0]).read_bytes().replace(b"\r\n", b"\n")
    assert held_out in text.validation
    assert held_out not in text.train


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path) -> None:
    names = [f"m{n:02}.py" for n in range(12)] + ["a/m.py", "a/b/m.py"]
    for place, order in (("first", names), ("second", names[::-1])):
        for name in order:
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode() + (b"\r\n" if place == "first" else b"\n"))
    first, second = (corpus.read_sources(tmp_path / place) for place in ("first", "second"))
    assert replace(first, root="") == replace(second, root="")


def test_what_is_no_source_of_the_library_is_left_out(tmp_path: Path) -> None:
    for n in range(10):
        (tmp_path / f"m{n}.py").write_text(f"{n}", encoding="utf-8")
    for folder in ("site-packages", "test", "config-3.13-x86_64-linux-gnu", "idlelib"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("no", encoding="utf-8")
    (tmp_path / "_sysconfigdata__linux_.py").write_text("no", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no", encoding="utf-8")
    found = corpus.read_sources(tmp_path)
    assert (found.train, found.validation) == (b"0\n1\n2\n3\n4\n5\n6\n7\n8", b"9")


def test_too_few_files_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got 0 Python files below .*, expected 10 or more: .* --sources"):
        corpus.read_sources(tmp_path)


@given(st.binary(min_size=1, max_size=200))
def test_the_entropy_is_that_of_the_histogram(data: bytes) -> None:
    histogram = torch.bincount(torch.tensor(list(data)), minlength=256).double()
    expected = torch.distributions.Categorical(probs=histogram).entropy().item() / math.log(2)
    assert corpus.unigram_entropy(data) == pytest.approx(expected, abs=1e-9)


# The model.


def test_no_position_sees_what_comes_after_it() -> None:
    model = tiny_model().double()
    before = torch.randint(256, (2, 16))
    for position in range(1, 16):
        after = before.clone()
        after[:, position:] = (after[:, position:] + 1 + torch.randint(255, (2, 16 - position))) % 256
        changed = (model(before) != model(after)).any(-1)
        assert not changed[:, :position].any()
        assert changed[:, position].all()


def test_the_first_prediction_is_close_to_even() -> None:
    model = transformer.make_model(0)
    batch = training.cut_out(torch.randint(256, (2000,)), torch.arange(0, 1800, 100), 128)
    assert transformer.next_byte_loss(model, batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_the_weights_depend_on_the_seed_alone_and_the_random_state_stays() -> None:
    state = torch.get_rng_state()
    first, second, other = (transformer.make_model(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_written_text_is_repeatable_longer_than_the_context_and_printable() -> None:
    model = tiny_model()
    written = transformer.write_text(model, "def ", length=60, seed=3)
    assert written == transformer.write_text(model, "def ", length=60, seed=3)
    assert written != transformer.write_text(model, "def ", length=60, seed=4)
    assert written.startswith("def ")
    # An untrained model draws control bytes, which must not reach a terminal.
    assert all(char.isprintable() or char in "\n\t" for char in written)


# The comparison.


def test_the_gradient_in_pieces_is_the_whole_ones(compared: facts.GradientComparison) -> None:
    micro_batches = math.ceil(SAMPLES / compared.micro_batch_size)
    assert micro_batches > 1
    assert SAMPLES % compared.micro_batch_size or compared.micro_batch_size == 1
    assert compared.bound == 2 * compared.whole.error + 2**-24 * math.sqrt(micro_batches)
    assert compared.split.error <= compared.bound
    assert compared.is_within_bound
    assert compared.float64_difference < 1e-10
    assert compared.loop.error > 1e-3  # the usual loop weighs the short micro-batch too much
    assert not replace(compared, split=compared.loop).is_within_bound


def test_the_whole_batch_does_not_fit_and_what_was_planned_does(
    planned: Plan, compared: facts.GradientComparison
) -> None:
    assert compared.memory_bytes == planned.budget
    assert compared.whole.peak_bytes > 3 * planned.budget
    assert compared.split.peak_bytes + 2 * 4 * compared.parameters <= planned.budget
    assert (compared.whole.micro_batches, compared.split.micro_batches) == (1, planned.micro_batches)


def test_a_quarter_of_what_the_whole_batch_needs_is_what_the_plan_says_it_needs(planned: Plan) -> None:
    assert planned.budget == pytest.approx(planned.whole_bytes / 4, rel=1e-3)


def test_a_plan_for_a_time_is_measured_and_one_for_a_number_of_updates_is_the_same_every_time(planned: Plan) -> None:
    model = transformer.make_model(0)
    few = training.first_batch(torch.randint(256, (10_000,)), 4, model.context, 0)
    measured = comparison.plan_update(model, few, training.TrainingSettings(), 2**23)
    assert not measured.relative_time
    assert measured.peak_bytes <= measured.budget == 2**23
    assert planned.relative_time
    again = [comparison.plan_update(model, few, training.TrainingSettings(updates=1), 2**23) for _ in range(2)]
    assert again[0] == again[1]
    assert all(p.grad is None for p in model.parameters())


def test_too_little_memory_is_said_in_bytes(batch: dict[str, torch.Tensor]) -> None:
    model = transformer.make_model(0)
    with pytest.raises(DoesNotFit) as caught:
        comparison.plan_update(model, batch, training.TrainingSettings(), 2**20)
    assert caught.value.budget == 2**20
    assert caught.value.needed is not None
    assert caught.value.needed > 2**20
    assert all(p.grad is None for p in model.parameters())


def test_training_as_planned_holds_what_was_predicted(text: corpus.SourceText, planned: Plan) -> None:
    model, data = transformer.make_model(0), training.as_tensor(text.train)
    settings = training.TrainingSettings(planned, updates=2, samples=SAMPLES, validations=1, validation_samples=2)
    curve = training.TrainingRun(model, data, data, settings).run()
    assert curve.micro_batches == planned.micro_batches
    assert curve.peak_bytes is not None
    assert planned.peak_bytes <= planned.budget
    # The plan counts the largest micro-batch with the gradients of the others, though the last one may be smaller.
    assert 0.9 * planned.peak_bytes < curve.peak_bytes < 1.0001 * planned.peak_bytes


# Training.


def trained(updates: int, *, stops_at: int | None = None) -> tuple[facts.TrainingCurve, transformer.ByteTransformer]:
    torch.manual_seed(5)
    model = tiny_model()
    data = training.as_tensor(b"def f(x):\n    return x\n" * 50)
    settings = training.TrainingSettings(
        micro_batch_size=4, updates=updates, samples=10, validations=4, validation_samples=6
    )
    run = training.TrainingRun(model, data, data, settings)

    def look(point: facts.CurvePoint) -> None:
        run.is_stopped |= point.updates == stops_at

    return run.run(look), model


def test_training_by_updates_is_repeatable_and_learns() -> None:
    (first, model), (second, again) = trained(60), trained(60)
    assert first.losses == second.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert [point.updates for point in first.points] == [0, 15, 30, 45, 60]
    assert first.points[-1].validation_bits < first.points[0].validation_bits / 2
    assert (len(first.losses), first.micro_batches, first.stopped_early) == (60, 3, False)
    assert first.peak_bytes is not None


def test_training_stops_when_asked_and_keeps_what_it_reached() -> None:
    curve, _ = trained(60, stops_at=15)
    assert curve.stopped_early
    assert len(curve.losses) == 16  # the update that was about to run
    assert curve.points[-1].updates == 16


def test_training_by_time_ends() -> None:
    data = training.as_tensor(b"0123456789" * 100)
    settings = training.TrainingSettings(
        micro_batch_size=4, seconds=0.05, samples=4, validations=2, validation_samples=2
    )
    curve = training.TrainingRun(tiny_model(), data, data, settings).run()
    assert curve.losses
    assert not curve.stopped_early


@given(st.floats(0, 1))
def test_the_learning_rate_is_never_zero_nor_above_its_highest(fraction: float) -> None:
    assert 0.02 <= training.rate_factor(fraction) <= 1


@given(st.integers(2, 50), st.integers(1, 20))
def test_batches_lie_within_the_text(extra: int, context: int) -> None:
    data = torch.arange(context + extra) % 256
    batch = training.random_batch(data, 8, context, torch.Generator().manual_seed(0))
    assert batch["x"].shape == batch["y"].shape == (8, context)
    assert torch.equal(batch["y"], (batch["x"] + 1) % 256)


# The page and the record.


def test_the_page_is_the_same_for_the_same_record_and_loads_nothing(record: facts.DemoRecord) -> None:
    page = presentation.demo_page(record)
    assert presentation.demo_page(record) == page
    assert page.count("<figure") == 4
    assert page.count("<script>") == 1  # the page's own
    assert not re.search(r"<script[^>]|<(link|img|iframe|object|embed)\b|@import|(src|href)\s*=\s*[\"'](?!#)", page)
    assert not re.search(r"url\((?!#)", page)
    assert "&lt;/pre&gt;&lt;script&gt;" in page
    assert "/usr/lib/&lt;python&gt;" in page


def test_the_page_says_what_the_terminal_says(record: facts.DemoRecord) -> None:
    page = html.unescape(presentation.demo_page(record))
    for heading in ("The plan", "The gradient of one logical batch", "Training", "What the model wrote", "This run"):
        assert f"<h2>{heading}</h2>" in page
    cells = [cell for row in presentation.comparison_table(record.comparison).rows for cell in row]
    cells += [cell for point in record.training.points for cell in presentation.curve_row(point)]
    assert [cell for cell in cells if f"<td>{cell}</td>" not in page] == []
    for said in (
        "is the whole batch's, up to rounding",
        f"{frontier.summary_of(record.plan)}.",
        presentation.outcome_text(record.text, record.plan, record.training),
        record.sample,
    ):
        assert said in page
    bad = replace(record.comparison, split=record.comparison.loop)
    assert "is NOT the whole batch's" in html.unescape(presentation.demo_page(replace(record, comparison=bad)))
    assert "What the model wrote" not in presentation.demo_page(replace(record, sample=""))


def test_no_id_comes_twice(record: facts.DemoRecord) -> None:
    ids = re.findall(r'\sid="([^"]+)"', presentation.demo_page(record))
    assert len(ids) == len(set(ids))


def test_the_record_goes_to_json_and_back(record: facts.DemoRecord) -> None:
    values = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert values["comparison"]["micro_batch_size"] == record.plan.micro_batch_size
    assert Plan.from_dict(values["plan"]) == record.plan


def test_what_did_not_happen_is_not_claimed(record: facts.DemoRecord) -> None:
    fits = replace(record.comparison, memory_bytes=2**40)
    notes = dict(presentation.comparison_notes(fits))
    assert "of the whole batch fit into" in notes["tensors"]
    even = replace(record.comparison, samples=2 * record.comparison.micro_batch_size)
    assert even.loop.name not in dict(presentation.comparison_notes(even))
    times = [dict(presentation.comparison_notes(replace(even, optimized=what)))["time"] for what in ("", "recompute 2")]
    assert ["spends time" in time for time in times] == [False, True]
    bad = replace(record.comparison, split=record.comparison.loop)
    assert "NOT within" in dict(presentation.comparison_notes(bad))["error"]
    stopped = replace(record.training, stopped_early=True, peak_bytes=None)
    assert presentation.outcome_text(record.text, record.plan, stopped).startswith("Stopped early.")


def test_charts_are_plain_svg() -> None:
    line = line_chart([Curve("a", [0, 1], [1.0, 2.0])], x_label="x", y_label="y")
    bars = bar_chart([("a", 1e-7), ("b", 1e-2)], label="z", level=("l", 1e-5), is_logarithmic=True)
    for svg in (line, bars):
        assert svg.startswith("<svg")
        assert svg.rstrip().endswith("</svg>")


def test_bars_are_as_long_as_their_values_and_dots_as_far_as_their_powers() -> None:
    values = [("small", 10.0), ("large", 1000.0)]
    widths = [float(width) for width in re.findall(r'class="bar"[^>]* width="([\d.]+)"', bar_chart(values, label="z"))]
    assert widths[1] == pytest.approx(100 * widths[0], rel=0.05)
    # A gradient may be bitwise equal: its error of zero is left of all others.
    dots = bar_chart([("none", 0.0), *values], label="z", level=("l", 100.0), is_logarithmic=True)
    none, small, large = (float(x) for x in re.findall(r'class="dot c0" d="M([\d.]+) ', dots))
    (level,) = (float(x) for x in re.findall(r'class="level" d="M([\d.]+) ', dots))
    assert none < small < level < large
    assert large - level == pytest.approx(level - small, abs=0.2)
