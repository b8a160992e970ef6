"""Attention of Hugging Face decoders over KV caches: the caches, masks, positions, and what each layer needs."""
