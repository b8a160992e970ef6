"""Searches texts by meaning: an encoder finds candidates, and a reranker, if there is one, orders them.

executorch-mlx export sentence-transformers/all-MiniLM-L6-v2 -o minilm.pte
executorch-mlx export cross-encoder/ms-marco-MiniLM-L6-v2 -o reranker.pte
python examples/search.py minilm.pte "How do I save a tensor?" docs/*.md --reranker reranker.pte

Each paragraph of the files is a text. Needs no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from executorch_mlx import Encoder

CANDIDATES = 20


def paragraphs(paths: list[Path]) -> list[str]:
    """Return the paragraphs of text files that have more than a few words."""
    texts = [text.strip() for path in paths for text in path.read_text(encoding="utf-8").split("\n\n")]
    return [text for text in dict.fromkeys(texts) if len(text.split()) > 5]


def search(encoder: Encoder, query: str, texts: list[str], count: int) -> list[tuple[float, str]]:
    """Return the `count` texts whose embeddings are most similar to that of the query, with their similarity."""
    names = encoder.config.prompts
    vectors = encoder.encode(texts, prompt_name="document" if "document" in names else None, normalize=True)
    similar = vectors @ encoder.encode(query, prompt_name="query" if "query" in names else None, normalize=True)
    return [(float(similar[index]), texts[index]) for index in np.argsort(-similar)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoder", type=Path, help=".pte file of an embedding model")
    parser.add_argument("query")
    parser.add_argument("files", type=Path, nargs="+", help="text files")
    parser.add_argument("--reranker", type=Path, help=".pte file of a reranker")
    parser.add_argument("--count", type=int, default=3, help="number of results (default: %(default)s)")
    options = parser.parse_args()
    with Encoder(options.encoder) as encoder:
        found = search(encoder, options.query, paragraphs(options.files), CANDIDATES)
    if options.reranker is not None:
        with Encoder(options.reranker) as reranker:
            ranked = reranker.rerank(options.query, [text for _, text in found])
        found = [(entry.score, found[entry.index][1]) for entry in ranked]
    for score, text in found[: options.count]:
        print(f"{score:.3f}  {' '.join(text.split())[:160]}")


if __name__ == "__main__":
    main()
