"""Work on a Ray cluster: batches by engine actors, embeddings with Ray Data, and the OpenAI API by Ray Serve.

Needs the extra `ray`.
"""

from .embed import Embed
from .serving import serve_app

__all__ = ["Embed", "serve_app"]
