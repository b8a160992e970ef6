"""MLX's packings of quantized weights, in torch.

A packed matrix [N, K] consists of `w`, `scales` and, in one format, `biases`. `w` is uint32 [N, K * bits / 32].
ExecuTorch's edge dialect lacks uint32, so int32 with the same bits is accepted too. Each matrix row of `w` is a stream
of bits, least significant bit first. Each group of `group_size` consecutive values shares a scale. `mode` is MLX's name
of the format:

    affine   integers q; the value is q * scales + biases, with scales and biases of a float dtype [N, K / group_size]
    mxfp4    E2M1 elements, E8M0 scales in uint8, groups of 32
    nvfp4    E2M1 elements, E4M3 scales in uint8, groups of 16
    mxfp8    E4M3 elements, E8M0 scales in uint8, groups of 32
"""

from __future__ import annotations

import torch

# Mode → (bits, group_size), for the modes whose scales are 8-bit floats.
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(w: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the elements of a packed tensor `w` [..., K * bits / 32], as uint8 [..., K]."""
    bytes_ = w.contiguous().view(torch.uint8)
    if bits in (2, 4, 8):
        lanes = [bytes_ >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        return torch.stack(lanes, -1).flatten(-2)
    # Eight elements fill `bits` bytes.
    bytes_ = bytes_.unflatten(-1, (-1, bits)).to(torch.int16)
    lanes = []
    for first in range(0, 8 * bits, bits):
        byte, shift = divmod(first, 8)
        lane = bytes_[..., byte] >> shift
        if shift + bits > 8:
            lane = lane | bytes_[..., byte + 1] << (8 - shift)
        lanes.append(lane & (2**bits - 1))
    return torch.stack(lanes, -1).flatten(-2).to(torch.uint8)


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers in [0, 2^bits), uint8 [..., K], to uint32 [..., K * bits / 32]. K must be a multiple of 32."""
    q = q.detach()
    if bits == 8:
        bytes_ = q
    elif bits in (2, 4):
        lanes = q.unflatten(-1, (-1, 8 // bits)).unbind(-1)
        bytes_ = lanes[0].clone()
        for i, lane in enumerate(lanes[1:], 1):
            bytes_ |= lane << (bits * i)
    else:
        lanes = q.unflatten(-1, (-1, 8)).to(torch.int16).unbind(-1)
        spread = torch.zeros(*lanes[0].shape, bits, dtype=torch.int16)
        for i, lane in enumerate(lanes):
            byte, shift = divmod(i * bits, 8)
            spread[..., byte] |= lane << shift & 255
            if shift + bits > 8:
                spread[..., byte + 1] |= lane >> (8 - shift)
        bytes_ = spread.flatten(-2).to(torch.uint8)
    return bytes_.contiguous().view(torch.uint32)


def quantize(
    w: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize floats [..., K] in affine mode.

    Returns (packed, scales, biases). `packed` is the packed `w`; `scales` and `biases` have `dtype`, by default the
    dtype of `w`. Raises ValueError unless K is a multiple of `group_size` and of 32.

    The quantized values of a group are evenly spaced from its minimum to its maximum. They start at the edge, which is
    the minimum or the maximum, whichever has the larger magnitude. The edge is represented exactly. The step between
    the values is adjusted so that 0 is represented exactly too.
    """
    if w.shape[-1] % max(group_size, 32):
        raise ValueError(f"quantize: w: got {w.shape[-1]} columns, expected a multiple of {max(group_size, 32)}")
    dtype = w.dtype if dtype is None else dtype
    x = w.detach().float().unflatten(-1, (-1, group_size))
    minimum, maximum = x.amin(-1), x.amax(-1)
    step = ((maximum - minimum) / (2**bits - 1)).clamp_(min=1e-7)
    is_downward = minimum.abs() <= maximum.abs()
    step = torch.where(is_downward, -step, step)
    edge = torch.where(is_downward, maximum, minimum)
    steps_to_zero = (edge / step).round_()
    at_zero = steps_to_zero == 0
    step = torch.where(at_zero, step, edge / steps_to_zero)
    scales, biases = step.to(dtype), torch.where(at_zero, 0, edge).to(dtype)
    # q is computed with the scales and biases after their cast to `dtype`, so that q compensates for the rounding.
    x = x.sub(biases.float().unsqueeze(-1)).div_(scales.float().unsqueeze(-1))
    q = x.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return pack(q, bits), scales, biases


def dequantize(
    w: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor | None, group_size: int, bits: int, mode: str = "affine"
) -> torch.Tensor:
    """Return the values of a packed tensor, float32 [..., K].

    Raises ValueError unless the operands describe a packed tensor.
    """
    check(w, scales, biases, group_size, bits, mode)
    q = unpack(w, bits).unflatten(-1, (-1, group_size))
    if mode == "affine":
        x = q.float().mul_(scales.float().unsqueeze(-1)).add_(biases.float().unsqueeze(-1))
    else:
        x = decode_elements(q, bits) * decode_scales(scales, mode).unsqueeze(-1)
    return x.flatten(-2)


def decode_elements(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of E2M1 elements (4 bits) or E4M3 elements (8 bits), float32. `q` is uint8."""
    if bits == 8:
        return q.view(torch.float8_e4m3fn).float()
    table = torch.tensor(_E2M1 + tuple(-x for x in _E2M1))
    return table[q.long()]


def decode_scales(scales: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the values of the scales of `mode`, float32. `scales` is uint8."""
    if mode == "nvfp4":
        return scales.view(torch.float8_e4m3fn).float()
    return torch.exp2(scales.float() - 127)


def check(w, scales, biases, group_size, bits, mode) -> None:
    """Raise ValueError unless the operands describe a packed tensor."""
    if mode not in ("affine", *FLOAT_MODES):
        raise ValueError(f"mlx: mode: got {mode!r}, expected one of affine, {', '.join(FLOAT_MODES)}")
    if w.dtype not in (torch.uint32, torch.int32) or scales.dim() != w.dim():
        raise ValueError(
            f"mlx: w: got {w.dtype} {list(w.shape)} with scales {list(scales.shape)}, expected uint32 or int32 and "
            "as many dimensions as the scales"
        )
    columns = w.shape[-1] * 32 // bits
    expected = [*w.shape[:-1], columns // group_size]
    if columns % group_size:
        raise ValueError(f"mlx: w: got {columns} columns, expected a multiple of the group size {group_size}")
    if list(scales.shape) != expected:
        raise ValueError(f"mlx: scales: got shape {list(scales.shape)}, expected {expected}")
    if mode == "affine":
        if biases is None or biases.shape != scales.shape or not scales.is_floating_point():
            raise ValueError("mlx: mode affine: expected float scales, and biases of the same shape")
    elif (bits, group_size) != FLOAT_MODES[mode] or scales.dtype != torch.uint8:
        raise ValueError(
            f"mlx: mode {mode}: got (bits, group_size) {(bits, group_size)} and {scales.dtype} scales, expected "
            f"{FLOAT_MODES[mode]} and uint8 scales"
        )
