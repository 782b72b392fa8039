"""What a script prints: seen without a change of the stream, and kept in bounded memory."""

import contextlib
import inspect
import io
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.recording.printing import numbers_in
from anybatch.records.lines import from_line, to_line
from anybatch.records.lossfacts import Printed

say = print  # as a script does, which is what this is about


def seen(script: Callable[[], None]) -> list[Printed]:
    with Doctor() as doctor:
        script()
    assert doctor.failure == ""
    return list(doctor.run.of(Printed))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Epoch: 025, Loss: 1.29e-1, Test: 0.3625", {"Epoch": 25, "Loss": 0.129, "Test": 0.3625}),
        ("[10/100] top5 acc=91.5 %", {"top5 acc": 0.915}),
        ("R@1: 0.5, R@5: .75", {"R@1": 0.5, "R@5": 0.75}),
        ("-> return -1.5", {"return": -1.5}),
        ("v1.2.3 of 2024-01-02", {"v1.2.3 of": 2024}),
        ("acc nan", {}),
        ("0.5", {}),
    ],
)
def test_numbers_are_known_by_the_words_before_them(text: str, numbers: dict[str, float]) -> None:
    assert dict(numbers_in(text)) == numbers


def test_the_numbers_of_a_line_are_a_series_over_the_steps() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def script() -> None:
        for epoch in range(3):
            for _ in range(2):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            say("epoch", epoch, "test acc", epoch / 4, sep=" ")

    one = {found.label: found for found in seen(script)}["test acc"]
    assert (one.steps, one.values) == ((2, 4, 6), (0.0, 0.25, 0.5))
    assert one.file == __file__
    assert from_line(to_line(one)) == one


def test_many_lines_are_thinned_and_the_last_one_is_kept() -> None:
    def script() -> None:
        for number in range(10_000):
            say(f"acc {number}")

    (one,) = seen(script)
    assert len(one.values) <= 65
    assert (one.values[0], one.values[-1]) == (0, 9_999)


def test_the_stream_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    stream, own = sys.stdout, sys.stdout.write
    signature, text = inspect.signature(own), own.__doc__
    with Doctor():
        assert sys.stdout is stream
        assert (inspect.signature(sys.stdout.write).parameters.keys(), sys.stdout.write.__doc__) == (
            signature.parameters.keys(), text,
        )  # fmt: skip
        assert sys.stdout.write("one 1\ntwo") == 9
        with contextlib.redirect_stdout(io.StringIO()) as other:
            say("elsewhere 3")
        with pytest.raises(TypeError):
            sys.stdout.write(3)  # type: ignore[arg-type]
    assert "write" not in vars(stream)
    assert (capsys.readouterr().out, other.getvalue()) == ("one 1\ntwo", "elsewhere 3\n")


def test_what_another_one_puts_above_stays(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stdout
    doctor = Doctor()
    doctor.attach()
    own = stream.write
    stream.write = lambda text: own(text.upper())  # type: ignore[method-assign]
    doctor.detach()
    assert "write" in vars(stream)
    say("still there 1")
    del stream.write
    assert capsys.readouterr().out == "STILL THERE 1\n"


def test_threads_do_not_mix_their_lines() -> None:
    def script() -> None:
        sys.stdout.write("mine ")
        other = threading.Thread(target=lambda: say("other 2"))
        other.start()
        other.join()
        sys.stdout.write("1\n")

    assert {(one.label, one.values) for one in seen(script)} == {("mine", (1.0,)), ("other", (2.0,))}


def test_two_doctors_see_the_same() -> None:
    with Doctor() as outer:
        inner = seen(lambda: say("acc 0.5"))
    assert "write" not in vars(sys.stdout)
    assert [one.values for one in outer.run.of(Printed)] == [(0.5,)]
    assert inner == [] or inner[0].values == (0.5,)
