"""MLX's packings of quantized weights, in torch.

A packed matrix [N, K] is `w`, uint32 [N, K * bits / 32], or the same bits as int32, which
ExecuTorch's edge dialect knows. A row is one stream of bits, the least significant first.
Groups of `group_size` numbers in a row share a scale. `mode` is MLX's:

    affine   integers q; q * scales + biases, both of a float dtype [N, K / group_size]
    mxfp4    E2M1, scales E8M0 in uint8, groups of 32
    nvfp4    E2M1, scales E4M3 in uint8, groups of 16
    mxfp8    E4M3, scales E8M0 in uint8, groups of 32
"""

from __future__ import annotations

import torch

# (bits, group_size) of the modes whose scales are bytes.
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(w: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [..., K * bits / 32] → the numbers, uint8 [..., K]."""
    octets = w.contiguous().view(torch.uint8)
    if bits in (2, 4, 8):
        lanes = [octets >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        return torch.stack(lanes, -1).flatten(-2)
    # Eight numbers fill `bits` octets.
    octets = octets.unflatten(-1, (-1, bits)).to(torch.int16)
    lanes = []
    for first in range(0, 8 * bits, bits):
        octet, shift = divmod(first, 8)
        lane = octets[..., octet] >> shift
        if shift + bits > 8:
            lane = lane | octets[..., octet + 1] << (8 - shift)
        lanes.append(lane & (2**bits - 1))
    return torch.stack(lanes, -1).flatten(-2).to(torch.uint8)


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers in [0, 2^bits), uint8 [..., K] with K a multiple of 32 → uint32 [..., K * bits / 32]."""
    q = q.detach()
    if bits == 8:
        octets = q
    elif bits in (2, 4):
        lanes = q.unflatten(-1, (-1, 8 // bits)).unbind(-1)
        octets = lanes[0].clone()
        for i, lane in enumerate(lanes[1:], 1):
            octets |= lane << (bits * i)
    else:
        lanes = q.unflatten(-1, (-1, 8)).to(torch.int16).unbind(-1)
        spread = torch.zeros(*lanes[0].shape, bits, dtype=torch.int16)
        for i, lane in enumerate(lanes):
            octet, shift = divmod(i * bits, 8)
            spread[..., octet] |= lane << shift & 255
            if shift + bits > 8:
                spread[..., octet + 1] |= lane >> (8 - shift)
        octets = spread.flatten(-2).to(torch.uint8)
    return octets.contiguous().view(torch.uint32)


def quantize(
    w: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floats [..., K] in affine mode: `w`, `scales`, `biases`; the last two of `dtype`, by default
    that of `w`. Raises ValueError if no packing divides K.

    A group spans from its least to its greatest number, in steps that are laid out from the one of
    larger magnitude and moved so that 0 is one of them.
    """
    if w.shape[-1] % max(group_size, 32):
        raise ValueError(
            f"quantize: rows of {w.shape[-1]} numbers, expected a multiple of {max(group_size, 32)}"
        )
    dtype = w.dtype if dtype is None else dtype
    x = w.detach().float().unflatten(-1, (-1, group_size))
    least, greatest = x.amin(-1), x.amax(-1)
    step = ((greatest - least) / (2**bits - 1)).clamp_(min=1e-7)
    downwards = least.abs() <= greatest.abs()
    step = torch.where(downwards, -step, step)
    edge = torch.where(downwards, greatest, least)
    steps_to_zero = (edge / step).round_()
    at_zero = steps_to_zero == 0
    step = torch.where(at_zero, step, edge / steps_to_zero)
    scales, biases = step.to(dtype), torch.where(at_zero, 0, edge).to(dtype)
    # As they are stored: the integers make up for what the cast took.
    x = x.sub(biases.float().unsqueeze(-1)).div_(scales.float().unsqueeze(-1))
    q = x.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return pack(q, bits), scales, biases


def dequantize(
    w: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    group_size: int,
    bits: int,
    mode: str = "affine",
) -> torch.Tensor:
    """The packed numbers as float32 [..., K]. Raises ValueError if the operands do not fit."""
    check(w, scales, biases, group_size, bits, mode)
    q = unpack(w, bits).unflatten(-1, (-1, group_size))
    if mode == "affine":
        x = q * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
    else:
        x = _float_of(q, bits) * _scale_of(scales, mode).unsqueeze(-1)
    return x.flatten(-2)


def _float_of(q: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return q.view(torch.float8_e4m3fn).float()
    table = torch.tensor(_E2M1 + tuple(-x for x in _E2M1))
    return table[q.long()]


def _scale_of(scales: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "nvfp4":
        return scales.view(torch.float8_e4m3fn).float()
    return torch.exp2(scales.float() - 127)


def check(w, scales, biases, group_size, bits, mode) -> None:
    """ValueError if these do not describe a packed tensor."""
    if mode not in ("affine", *FLOAT_MODES):
        raise ValueError(f"mlx: mode is {mode!r}, expected affine, {', '.join(FLOAT_MODES)}")
    if w.dtype not in (torch.uint32, torch.int32) or scales.dim() != w.dim():
        raise ValueError(
            f"mlx: w is {w.dtype} {list(w.shape)} and scales {list(scales.shape)}, expected "
            "32-bit words and as many axes"
        )
    columns = w.shape[-1] * 32 // bits
    expected = [*w.shape[:-1], columns // group_size]
    if columns % group_size or list(scales.shape) != expected:
        raise ValueError(f"mlx: scales are {list(scales.shape)}, expected {expected}")
    if mode == "affine":
        if biases is None or biases.shape != scales.shape or not scales.is_floating_point():
            raise ValueError("mlx: affine needs floating scales, and biases of their shape")
    elif (bits, group_size) != FLOAT_MODES[mode] or scales.dtype != torch.uint8:
        raise ValueError(
            f"mlx: {mode} has (bits, group_size) {FLOAT_MODES[mode]} and uint8 scales, came "
            f"{(bits, group_size)} and {scales.dtype}"
        )
