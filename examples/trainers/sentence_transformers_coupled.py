"""The trainer of sentence-transformers with all pairs of the batch, in the memory of a micro-batch: Coupled."""

from typing import Any

from sentence_transformers import SentenceTransformerTrainer

from anybatch import Coupled, backward


class CoupledTrainer(SentenceTransformerTrainer):
    """For losses that are computed from embeddings."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Encodes in micro-batches of 8, and compares all pairs."""
        columns, labels = self.collect_features(self._prepare_inputs(inputs))
        encode = lambda model, batch: [model(one)["sentence_embedding"] for _, one in sorted(batch.items())]  # noqa: E731
        coupled = Coupled(encode, lambda model, found, batch: self.loss.compute_loss_from_embeddings(found, labels))
        out = backward(model.train(), coupled, dict(zip("abcdefgh", columns, strict=False)), micro_batch_size=8)
        return next(iter(columns[0].values())).new_tensor(out.loss, dtype=next(model.parameters()).dtype)
