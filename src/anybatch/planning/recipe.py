"""A way to run a step, as data: what is traded for memory, and how far a batch is cut."""

from dataclasses import dataclass, replace

from anybatch.records.plans import PlanRow


@dataclass(frozen=True)
class Recipe:
    """A way to run the micro-batches of a step.

    Args:
        recompute: names of blocks, or of runs of them.
        offload: names of blocks.
        head: the output layer whose loss is taken in chunks; empty if it is not.
        loss_chunks: into how many.
        keep: how many micro-batches of a coupled loss keep their graph; ``None`` where the loss is not coupled.
        chunk: steps in a chunk of a sequence; ``None`` where the loss does not go over time.
        precision: of the forward, such as ``"bfloat16"``; empty for the user's own.
        size: samples, or padded cost, of a micro-batch at most; 0 where that is said beside it.

    Example:
        >>> Recipe(recompute=("layers.0",), loss_chunks=8, head="head").plain
        Recipe(recompute=(), offload=(), head='head', loss_chunks=8, keep=None, chunk=None, precision='', size=0.0)
    """

    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    head: str = ""
    loss_chunks: int = 1
    keep: int | None = None
    chunk: int | None = None
    precision: str = ""
    size: float = 0.0

    @property
    def plain(self) -> "Recipe":
        """The same without blocks that are recomputed or offloaded."""
        return replace(self, recompute=(), offload=())

    @classmethod
    def of(cls, row: PlanRow) -> "Recipe":
        """What a row of a plan says about the run of one micro-batch, whatever its size.

        Args:
            row: of a plan.
        """
        return cls(row.recompute, row.offload, row.head, row.loss_chunks, row.kept_graphs, row.chunk_length)
