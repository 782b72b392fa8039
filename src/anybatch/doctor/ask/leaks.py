"""Do the samples of a batch mix, does an output depend on later inputs, is the input ignored, its padding read?

One row (or everything after one position) of the input is replaced by values of another row. What changes in the
output beyond that row depends on it; for real inputs a backward confirms it. The first operation whose result has
changed beyond the row is the one that mixes. Norm layers are in evaluation mode and dropout is off.
"""

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from anybatch.doctor.ask.trials import FAILURES, Inputs, Operation, Operations, Trial, Unknown, tensors, told
from anybatch.doctor.ask.weighing import padding_of
from anybatch.doctor.samples.losscalls import tokens_of
from anybatch.records.events import Epoch, Forward
from anybatch.records.lossfacts import Evaluated, LossCall, Probed
from anybatch.records.runs import Run

_MOVING = frozenset({"view", "reshape", "flatten", "unflatten", "transpose", "permute", "swapaxes", "view_as", "t"})
_ALONG = frozenset({"softmax", "log_softmax", "normalize", "layer_norm", "group_norm", "rms_norm", "cumsum", "softmin"})
_OVER_TIME = (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU, torch.nn.MultiheadAttention)
_LOOKING_UP = frozenset({"embedding", "__getitem__"})
_WITHOUT_VALUES = ("empty", "new_empty")
_FILLER = 1e4  # what a mask fills in is larger
_TOLERANCE = 1e-5  # of the largest output: kernels may take another order of summation for another batch


def mixing(trial: Trial, run: Run, root: int) -> Probed:
    """Whether an output of one row depends on another row of the input."""
    inputs = trial.few_rows(1 if _time_is_first(trial, run, root) else 0)
    rows = inputs.rows
    if rows < 2:
        raise Unknown("the last input has one row")
    _refuse_relations(trial, inputs)
    row, other = 1, 0
    changed = _with_row(inputs, row, other)
    before = _repeated(trial, inputs)
    after = trial.forward(changed)
    verdict = _verdict(before, after, row, rows)
    is_square = not verdict and _is_square(trial, run, root)
    if is_square:  # fewer rows are fewer places for it, and what it gives is of the other axis
        inputs, rows = trial.inputs, trial.inputs.rows
        row = rows - 1  # what comes last is not forgotten
        changed = _with_row(inputs, row, other)
        before, after = _repeated(trial, inputs), trial.forward(changed)
        verdict = _verdict(before, after, row, rows)
    if not verdict:
        raise Unknown("no output has a row for each sample")
    if all(verdict):
        return told("batch", root=root, answer="no", rows=rows)
    (_, first), (_, second) = trial.operations(inputs), trial.operations(changed)
    guilty = first_of(first, second, lambda one, two: _confined(one, two, row, rows) is False)
    op = guilty.name if guilty is not None else ""
    confirmed = _confirmed(trial, inputs, row)
    evidence = {"rows": rows, "op": op, "confirmed": confirmed, "loader": _from_loader(run)}
    is_sample = _rows_are_samples(run, inputs, root) or _numbers_places(first, guilty, trial, inputs)
    evidence |= {"dim": inputs.dim, "dim_is_batch": inputs.dim == 1 or is_sample, "equal_sizes": is_square}
    reason = _may_be_meant(trial, op, inputs, is_sample)
    if not reason and trial.gives_loss and op in _MOVING:
        reason = "a loss may compare rows with one another"
    if not reason and confirmed is False:
        reason = "no gradient flows between the rows"
    return told("batch", guilty, root=root, answer="unknown" if reason else "yes", detail=reason, **evidence)


def _verdict(before: Any, after: Any, row: int, rows: int) -> list[bool]:
    return [v for one, two in pairs_of(before, after) if (v := _confined(one, two, row, rows)) is not None]


def _is_square(trial: Trial, run: Run, root: int) -> bool:
    """Whether a batch, as a loader made it, has as many places as rows, each with one target in the losses.

    Its axes can't be told by size, but what a loader stacks has the samples first and lies in memory in that order.
    """
    given = trial.inputs.by_rows()
    first = given[0] if len(given) == 1 else None
    if first is None or first.dim() < 2 or first.shape[0] != first.shape[1] or not first.is_contiguous():
        return False
    rows = first.shape[0]
    sizes = {one.batch_size for one in run.of(Epoch) if one.batch_size > 1}
    calls = [one for one in run.of(LossCall) if one.root == root]
    return sizes == {rows} and bool(calls) and all(one.target_shape in ((rows,), (rows, 1)) for one in calls)


def _repeated(trial: Trial, inputs: Inputs) -> Any:
    """What a model gives, twice the same."""
    before = trial.forward(inputs)
    if largest(pairs_of(before, trial.forward(inputs))) > 0:
        raise Unknown("two evaluations of the model differ")
    return before


def _time_is_first(trial: Trial, run: Run, root: int) -> bool:
    """Whether the samples lie along dim 1: the losses have a target for each place of it, and none for dim 0."""
    first = next((one for one in trial.inputs.tensors() if one.dim()), None)
    if first is None or first.dim() < 3 or first.shape[0] == first.shape[1]:
        return False
    calls = [one for one in run.of(LossCall) if one.root == root and one.target_shape and one.input_shape]
    return bool(calls) and all(
        one.target_shape[0] == one.input_shape[0] == first.shape[1] and first.shape[0] not in one.target_shape
        for one in calls
    )


def _with_row(inputs: Inputs, row: int, other: int) -> Inputs:
    """One row replaced by values of another; where they are equal, by other values of the same kind."""
    dim = inputs.dim
    same = all(torch.equal(one.select(dim, row), one.select(dim, other)) for one in inputs.by_rows())

    def change(one: torch.Tensor) -> torch.Tensor:
        if not inputs.has_rows(one):
            return one
        one = one.clone()
        one.select(dim, row).copy_(one.select(dim, other))
        if same and one.is_floating_point():
            one.select(dim, row).add_(1)
        return one

    changed = inputs.changed(change)
    if same and not any(one.is_floating_point() for one in inputs.by_rows()):
        raise Unknown("the rows of the last input are equal")
    return changed


def _refuse_relations(trial: Trial, inputs: Inputs) -> None:
    """Inputs that say how rows belong together, as an adjacency matrix does, make mixing what is meant."""
    given = inputs.tensors()
    whole = trial.inputs
    for one in (*given, *whole.tensors()):
        if one.layout is not torch.strided:
            raise Unknown("an input is sparse, and may say how rows belong together")
    rows = whole.rows
    kept = list(trial.module.buffers()) + [
        value for module in trial.module.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)
    ]
    for one in (*whole.tensors()[1:], *kept):
        if one.dim() >= 2 and one.shape[0] == one.shape[1] == rows:
            raise Unknown("a tensor has a row and a column for each row of the input, as an adjacency matrix has")
        if one.layout is not torch.strided:
            raise Unknown("the model keeps a sparse tensor, which may say how rows belong together")
    for one in whole.tensors()[1:]:
        if one.dim() == 2 and one.shape[0] == 2 != rows and not one.is_floating_point() and one.dtype != torch.bool:
            raise Unknown("an input of whole numbers with two rows may be the edges of a graph")
        if one.dim() != 1 or one.shape[0] != rows or one.dtype != torch.long:
            continue
        steps = one[1:] - one[:-1]  # numbers of graphs in a batch rise by at most one from 0 on
        if one[0] == 0 and one[-1] > 0 and ((steps == 0) | (steps == 1)).all():
            raise Unknown("an input may number the groups that rows belong to")


def _may_be_meant(trial: Trial, op: str, inputs: Inputs, is_sample: bool) -> str:
    """Why mixing may be what the model is for; empty where it can't be."""
    if op in _MOVING | _ALONG and inputs.dim == 0:
        sequential = _time_first(trial, inputs)
        return f"dim 0 may be the time: {sequential}" if sequential and not is_sample else ""
    if op in ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "scaled_dot_product_attention"):
        first = inputs.by_rows()[0]  # of numbers it needs a third dim, of tokens it does not
        batched = inputs.dim == 0 and is_sample and first.dim() > 1 + first.is_floating_point()
        if (batched and _time_first(trial, inputs)) or _samples_second(trial, inputs):
            return ""
        return f"{op} runs along dim {inputs.dim}, which may be the time"
    if op in _MOVING | _ALONG:
        return ""
    return f"{op or 'an operation'} relates rows to one another, which may be meant"


def _time_first(trial: Trial, inputs: Inputs) -> str:
    """The name of a layer that takes dim 0 of the input as time, empty if there is none."""
    found: list[str] = []

    def see(name: str, module: Any, given: Any, _: Any) -> None:
        one = next(iter(tensors(given)), None)
        if one is None:
            return
        unbatched = one.dim() == 2 and one.shape[0] == inputs.rows
        leading = one.dim() == 3 and one.shape[0] == inputs.rows and not getattr(module, "batch_first", False)
        if unbatched or leading:
            found.append(name)

    trial.hooked(inputs, _OVER_TIME, see)
    return found[0] if found else ""


def _samples_second(trial: Trial, inputs: Inputs) -> bool:
    """Whether a layer that has its batch first gets the samples along dim 1, where it takes time."""
    found: list[str] = []

    def see(name: str, module: Any, given: Any, _: Any) -> None:
        one = next(iter(tensors(given)), None)
        if one is not None and one.dim() == 3 and getattr(module, "batch_first", False):
            found.extend([name] if one.shape[1] == inputs.rows and one.shape[0] not in (1, inputs.rows) else [])

    if inputs.dim == 0 and inputs.by_rows()[0].dim() > 2:
        trial.hooked(inputs, _OVER_TIME, see)
    return bool(found)


def _rows_are_samples(run: Run, inputs: Inputs, root: int) -> bool:
    """Whether the run shows that dim 0 numbers samples: a loader made it, or there is one target for each row.

    Where targets are the next tokens, the dim along which they are is the time.
    """
    ahead = [one for one in run.of(LossCall) if one.root == root and one.shift]
    if ahead:
        return not any(one.time_first for one in ahead)
    rows = {one.rows for one in run.of(Forward)}
    if _from_loader(run):
        return True
    spoken = [one.input_shape for one in run.of(LossCall) if one.function == "ctc_loss" and len(one.input_shape) == 3]
    if any(shape[1] in rows and shape[0] not in rows for shape in spoken):  # which takes the samples along dim 1
        return True
    longer = all(one.dim() > 1 and one.shape[1] > 1 for one in inputs.by_rows()[:1])
    return longer and any(one.target_shape in ((row,), (row, 1)) for one in run.of(LossCall) for row in rows)


def _beside(inputs: Inputs) -> Inputs:
    """The same with the places of dim 1 turned, and what else has a row for each of them."""
    width = inputs.by_rows()[0].shape[1]

    def turned(one: torch.Tensor) -> torch.Tensor:
        dim = next((dim for dim, size in enumerate(one.shape[:2]) if size == width), None)
        return one if dim is None else one.roll(1, dim)

    return inputs.changed(turned)


def _numbers_places(operations: Operations, until: Operation | None, trial: Trial, inputs: Inputs) -> bool:
    """Whether the places of dim 1 are numbered: something embedded, or cut out of a table, is one for all rows."""
    first = inputs.by_rows()[0]
    if until is None or first.dim() < 2 or first.shape[0] == first.shape[1]:
        return False
    before = list(itertools.takewhile(lambda one: one is not until, operations.seen))
    joined = {each.shape[2:] for one in before for each in one.results if each.shape[:2] == first.shape[:2]}
    turned = trial.operations(_beside(inputs))[1].seen
    tables = (
        each
        for one, two in zip(before, turned, strict=False)
        if one.name in _LOOKING_UP and one.name == two.name
        for each, again in zip(one.results, two.results, strict=False)
        if each.dim() in (2, 3) and torch.equal(each, again)
    )
    return any(
        one.shape[-2] == first.shape[1] and one.shape[-1:] in joined and one.shape[:-2].numel() == 1
        and not torch.equal(one[..., 0, :], one[..., -1, :])
        for one in tables
    )  # fmt: skip


def _from_loader(run: Run) -> bool:
    sizes = {one.batch_size for one in run.of(Epoch) if one.batch_size > 1}
    return any(one.rows in sizes for one in run.of(Forward))


def pairs_of(one: Any, other: Any) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two outputs."""
    first, second = tensors(one), tensors(other)
    if len(first) != len(second):
        raise Unknown("the outputs have a different form in each call")
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            raise Unknown("the outputs have a different shape in each call")
        yield a, b


def largest(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """By how much any entries differ."""
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which entries differ by more than rounding does."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.is_floating_point():
        a, b = one.double().nan_to_num(), other.double().nan_to_num()
        return (a - b).abs() > _TOLERANCE * max(float(a.abs().max()), float(b.abs().max()), 1e-30)
    return one != other


def _changed(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """The places along a dim at which anything changed."""
    others = tuple(one for one in range(mask.dim()) if one != dim)
    return (mask.any(dim=others) if others else mask).nonzero().flatten()


def _confined(one: torch.Tensor, other: torch.Tensor, row: int, rows: int) -> bool | None:
    """Whether what changed lies in one row along some dim; ``None`` where no dim has a place for each row."""
    return _lies(one, other, rows, lambda places: places == row, range(one.dim()))


def _lies(
    one: torch.Tensor, other: torch.Tensor, count: int, is_there: Callable[[torch.Tensor], torch.Tensor],
    joined: Container[int], counted: torch.Tensor | None = None,
) -> bool | None:  # fmt: skip
    """Whether all places that changed along some dim are there, of so many; ``None`` where no dim has one for each.

    The places of some dims may be joined with others, as in blocks or in turn.
    """
    if one.shape != other.shape or not one.numel() or not one.dim():
        return None
    mask, known = difference(one, other), None
    mask = mask if counted is None else _of_counted(mask, counted)
    for dim, size in enumerate(one.shape):
        if size == count or (size % count == 0 and size and dim in joined):
            known = False
            places = _changed(mask, dim)
            if any(bool(is_there(each).all()) for each in (places % count, places // (size // count))):
                return True
    return known


def first_of(
    first: Operations, second: Operations, is_it: Callable[[torch.Tensor, torch.Tensor], bool | None]
) -> Operation | None:
    """The first operation of two runs a result of which is so; none where they run different operations before."""
    for one, two in zip(first.seen, second.seen, strict=False):
        if one.name != two.name:
            return None
        if not one.name.startswith(_WITHOUT_VALUES) and any(
            is_it(a, b) for a, b in zip(one.results, two.results, strict=False)
        ):
            return one
    return None


def _confirmed(trial: Trial, inputs: Inputs, row: int) -> bool | None:
    """Whether a backward from the other rows reaches the row; ``None`` where the input has no gradient."""
    given = inputs.changed(lambda one: one.clone().requires_grad_(one.is_floating_point()))
    leaves_ = [one for one in given.by_rows() if one.requires_grad]
    if not leaves_:
        return None
    outputs = tensors(trial.forward(given, grad=True))
    outputs = [one for one in outputs if one.dim() and one.shape[0] == inputs.rows and one.requires_grad]
    if not outputs:
        return None
    others = [n for n in range(inputs.rows) if n != row]
    total = sum(
        (one[others] * torch.linspace(0.5, 1.5, one[others].numel()).sin().to(one).reshape(one[others].shape)).sum()
        for one in outputs  # with uneven weights, since the sum of a softmax has no gradient
    )
    try:
        gradients = torch.autograd.grad(total, leaves_, allow_unused=True)  # type: ignore[arg-type]
    except FAILURES:
        return None
    known = [one for one in gradients if one is not None and one.numel()]
    return any(bool(one.select(inputs.dim, row).abs().max() > 0) for one in known)


def leaking(trial: Trial, run: Run, root: int) -> Probed:
    """Whether an output depends on later inputs, in a model whose targets are its inputs, or the next ones."""
    call = next((one for one in run.of(LossCall) if one.root in (root, -1) and one.shift is not None), None)
    if call is None:
        raise Unknown("no loss was seen whose targets are the inputs, or the inputs one place on")
    inputs = trial.inputs
    tokens = _tokens(inputs, call.shifted)
    if tokens is not None and tokens.shape[0] == tokens.shape[1] and not call.time_first:
        inputs = trial.few_rows()  # with as many rows as tokens, a dim could be either
        tokens = _tokens(inputs, call.shifted)
    if tokens is None or tokens.shape[not call.time_first] < 3 or tokens.shape[0] == tokens.shape[1]:
        raise Unknown("the last input is no batch of sequences of three tokens and more")
    rows = tokens.T if call.time_first else tokens
    length = rows.shape[1]
    start = min(call.start, length - 2)
    cut = (start + length + 1) // 2 if start else length // 2
    other = _other_tokens(rows, cut)
    other = other.T if call.time_first else other
    changed = inputs.changed(lambda one: other if one is tokens else one)
    before = _repeated(trial, inputs)
    after = trial.forward(changed)
    counted = _counted(inputs, tokens, rows)
    counted[:, :start] = False  # what comes out at a prompt is in no loss, and may see all of it
    pairs = [
        (a, b) for a, b in pairs_of(before, after) if length in a.shape or (a.dim() and len(a) % tokens.numel() == 0)
    ]
    verdicts = [v for a, b in pairs if (v := _only_later(a, b, length, cut, counted)) is not None]
    if not verdicts:
        raise Unknown("no output has a place for each token")
    if all(verdicts):
        own = (_only_later(a, b, length, cut + 1, counted) for a, b in pairs_of(before, after))
        is_shifted = all(one is not False for one in own)  # by the model: no output depends on the token at its place
        earlier = torch.cat([rows[:, :cut].roll(1, 0).flip(1), rows[:, cut:]], 1)
        earlier = earlier.T if call.time_first else earlier
        behind = trial.forward(inputs.changed(lambda one: earlier if one is tokens else one))
        looks_back = any(_reaches(a, b, length, cut) for a, b in pairs_of(before, behind))
        return told("time", root=root, answer="no", length=length, shifted=is_shifted, back=looks_back)
    (_, first), (_, second) = trial.operations(inputs), trial.operations(changed)
    guilty = _first_early(first, second, length, cut)
    return told("time", guilty, root=root, length=length, position=cut, op="" if guilty is None else guilty.name)


def _counted(inputs: Inputs, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Which tokens of each row are no padding: a padded one may see anything, as it is in no loss."""
    counted = torch.ones_like(rows, dtype=torch.bool)
    for one in inputs.tensors():
        if one is not tokens and one.shape == rows.shape and bool(((one == 0) | (one == 1)).all()):
            counted &= one != 0
    first = rows[:, 0].mode().values
    runs = (rows == first).long().cumprod(1).bool()  # on the left, one token again and again
    if bool((runs.sum(1) > 1).any()) and not bool(runs.all()):
        counted &= ~runs
    return counted if bool(counted.any()) else torch.ones_like(counted)


def _of_counted(mask: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """What changed, at tokens that count."""
    for own in (counted, counted.T):
        if mask.shape[:2] == own.shape:
            return mask & own.to(mask.device).reshape(*own.shape, *([1] * (mask.dim() - 2)))
    if mask.shape[0] == counted.numel():
        return mask & counted.to(mask.device).reshape(-1, *([1] * (mask.dim() - 1)))
    return mask


def _tokens(inputs: Inputs, place: int) -> torch.Tensor | None:
    """The tokens that the targets were compared with."""
    return next(itertools.islice(tokens_of((inputs.args, inputs.kwargs)), place, None), None)


def _other_tokens(tokens: torch.Tensor, cut: int) -> torch.Tensor:
    """The tokens after a position replaced by others, since their order alone may not count."""
    later = tokens[:, cut:]
    for other in (later.roll(1, 0), tokens[:, :1].expand_as(later), later.flip(1)):
        if bool((other.sort(1).values != later.sort(1).values).any()) or (
            other is not later and not torch.equal(other, later) and tokens.shape[0] == 1
        ):
            return torch.cat([tokens[:, :cut], other], 1)
    raise Unknown("all tokens of the last input are equal")


def _only_later(
    one: torch.Tensor, other: torch.Tensor, length: int, cut: int, counted: torch.Tensor | None = None
) -> bool | None:
    return _lies(one, other, length, lambda places: places >= cut, (0,), counted)


def _reaches(one: torch.Tensor, other: torch.Tensor, length: int, cut: int) -> bool:
    """Whether something has changed from a position on."""
    mask = difference(one, other)
    dims = [dim for dim, size in enumerate(one.shape) if size == length or (size and size % length == 0 and dim == 0)]
    return any(bool((_changed(mask, dim) % length >= cut).any()) for dim in dims)


def _first_early(first: Operations, second: Operations, length: int, cut: int) -> Operation | None:
    found = None
    for one, two in zip(first.seen, second.seen, strict=False):
        if one.name != two.name:
            break
        both = [(_but_filled(a), _but_filled(b)) for a, b in zip(one.results, two.results, strict=False)]
        # a mask that is looked at is the same, and says nothing
        verdicts = [_only_later(a, b, length, cut) for a, b in both if a.shape != b.shape or difference(a, b).any()]
        if False in verdicts and found is None:
            found = one
        elif True in verdicts and one.name in ("__getitem__", "masked_fill", "masked_fill_", "where", "tril"):
            found = None  # scores before the mask depend on later tokens, and that is as it should be
    return found


def _but_filled(one: torch.Tensor) -> torch.Tensor:
    """A tensor without what a mask fills in, beside which all else would be as small as rounding."""
    return one.masked_fill(one.abs() > _FILLER, 0) if one.is_floating_point() else one


OF_SCORES = ("cross_entropy", "binary_cross_entropy_with_logits")
_SPREAD = 1e-6
_ROUNDED = 1e-4  # of the largest output
_MUCH = 0.5  # of the spread over rows: a convolution at the border of a row, or a mean of many tokens, changes less


def ignored(trial: Trial, run: Run, root: int) -> Probed:
    """Whether the outputs are the same for different inputs."""
    inputs = trial.inputs
    given = [one for one in inputs.by_rows() if one.numel()]
    if inputs.rows < 2 or not given:
        raise Unknown("the last input has one row")
    different = any(bool((one != one[:1]).any()) for one in given)
    if not different:
        raise Unknown("the rows of the last input are equal")
    turned = inputs.changed(lambda one: one.roll(1, 0) if one.dim() and one.shape[0] == inputs.rows else one)
    before, after = trial.forward(inputs), trial.forward(turned)
    outputs = [(a, b) for a, b in pairs_of(before, after) if a.is_floating_point() and a.dim() and a.numel() > 1]
    if trial.gives_loss:
        outputs = [(_but_filled(a), _but_filled(b)) for a, b in outputs if len(a) % inputs.rows == 0]
    if not outputs:
        raise Unknown("the model gives no tensor of real numbers")
    size = max(float(a.double().abs().max()) for a, _ in outputs)
    if size != size or size == float("inf"):
        raise Unknown("the outputs are not finite")
    spread = largest(outputs) / size if size else 0.0
    return told("input", root=root, answer="yes" if spread < _SPREAD else "no", spread=spread, size=size)


def padding_read(trial: Trial, run: Run, root: int) -> Probed:
    """Whether an output of one row changes with the number of tokens that only fill the rows up."""
    inputs = trial.inputs
    found = [behind for one in inputs.by_rows() if (behind := padding_of(one)) is not None]
    if not found:
        raise Unknown("the last input has no padded tokens")
    behind = found[0]
    length = behind.shape[1]
    spare = max(int(behind.sum(1).min()) - 1, 0)
    outputs = _outputs_of_rows(trial.forward(inputs), trial.forward(_padded(inputs, behind, -spare or length)))
    if not outputs:
        raise Unknown("no output has a place for each row, whatever their length")
    moved = max(float((one - other).pow(2).mean().sqrt()) for one, other in outputs)
    spread = max(float((one - one.mean(0)).pow(2).mean().sqrt()) for one, _ in outputs)
    share = float(behind.double().mean())
    size = max(float(one.abs().max()) for one, _ in outputs)
    answer = "yes" if moved > max(_MUCH * spread, _ROUNDED * size) else "no"
    return told("padding read", root=root, answer=answer, moved=moved, spread=spread, share=share, tokens=length)


def _padded(inputs: Inputs, behind: torch.Tensor, more: int) -> Inputs:
    """The same with so many more places at the ends of rows, or fewer, filled as the ends of short rows are."""

    def change(one: torch.Tensor) -> torch.Tensor:
        if one.shape[:2] != behind.shape:
            return one
        fill = one[behind]
        if one.dim() > 2 or bool((fill != fill[0]).any()):
            raise Unknown("an input has a place for each token, and what it holds for padding differs")
        if more < 0:
            return one[:, :more]
        return torch.cat([one, fill[0].expand(len(one), more)], 1)

    return inputs.changed(change)


def _outputs_of_rows(before: Any, after: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [
        (one, other) for one, other in zip(tensors(before), tensors(after), strict=False) if one.is_floating_point()
    ]
    return [
        (one.double(), other.double()) for one, other in pairs
        if one.shape == other.shape and 0 < one.dim() < 3 and len(one) > 1
    ]  # fmt: skip


def random_in_evaluation(trial: Trial, run: Run, root: int) -> Probed:
    """Whether two evaluations of the same input differ, and by which operation."""
    inputs = trial.inputs
    before = trial.forward(inputs)
    trial.advance()
    after = trial.forward(inputs, again=True)
    pairs = [(a, b) for a, b in pairs_of(before, after) if a.numel()]
    if not pairs:
        raise Unknown("the model gives no tensor")
    if not any(bool(difference(a, b).any()) for a, b in pairs):
        return told("modes", root=root, answer="no")
    _, first = trial.operations(inputs)
    trial.advance()
    _, second = trial.operations(inputs, again=True)
    guilty = first_of(first, second, lambda a, b: a.shape == b.shape and a.numel() > 0 and bool(difference(a, b).any()))
    return told("modes", guilty, root=root, op="" if guilty is None else guilty.name, largest=largest(pairs))


def squashed_in_evaluation(trial: Trial, run: Run, root: int) -> Probed:
    """Whether what goes as scores into a loss in training comes as probabilities into it in evaluation."""
    losses = [one for one in run.of(Evaluated) if one.function in OF_SCORES]
    if not losses or not any(one.root == root and one.function in OF_SCORES for one in run.of(LossCall)):
        raise Unknown("no loss that takes scores was seen in an evaluation")
    evaluated = tensors(trial.forward(trial.inputs))
    trial.module.train()
    try:
        trained = tensors(trial.forward(trial.inputs))
    finally:
        trial.module.eval()
    pairs = [(a, b) for a, b in zip(evaluated, trained, strict=False) if a.is_floating_point() and a.shape == b.shape]
    is_so = any(_is_probability(a, losses[0].function) and not _is_probability(b, losses[0].function) for a, b in pairs)
    return told("evaluated scores", losses[0], root=root, answer="yes" if is_so else "no", function=losses[0].function)


def _is_probability(one: torch.Tensor, function: str) -> bool:
    is_within = one.numel() > 1 and bool(((one >= 0) & (one <= 1)).all())
    if function != "cross_entropy" or not is_within:
        return is_within
    return one.dim() > 1 and bool(((one.sum(1) - 1).abs() < 1e-3).all())
