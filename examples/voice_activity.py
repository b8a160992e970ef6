"""When does somebody speak? Export silero-vad's network, and compare with torch.

    pip install --no-deps silero-vad && pip install matplotlib soundfile
    python examples/voice_activity.py [RECORDING.wav] [--plot voice.png]

The network takes windows of 512 samples at 16 kHz, each behind the 64 samples before it, and keeps a state from window
to window. The program takes a recording of any length. Without a recording, espeak-ng speaks two sentences into noise.
The plot shows the sound and the probability of speech.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import subprocess
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import soundfile
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime, dynamic_steps
from safetensors.torch import load_file
from torch import nn

RATE, WINDOW, CONTEXT = 16000, 512, 64


class VoiceActivity(nn.Module):
    """Takes windows [N, 576], and returns the probability of speech in each of them, [N]."""

    def __init__(self):
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTM(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, windows):
        padded = nn.functional.pad(windows[:, None], (0, CONTEXT), mode="reflect")
        real, imaginary = self.stft_conv(padded).chunk(2, 1)
        x = (real**2 + imaginary**2).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        states, _ = self.lstm_cell(x.squeeze(-1))
        return self.final_conv(states.relu()[..., None]).sigmoid().flatten()


def trained() -> VoiceActivity:
    """Return the network with the weights of the package, which need not be imported."""
    package = Path(importlib.util.find_spec("silero_vad").origin).parent
    weights = load_file(package / "data" / "silero_vad_16k.safetensors")
    layer = "lstm_cell."
    network = VoiceActivity()
    network.load_state_dict({name + "_l0" * name.startswith(layer): value for name, value in weights.items()})
    return network.eval().requires_grad_(False)


def spoken() -> np.ndarray:
    """Return two sentences of espeak-ng in soft noise, with silence around them."""
    parts = [np.zeros(RATE)]
    for sentence in ("The quick brown fox jumps over the lazy dog.", "Nobody is here."):
        file = subprocess.run(["espeak-ng", "--stdout", sentence], check=True, capture_output=True).stdout
        parts += [resampled(*soundfile.read(io.BytesIO(file))), np.zeros(RATE)]
    sound = np.concatenate(parts)
    return sound + 0.003 * np.random.default_rng(0).standard_normal(len(sound))


def resampled(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return the first channel of a sound at 16 kHz."""
    sound = sound if sound.ndim == 1 else sound[:, 0]
    return np.interp(np.arange(0, len(sound), rate / RATE), np.arange(len(sound)), sound)


def windows_of(sound: np.ndarray) -> torch.Tensor:
    """Return the windows of a sound, each behind the samples before it, [N, 576]."""
    count = -(-len(sound) // WINDOW)
    padded = torch.zeros(CONTEXT + count * WINDOW)
    padded[CONTEXT : CONTEXT + len(sound)] = torch.from_numpy(sound)
    return padded.unfold(0, CONTEXT + WINDOW, WINDOW).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("voice.png"))
    options = parser.parse_args()

    network = trained()
    sound = spoken() if options.recording is None else resampled(*soundfile.read(options.recording))
    windows = windows_of(sound)
    number = torch.export.Dim("windows", min=2, max=6000)
    start = time.perf_counter()
    with dynamic_steps():
        exported = torch.export.export(network, (windows,), dynamic_shapes=({0: number},))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    buffer = manager.to_executorch().buffer
    print(f"exported in {time.perf_counter() - start:.1f} s: {partitioner.explain()}")

    program = Runtime.get().load_program(buffer)
    probability = program.load_method("forward").execute([windows])[0]
    cosine = torch.cosine_similarity(probability, network(windows), dim=0)
    print(f"{len(windows)} windows, speech in {(probability > 0.5).sum()}; cosine to torch {cosine:.6f}")

    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 4), layout="constrained")
    upper.plot(np.arange(len(sound)) / RATE, sound, linewidth=0.5)
    upper.set_ylabel("sound")
    lower.plot(np.arange(len(windows)) * WINDOW / RATE, probability)
    lower.axhline(0.5, color="grey", linewidth=0.5)
    lower.set_ylabel("probability of speech")
    lower.set_xlabel("time (s)")
    figure.savefig(options.plot, dpi=80)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
