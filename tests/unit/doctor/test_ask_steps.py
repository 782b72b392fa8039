"""Of what a loss is made, by the operations of a step."""

import operator

import pytest
import torch

from anybatch.doctor.ask.steps import slots_of
from anybatch.doctor.ask.tape import Loss, Operation, Slot, Tape


def tape_of(*operations: Operation) -> Tape:
    tape = Tape()
    tape.operations.extend(operations)
    return tape


LOSS = Slot(0)
BATCH = Slot(1)
VALUE = Slot(2)


def test_a_read_row_is_no_writing_to_the_batch() -> None:
    """The name of ``__getitem__`` ends like one that writes; a row read is no part of what is read."""
    index, row = Slot(3), Slot(4)
    tape = tape_of(
        Operation("__getitem__", torch.Tensor.__getitem__, (BATCH, index), {}, (row,)),
        Operation("sum", torch.sum, (BATCH,), {}, (LOSS,)),
    )
    assert slots_of(tape, Loss(LOSS, 2, "", 0)) == {LOSS, BATCH}


@pytest.mark.parametrize(
    "written",
    [
        Operation("__setitem__", torch.Tensor.__setitem__, (BATCH, 0, VALUE), {}),
        Operation("add_", torch.Tensor.add_, (BATCH, VALUE), {}, (BATCH,)),
        Operation("mul", torch.mul, (VALUE, 2), {"out": BATCH}, (BATCH,)),
        Operation("__iadd__", operator.iadd, (BATCH, VALUE), {}, (BATCH,)),
    ],
    ids=lambda one: one.name,
)
def test_what_was_written_to_a_tensor_goes_into_it(written: Operation) -> None:
    tape = tape_of(written, Operation("sum", torch.sum, (BATCH,), {}, (LOSS,)))
    assert VALUE in slots_of(tape, Loss(LOSS, 2, "", 0))
