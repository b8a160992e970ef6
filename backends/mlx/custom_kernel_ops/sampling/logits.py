"""Logits as matrices of columns or blocks, and arithmetic that is safe for NaN and infinite logits."""

from __future__ import annotations

import torch

LARGEST_FLOAT = 3.4028234663852886e38  # float32


def split_blocks(x, size):
    """Return `[B, V]` as `[B, blocks, n]` with n near `size`, padded with -inf. A block holds consecutive tokens."""
    vocabulary = x.shape[1]
    count = next((vocabulary // n for n in _near(size) if vocabulary % n == 0), None)
    if count is None:
        count = -(-vocabulary // size)
        x = torch.nn.functional.pad(x, (0, count * size - vocabulary), value=-torch.inf)
    return x.reshape(x.shape[0], count, x.shape[1] // count)


def split_columns(x, height, padding=-torch.inf):
    """Return `[B, V]` as `[B, n, C]`: C columns of n tokens, with n near `height`, padded with `padding`.

    Token `i * C + j` is at `[i, j]`.

    MLX vectorizes a reduction over n, which is four times faster than one over the last dimension.
    """
    vocabulary = x.shape[1]
    n = next((n for n in _near(height) if vocabulary % n == 0), height)
    if vocabulary % n:
        x = torch.nn.functional.pad(x, (0, -vocabulary % n), value=padding)
    return x.reshape(x.shape[0], n, x.shape[1] // n)


def _near(size):
    """Return the integers from size / 2 to 2 * size, those nearest to `size` first."""
    return sorted(range(size // 2, 2 * size + 1), key=lambda n: abs(n - size))


def pick(x, columns):
    """Return the columns of `x` `[B, n, C]` with the indices `columns` `[B, K]`, flattened to `[B, n * K]`."""
    return x.gather(2, columns.unsqueeze(1).expand(-1, x.shape[1], -1)).flatten(1)


def token_ids(columns, logits):
    """Return the token ids of the elements that `pick(logits, columns)` returns."""
    _, n, width = logits.shape
    start = torch.arange(0, n * width, width).reshape(1, n, 1)
    return (start + columns.unsqueeze(1)).flatten(1)


def lowest_id(token, is_best):
    """Return, for each sequence, the lowest of the token ids whose `is_best` is True."""
    return torch.where(is_best, token, torch.iinfo(torch.int64).max).amin(-1)


def indices_of_largest(x, count):
    """Return the indices of the `count` largest elements of each sequence, in no particular order."""
    size = x.shape[1]
    return torch.ops.mlx.argpartition(x, size - count, -1)[:, size - count :]


def row_max(logits):
    """Return the largest logit of each sequence, `[B, 1]`. It is finite even if all logits are -inf."""
    return torch.clamp(logits.amax(-1, keepdim=True), min=-LARGEST_FLOAT)


def replace_nan(logits):
    """Replace NaN by -inf, which never wins."""
    return torch.where(logits != logits, -torch.inf, logits)


def replace_nan_and_inf(logits):
    """Replace NaN by -inf, and +inf by the largest float32.

    With +inf, differences from the largest logit would be NaN.
    """
    return torch.clamp(replace_nan(logits), max=LARGEST_FLOAT)
