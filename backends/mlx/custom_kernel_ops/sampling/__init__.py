"""The ways in which `mlx::sample` chooses a token, in torch. `../sample.py` explains them and chooses among them."""
