"""`Embed`: embeddings of the rows of a dataset of Ray Data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Embed:
    """Adds embeddings to batches, for `map_batches` of Ray Data. Each actor of the pool loads the model once.

        import ray
        from executorch_mlx.ray import Embed

        texts = ray.data.read_parquet("texts.parquet")
        options = {"model": "minilm.pte", "column": "text"}
        texts.map_batches(Embed, fn_constructor_kwargs=options, batch_size=1024, concurrency=4).write_parquet("out")

    - `model`: the `.pte` file of an encoder, which every machine of the cluster must be able to read.
    - `column`: the column with the texts.
    - `output`: the column for the embeddings, float32 [N, D].
    - `device`: `cpu`, `gpu`, or None for the default.
    - `settings`: further arguments of `Encoder.encode`, such as `prompt_name` and `dimensions`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "text",
        output: str = "embedding",
        device: str | None = None,
        **settings: Any,
    ):
        from ..encoders import Encoder

        self._encoder = Encoder(model, device=device)
        self._column, self._output, self._settings = column, output, settings

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        texts = [str(text) for text in np.asarray(batch[self._column])]
        return batch | {self._output: self._encoder.encode(texts, **self._settings)}
