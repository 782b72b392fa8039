"""What batches that were kept hold: masks beside pictures, padding, classes, and samples that were collated."""

import copy
import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from anybatch.doctor.ask.arguments import left_out
from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import DISTANCES, OF_CLASSES
from anybatch.doctor.ask.trials import Line, Unknown, tensors, told
from anybatch.doctor.ask.weighing import padding_of
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_LEAST_MASKS, _MOST_MASKS, _LEAST_SIDE, _MOST_KINDS = 20, 200, 12, 21
_LEAST_GRID = 4
_ERRORS, _SOMETHING = 6.0, 0.1  # standard errors of what one way explains more, and of the variance it has to explain
_CLEAR = 0.1  # of the variance of a channel that a mask explains where it lies on what it shows
_MOST_CLEAR = 0.5  # of the pictures: fewer explain more than the pictures of other masks by accident
_BETTER = 2.0  # times as much is explained where it is turned, or shifted
_MUCH, _MOSTLY = 0.15, 0.5  # of the variance of a channel, where a mask is shifted, and of all masks
_SMALL, _FEW_KINDS, _ENOUGH_MASKS = 48, 4, 80  # a side of what is shifted, classes, and pictures
_SURELY = 4.0  # standard errors of what the mask of another picture explains less
_SHARE = 0.2  # of the clear pictures, as of those that are turned by one of four, and not only flipped at a time
_SAMPLES = 13  # that a collate function is given
_LEAST_BATCHES = 3
_LEAST_SEVERAL = 0.2  # of the rows
_LEAST_ROWS, _MOST_CLASSES = 200, 20  # in which a number tells the class, by no chance
_LEAST_PADDED = 0.1  # of the tokens
_DIGITS, _LEAST_FLIPPED = 6, 8  # of a sum that tells pictures apart, and pairs
_FEWEST = 100  # targets that were kept
_NARROWED = 0.7  # of the deviation of the targets in training
_TELLS, _LESS = 0.5, 0.3  # a correlation, and by how much one is less
_BY_CHANCE, _SEVERAL = 3.5, 3  # standard errors of a correlation, and columns that would not all change by chance
_LEAST_TOKENS = 2000
_RENAMED, _TIMES = 0.1, 4.0  # of the tokens, and how many times more differ by number than by how frequent they are
_UNKNOWN = 0.4  # of the tokens: names and rare words are fewer
_BEYOND = 2.5  # times as many as differ where both are drawn from one distribution; words of a row go together
_BATCHES = 5  # that have to agree
_MOSTLY_MOVED = 0.5  # of the names that both have


def about_collates(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether parts of a batch are in the order of their samples, and others in another one."""
    for dataset, collate in kept.collates:
        yield _paired(dataset, collate)


def about_mirrored(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether pictures come as they are and flipped, with the same numbers of several as their targets both times."""
    for root, batches in kept.batches.items():
        shape = batches[0][0].shape[1:]
        pairs = [(x, given["target"]) for x, name, given in batches
                 if name in DISTANCES and x.dim() == 4 and x.shape[1:] == shape]  # fmt: skip
        found = [(x, y) for x, y in pairs
                 if y.is_floating_point() and y.dim() == 2 and y.shape[1] > 1 and len(x) == len(y)]  # fmt: skip
        if not found:
            continue
        pictures, targets = (torch.cat(both) for both in zip(*found, strict=True))
        generator = torch.Generator("cpu").manual_seed(5)
        weights = torch.randn(pictures[0].numel(), generator=generator, dtype=torch.double, device="cpu").to(
            pictures.device
        )
        for dim in (-1, -2):
            own, flipped = ((one.double().flatten(1) @ weights) for one in (pictures, pictures.flip(dim)))
            at = {round(float(key), _DIGITS): row for row, key in enumerate(own)}
            both = [(row, at[key]) for row, one in enumerate(flipped) if (key := round(float(one), _DIGITS)) in at]
            both = [(row, other) for row, other in both if not torch.equal(pictures[row], pictures[other])]
            same = sum(torch.equal(targets[row], targets[other]) for row, other in both)
            if same >= _LEAST_FLIPPED and same == len(both):
                yield told("mirrored", root=root, pairs=same, across="width" if dim == -1 else "height")


def about_columns(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a column of a table tells the targets in training, and much less of them in the first evaluation."""
    for root, pairs in kept.held_out.items():
        tables = [(first, given["target"]) for first, _, given in kept.batches.get(root, ())
                  if first.dim() == 2 and first.is_floating_point()]  # fmt: skip
        both = [_columns(one) for one in (tables, pairs)]
        if any(one is None for one in both):
            continue
        (rows, trained, spread), (others, evaluated, its) = both  # type: ignore[misc]
        if trained.shape != evaluated.shape:
            continue
        varied, width = its > _NARROWED * spread, len(trained)  # targets of a narrower range are correlated less
        is_wide = (its[:width] > 0)[:, None] & varied[None, width:]
        less = (trained.abs() - evaluated * trained.sign()).where(is_wide, trained.new_zeros(()))
        sure = (trained.atanh() - evaluated.atanh()).abs() > _ERRORS * (1 / rows + 1 / others) ** 0.5
        leaks = less.where(sure & (trained.abs() > _TELLS), less.new_zeros(())).amax(1)
        place = int(leaks.argmax())
        if float(leaks[place]) > _LESS:
            at = int(less[place].argmax())
            tells, still = (
                one[:, at].abs() * count**0.5 > _BY_CHANCE for one, count in ((trained, rows), (evaluated, others))
            )
            # one column is to blame where others tell the targets as before, and the targets where none does
            name = "columns" if int(tells.sum()) < _SEVERAL or bool((tells & still).any()) else "evaluated apart"
            seen: dict[str, Any] = {"trained": float(trained[place, at]), "evaluated": float(evaluated[place, at])}
            yield told(name, root=root, place=place + 1, of=len(leaks), rows=rows, telling=int(tells.sum()), **seen)


def _columns(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """Different rows, how each column of them is correlated with each target or class, and their deviations."""
    same = [(x, y) for x, y in pairs if x.shape[1] == pairs[0][0].shape[1] and y.numel() == len(x)]
    if sum(len(x) for x, _ in same) < _FEWEST:
        return None
    table, target = torch.cat([x for x, _ in same]).double(), torch.cat([y.flatten() for _, y in same])
    if not target.is_floating_point() and not 0 <= int(target.min()) <= int(target.max()) < _MOST_CLASSES:
        return None
    is_wide = not target.is_floating_point() and int(target.max()) > 1
    marks = torch.nn.functional.one_hot(target) if is_wide else target[:, None]
    rows, width = torch.unique(torch.cat([table, marks.double()], 1), dim=0), table.shape[1]
    if len(rows) < _FEWEST:
        return None
    std = rows.std(0)
    scaled = (rows - rows.mean(0)) / std.clamp_min(1e-9)
    found = scaled[:, :width].T @ scaled[:, width:] / len(rows)
    return len(rows), found.clamp(-0.999, 0.999), std


def about_tokens(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether numbers of a vocabulary are as frequent in evaluation as others are in training, or one is new there."""
    for root in {root for root, _ in kept.tokens}:
        counts = [kept.tokens[key].double() for training in (True, False) if (key := (root, training)) in kept.tokens]
        if len(counts) < 2 or min(float(one.sum()) for one in counts) < _LEAST_TOKENS:
            continue
        (one, other), shared = [each / each.sum() for each in counts], (counts[0] > 0) & (counts[1] > 0)
        apart = float((one - other).abs().sum()) / 2
        alike = float((one.sort()[0] - other.sort()[0]).abs().sum()) / 2
        is_of_both = min(float(each[shared].sum()) for each in (one, other)) > 1 - _RENAMED / 2
        drawn = sum(1 / float(each.sum()) for each in counts)  # words as frequent as each other differ by chance
        by_chance = float(((one + other) * drawn / math.pi).sqrt().sum()) / 2
        if is_of_both and apart > max(_RENAMED, _TIMES * alike, _BEYOND * by_chance):
            yield told("tokens", root=root, apart=apart, alike=alike, symbols=int(shared.sum()))
        elif float((new := other * (counts[0] == 0)).max()) > _UNKNOWN:
            number = int(new.argmax())
            yield told("unknown tokens", root=root, share=float(new[number]), number=number)


def about_copied(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether each target of a training is the input itself, and in evaluation it is another tensor of that shape."""
    if any(one.drops or one.drawn is not None for tape in kept.tapes.values() for one in tape.operations):
        return  # the model changes what it is given itself
    for root, evaluated in kept.held_out.items():
        trained = [(first, given["target"]) for first, name, given in kept.batches.get(root, ()) if name in DISTANCES]
        alike = [(one, other) for one, other in evaluated if one.shape == other.shape]
        if len(trained) < _LEAST_BATCHES or len(alike) < len(evaluated) or not alike:
            continue
        is_copied = all(one.shape == other.shape and torch.equal(one, other) for one, other in trained)
        away = min(float((one - other).double().square().mean() ** 0.5) for one, other in alike)
        if is_copied and away > 0:
            yield told("copied", root=root, batches=len(trained), away=away)


def about_numberings(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether names have other numbers in a data set that is read in order than in the one that was trained on."""
    trained: dict[str, dict[Any, int]] = {}
    for is_mixed, found in kept.numberings:
        trained = found if is_mixed else trained
        for name in found.keys() & trained.keys() if not is_mixed else ():
            one, other = trained[name], found[name]
            shared = one.keys() & other.keys()
            moved = [key for key in shared if one[key] != other[key]]
            if len(moved) > _MOSTLY_MOVED * len(shared):
                key = min(moved, key=str)
                seen: dict[str, Any] = {"name": name, "moved": len(moved), "shared": len(shared), "key": str(key)[:40]}
                yield told("numbering", **seen, trained=one[key], read=other[key])


def about_first_nan(kept: Kept, run: Run) -> Iterator[Probed]:
    """Which operation made the first nan of data that are prepared within a step."""
    found = kept.breaking.found
    if found is not None:
        seen: dict[str, Any] = {"entries": found.entries, "of": found.of, "least": found.least, "most": found.most}
        yield told("first nan", found, op=found.op, value=kept.breaking.value, **seen)


def _paired(dataset: Any, collate: Callable[[list[Any]], Any]) -> Probed:
    count = min(_SAMPLES, len(dataset))
    samples = [dataset[place * len(dataset) // count] for place in range(count)]

    def collated(some: list[Any]) -> list[torch.Tensor]:
        return tensors(collate(copy.deepcopy(some)))

    whole, again, alone = collated(samples), collated(samples), [collated([one]) for one in samples]
    if any(len(one) != len(whole) for one in alone) or not all(map(torch.equal, whole, again)):
        raise Unknown("what it gives differs from one call to the next")
    fields = [field for place, one in enumerate(whole) if (field := _matches(one, [each[place] for each in alone]))]
    orders = [order for one in fields if (order := _order(one)) and order != list(range(count))]
    if not orders or any(sorted(one.flatten().tolist()) == list(range(count)) for one in whole if one.dim() == 1):
        return told("collate", answer="no", samples=count)  # with the order, what is made of the rows can be put back
    left = [one for one in fields if not all(one[row][orders[0][row]] for row in range(count))]
    apart = [sum(not one[row][orders[0][row]] for row in range(count)) for one in left
             if all(one[row][row] for row in range(count))]  # fmt: skip
    if len(apart) < len(left):
        raise Unknown("a part of the batch is in an order of its own")
    code = getattr(collate, "__code__", None) or getattr(type(collate).__call__, "__code__", None)
    place = Line(getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", 0))
    moved = sum(row != sample for row, sample in enumerate(orders[0]))
    name = getattr(collate, "__name__", type(collate).__name__)
    seen: dict[str, Any] = {"collate": name, "apart": max(apart, default=0)}
    return told("collate", place, answer="yes" if apart else "no", samples=count, moved=moved, **seen)


def _matches(whole: torch.Tensor, alone: list[torch.Tensor]) -> list[list[bool]]:
    """For each row of a tensor and each sample whether it is that of the sample; nothing where it has no rows."""
    for dim in range(min(whole.dim(), 2)):
        if whole.shape[dim] == len(alone) and all(one.dim() == whole.dim() and one.shape[dim] == 1 for one in alone):
            rows = whole.unbind(dim)
            return [[_fits(row, one.select(dim, 0)) for one in alone] for row in rows]
    return []


def _fits(row: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a row is what a sample alone becomes, but for the padding at its end or its beginning."""
    if any(size < least for size, least in zip(row.shape, own.shape, strict=True)):
        return False
    if row.shape == own.shape:
        return bool(torch.equal(row, own))
    ends = (tuple(slice(0, size) for size in own.shape), tuple(slice(-size, None) for size in own.shape))
    return any(torch.equal(row[end], own) and _is_padded(row, end) for end in ends if row[end].shape == own.shape)


def _is_padded(row: torch.Tensor, end: tuple[slice, ...]) -> bool:
    outside = torch.ones(row.shape, dtype=torch.bool)
    outside[end] = False
    return bool(row[outside].unique().numel() <= 1)


def _order(field: list[list[bool]]) -> list[int] | None:
    """The sample of each row, where each has one and they are all different."""
    found = [[sample for sample, same in enumerate(row) if same] for row in field]
    order = [one[0] for one in found if len(one) == 1]
    return order if len(order) == len(field) and sorted(order) == list(range(len(field))) else None


def apart(kept: Kept, root: int) -> Probed:
    """Whether many masks explain their picture far better when they are turned or flipped."""
    own, other = [], []
    pairs = list(_pairs(kept, root))
    for number, (picture, mask) in enumerate(pairs):
        own.append(_explained(picture, mask))
        other.append(_explained(pairs[number - 1][0], mask))
    if len(own) < _LEAST_MASKS:
        raise Unknown("few masks of pictures were kept")
    shares, others, best = torch.stack(own), torch.stack(other), torch.stack(own).max(1).values
    if (share := _all_alike(shares, others)) > 0:
        return told("apart", root=root, answer="yes", share=share, masks=len(own), by="turned")
    some = pairs[:_ENOUGH_MASKS]
    here, there, by = torch.stack([_shifted(*pair) for pair in some]).unbind(1)
    gained = there - torch.stack([_shifted(some[at - 1][0], mask)[1] for at, (_, mask) in enumerate(some)])
    alike = float((by == by.mode().values).double().mean())  # as of where a thing will be a moment later
    share = float(((there > _MUCH) & (_BETTER * here < there)).double().mean())
    if share > _MOSTLY > alike and float(gained.mean()) > _SURELY * float(gained.std()) / len(some) ** 0.5:
        return told("apart", root=root, answer="yes", share=share, masks=len(some), by="shifted")
    clear = best > max(_CLEAR, float(others.max(1).values.quantile(0.9)))
    if clear.double().mean() < _MOST_CLEAR:
        raise Unknown("masks explain little of the colours of their pictures")
    share = float((_BETTER * shares[:, 0] < best)[clear].double().mean())
    seen: dict[str, Any] = {"share": share, "masks": int(clear.sum()), "by": "turned"}
    return told("apart", root=root, answer="yes" if share > _SHARE else "no", **seen)


def _all_alike(shares: torch.Tensor, others: torch.Tensor) -> float:
    """Of how many pictures one way to turn all masks explains more, where it does so surely; 0 where it does not.

    More than the mask as it is, and than that of another picture: what lies at one place in all pictures tells nothing.
    """
    way = int(shares.mean(0).argmax())
    gained = [shares[:, way] - one for one in (shares[:, 0], others[:, way])]
    sure = all(float(one.mean()) > _ERRORS * float(one.std()) / len(one) ** 0.5 for one in gained)
    much = all(_BETTER * float(one.mean()) > float(shares[:, way].mean()) > _SOMETHING for one in gained)
    return float((gained[0] > 0).double().mean()) if way and sure and much else 0.0


def _pairs(kept: Kept, root: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures with a mask of few classes of the same size, or with a coarse grid of them, as detectors have."""
    count = 0
    for pictures, _, given in kept.batches.get(root, ()):
        masks = given["target"]
        masks = masks[:, 0] if masks.dim() == 4 and masks.shape[1] == 1 else masks
        sides = pictures.shape[2:]
        if pictures.dim() != 4 or not pictures.is_floating_point() or min(sides) < _LEAST_SIDE:
            return
        if masks.dim() != 3 or len(masks) != len(pictures) or len(masks.unique()) > _MOST_KINDS:
            continue  # what else a loss has, such as boxes
        if masks.shape[1:] != sides and (
            min(masks.shape[1:]) < _LEAST_GRID
            or any(side % one for side, one in zip(sides, masks.shape[1:], strict=True))
        ):
            return
        seen = torch.nn.functional.adaptive_avg_pool2d(pictures.double(), tuple(masks.shape[1:]))
        for pair in zip(seen, masks, strict=True):
            if count < _MOST_MASKS:
                count += 1
                yield pair


def _explained(picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The share of the variance of the best channel that each way to turn a mask explains; as it is comes first."""
    flat = picture.reshape(len(picture), -1)
    away = flat - flat.mean(1, keepdim=True)
    total = away.pow(2).sum(1).clamp_min(1e-12)
    found = []
    quarters = (0, 1, 2, 3) if mask.shape[0] == mask.shape[1] else (0, 2)
    for turned in [one for quarter in quarters for one in (mask.rot90(quarter), mask.rot90(quarter).flip(1))]:
        classes = turned.reshape(-1).unique(return_inverse=True)[1]
        sums = away.new_zeros(len(away), int(classes.max()) + 1).index_add_(1, classes, away)
        found.append((sums.pow(2) / classes.bincount()).sum(1).div(total).max())
    return torch.stack(found)


def _shifted(picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The share of the variance of a channel that a class of a mask explains where it is, and shifted by what is best.

    And the number of that shift. By a third of each side at most; what leaves the picture comes in at the other side.
    """
    classes = torch.stack([mask == one for one in mask.unique()[:_FEW_KINDS]]).double()
    small = min(mask.shape[0], _SMALL), min(mask.shape[1], _SMALL)  # which is enough to find it
    picture, classes = (torch.nn.functional.adaptive_avg_pool2d(one, small) for one in (picture, classes))
    away, marks = (one - one.mean((1, 2), keepdim=True) for one in (picture, classes))
    both = torch.fft.irfft2(
        torch.fft.rfft2(away[:, None]) * torch.fft.rfft2(marks).conj(), s=small
    )  # of a channel and a class, for each shift
    sizes = away.square().sum((1, 2))[:, None] * marks.square().sum((1, 2))
    shares = (both.square() / sizes.clamp_min(1e-12)[..., None, None]).amax((0, 1))
    near = [torch.arange(-(side // 3), side // 3 + 1) for side in small]
    there = shares[near[0]][:, near[1]]
    return torch.stack([shares[0, 0], there.max(), there.argmax().double()])


def about_given(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether one of the numbers that a root is given has another value for each class, and one for all of its rows."""
    for root, batches in kept.batches.items():
        pairs = [(first, marks) for first, _, one in batches if (marks := _marks(first, one["target"])) is not None]
        pairs = [one for one in pairs if one[0].shape[1:] == pairs[0][0].shape[1:]]
        rows = sum(len(marks) for _, marks in pairs)
        if rows < _LEAST_ROWS:
            continue
        inputs, marks = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        classes = len(marks.unique())
        for place in range(inputs.shape[1] if 1 < classes <= _MOST_CLASSES else 0):
            values = inputs[:, place].unique()
            if len(values) == classes and len(torch.stack((inputs[:, place], marks)).unique(dim=1).T) == classes:
                yield told("target given", root=root, kind="class", place=place + 1, of=inputs.shape[1], rows=rows)
                break


def _marks(first: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """The classes of a table of numbers, one for each row; ``None`` where they are something else."""
    is_table = first.dim() == 2 and first.is_floating_point() and first.shape[1] > 1 and first.is_cpu and target.is_cpu
    if not is_table or target.numel() != len(first) or (
        target.is_floating_point() and not bool(((target == 0) | (target == 1)).all())
    ):  # fmt: skip
        return None
    return target.flatten().to(first)


def about_several(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether scores or probabilities of one class for each row, which sum to 1, meet the marks of several."""
    for root, batches in kept.batches.items():
        shared = [(name, one) for _, name, one in batches if name == "cross_entropy" or one["shares"]]
        given = [one["target"] for _, one in shared if one["shape"] == one["target"].shape]
        given = [one for one in given if one.dim() == 2 and one.is_floating_point() and one.shape[0] != one.shape[1]]
        if len(given) < _LEAST_BATCHES or not all(bool(((one == 0) | (one == 1)).all()) for one in given):
            continue
        marks = torch.cat([one.sum(1) for one in given])
        if float((marks != 1).double().mean()) > _LEAST_SEVERAL and bool((marks > 1).any()):
            seen: dict[str, Any] = {"most": int(marks.max()), "least": int(marks.min()), "function": shared[0][0]}
            yield told("several classes", root=root, rows=len(marks), **seen)


def about_padding(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a loss counts the places at which the tokens of its root are padding."""
    for root, batches in kept.batches.items():
        padded, total, seen = 0, 0, set[int]()
        for tokens, name, given in batches:
            target, rows = given["target"], len(tokens)
            if name != "cross_entropy" or tokens.dim() != 2 or tokens.is_floating_point() or target.numel() % rows:
                break
            if given.get("weight") is not None or given.get("reduction") == "none":  # a mask may come
                break
            target = target.reshape(rows, -1)
            filled = tokens if target.shape == tokens.shape else target
            found = (padding_of(filled, is_word=one) for one in (False, True))
            behind = next((one for one in found if one is not None), None)
            counted = target != given.get("ignore_index", -100)
            counted = counted & behind if behind is not None else torch.zeros_like(counted)
            seen |= set(target[counted].tolist())
            if len(seen) > 1:
                break
            total += target.numel()
            padded += int((counted.sum(1) - 1).clamp_min(0).sum())  # the first may be the end of a text
        else:
            if total and padded > _LEAST_PADDED * total:
                yield told("padding", root=root, share=padded / total, value=seen.pop(), tokens=total)


def about_uncounted(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether ``ignore_index``, or a weight of 0, is that of a class, where each row of numbers has one target."""
    for root, batches in kept.batches.items():
        given = [one for first, name, one in batches if name in OF_CLASSES and _is_of_rows(first, one["target"], one)]
        if len(given) < len(batches) or len({one["shape"][1] for one in given}) != 1:
            continue
        classes = int(given[0]["shape"][1])
        targets = torch.cat([one["target"] for one in given])
        counts = targets[(targets >= 0) & (targets < classes)].bincount(minlength=classes).tolist()
        ignored, weight = int(given[0].get("ignore_index", -100)), given[0].get("weight")
        numbers = {ignored} if 0 <= ignored < classes else set[int]()
        if weight is not None:
            numbers |= {number for number, one in enumerate(weight.tolist()) if not one}
        by = "ignore_index" if ignored in numbers else "weight"
        if sum(counts) >= _FEWEST:
            yield from left_out(root, counts, sorted(numbers), None, by)


def _is_of_rows(first: torch.Tensor, target: torch.Tensor, given: dict[str, Any]) -> bool:
    """Whether each row that the net is given has a target of its own: rows of tokens may be padding, or unknown."""
    is_plain = first.is_floating_point() and first.dim() > 1 and len(given["shape"]) == 2
    return is_plain and target.shape == first.shape[:1] and not target.is_floating_point()


def about_ends(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether the token that ends each row is the padding, and never a target of a model of the next token.

    Rows that are filled up to the longest have no padding in that one. Where the longest of each batch has one place of
    it, and what stands before it is not one token, that place is the end; and so is the first one of those filled up to
    a length that is fixed, where the net itself is told that this token is the end.
    """
    for root, batches in kept.batches.items():
        ends = {number for state, net in kept.nets() if state.root == root for number in _own_ends(net)}
        found = {_end_of(*batch, ends) for batch in batches}
        rows = sum(len(tokens) for tokens, _, _ in batches)
        if len(batches) >= _BATCHES and len(found) == 1 and rows >= _FEWEST and (number := found.pop()) is not None:
            yield told("end uncounted", root=root, number=number, rows=rows)


def _own_ends(net: torch.nn.Module) -> set[int]:
    """The numbers of the tokens at which the configuration of a net says that a text ends."""
    told_by = (getattr(net, name, None) for name in ("config", "generation_config"))
    given = [getattr(one, "eos_token_id", None) for one in told_by]
    every = [number for one in given for number in (one if isinstance(one, (list, tuple)) else [one])]
    return {number for number in every if isinstance(number, int)}


def _end_of(tokens: torch.Tensor, name: str, given: dict[str, Any], ends: Container[int] = ()) -> int | None:
    """The token that ends all rows of a batch and is no target; ``None`` where it is one, or there is none."""
    behind, target = padding_of(tokens), given["target"]
    if behind is None or name not in OF_CLASSES or target.numel() not in (tokens.numel(), tokens[:, 1:].numel()):
        return None
    number, ahead = int(tokens[behind][0]), tokens[:, 1:]
    ignored, lengths = given.get("ignore_index", -100), (~behind).sum(1)
    target = target.reshape(len(tokens), -1)
    if target.shape == tokens.shape:  # the last place has no next token
        if bool((target[:, -1] != ignored).any()):
            return None
        target = target[:, :-1]
    out = target == ignored
    is_next = torch.equal(out, ahead == number) and torch.equal(target[~out], ahead[~out])
    last = tokens.gather(1, lengths[:, None] - 1).unique()
    is_output = len(given["shape"]) > 1 and number < given["shape"][1]
    is_end = int(behind.sum(1).min()) == 1 or number in ends
    return number if is_next and is_output and is_end and len(last) > 1 else None
