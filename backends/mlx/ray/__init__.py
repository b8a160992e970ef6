"""Work on a Ray cluster: batches by engine actors, and the OpenAI API by Ray Serve. Needs the extra `ray`."""

from .serving import serve_app

__all__ = ["serve_app"]
