"""Small networks in plain torch."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    """The residual block of a ResNet-50."""

    def __init__(self, channels: int, inner: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = channels == out and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(8, 4, 16, 1),
        Bottleneck(16, 4, 16, 1),
        Bottleneck(16, 8, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, (torch.randn(2, 3, 32, 32),)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Hardsigmoid()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        return x * self.gate(self.up(torch.relu(self.down(self.pool(x)))))


class InvertedResidual(nn.Module):
    """The block of a MobileNetV3: expansion, depthwise convolution, squeeze-and-excite, projection."""

    def __init__(self, channels: int, inner: int, out: int, kernel: int, stride: int, act: type[nn.Module]):
        super().__init__()
        self.residual = channels == out and stride == 1
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            act(inplace=True),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            act(inplace=True),
            SqueezeExcite(inner),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x):
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(inplace=True),
        InvertedResidual(8, 16, 8, 3, 1, nn.ReLU),
        InvertedResidual(8, 16, 12, 5, 2, nn.Hardswish),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 24),
        nn.Hardswish(),
        nn.Dropout(0.2),
        nn.Linear(24, 10),
    )
    return model, (torch.randn(2, 3, 32, 32),)


class NormedBlock(nn.Module):
    """The residual block of a diffusion UNet. Adds the embedding of the time step between its two convolutions."""

    def __init__(self, channels: int, out: int, time: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(4, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x, time):
        return self.second(self.first(x) + self.time(time)[:, :, None, None]) + self.shortcut(x)


class UNet(nn.Module):
    """One level of a diffusion model's UNet."""

    def __init__(self, channels: int = 8, time: int = 16):
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -3, time // 2), persistent=False)
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = NormedBlock(channels, channels, time)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = NormedBlock(channels, 2 * channels, time)
        self.grow = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(2 * channels, channels, 3, padding=1)
        )
        self.up = NormedBlock(2 * channels, channels, time)
        self.leave = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x, step):
        angles = step[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = wide = self.down(self.enter(x), time)
        x = self.grow(self.middle(self.shrink(x), time))
        return self.leave(self.up(torch.cat([x, wide], dim=1), time))


def unet():
    return UNet(), (torch.randn(2, 3, 16, 16), torch.tensor([3.0, 40.0]))


class Recurrent(nn.Module):
    """A classifier of token sequences: embedding, two recurrent layers, a head on the last state."""

    def __init__(self, kind: type[nn.Module], bidirectional: bool):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = kind(16, 24, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(48 if bidirectional else 24, 5)

    def forward(self, tokens):
        states, _ = self.layers(self.embedding(tokens))
        return self.head(states[:, -1]), states


def lstm():
    return Recurrent(nn.LSTM, bidirectional=True), (torch.randint(0, 32, (2, 6)),)


def gru():
    return Recurrent(nn.GRU, bidirectional=False), (torch.randint(0, 32, (2, 6)),)
