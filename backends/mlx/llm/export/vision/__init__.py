"""The pictures of a vision-language model: the methods that turn them into embeddings, and how a prompt has them."""
