"""Log-mel features in the graph, from raw samples."""

from __future__ import annotations

import torch


class LogMel(torch.nn.Module):
    """Whisper's log-mel spectrogram: samples `[1, N]` float32 → features `[1, M, N / hop]` float32.

    `extractor` is a `WhisperFeatureExtractor`, which defines the mel filters [F, M], the length of a frame `n_fft` and
    the `hop` between frames. N must be a multiple of the hop. The Fourier transform is computed as a matrix product.
    """

    def __init__(self, extractor):
        super().__init__()
        self.size, self.hop = extractor.n_fft, extractor.hop_length
        frequencies = self.size // 2 + 1
        time = torch.arange(self.size, dtype=torch.float64)
        angles = time[:, None] * torch.arange(frequencies) * (2 * torch.pi / self.size)
        window = torch.hann_window(self.size, dtype=torch.float64)[:, None]
        transform = torch.cat([window * angles.cos(), window * angles.sin()], 1)
        filters = torch.as_tensor(extractor.mel_filters, dtype=torch.float32)
        self.register_buffer("transform", transform.float(), persistent=False)
        self.register_buffer("filters", filters, persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        spectrum = self._frames(samples[0]) @ self.transform
        real, imaginary = spectrum.chunk(2, dim=1)
        mel = (real * real + imaginary * imaginary) @ self.filters
        log = mel.clamp(min=1e-10).log10()
        log = torch.maximum(log, log.amax() - 8.0)
        return ((log + 4.0) / 4.0).T.unsqueeze(0)

    def _frames(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the frames `[N / hop, n_fft]`. Frame i is centred at sample `i * hop`. The ends are reflected."""
        half, count = self.size // 2, samples.shape[0] // self.hop
        padded = torch.cat([samples[1 : half + 1].flip(0), samples, samples[-half - 1 : -1].flip(0)])
        blocks = -(-self.size // self.hop)  # number of blocks of `hop` samples that a frame touches
        rows = padded[: (count + blocks - 1) * self.hop].reshape(-1, self.hop)
        return torch.cat([rows[i : i + count] for i in range(blocks)], 1)[:, : self.size]
