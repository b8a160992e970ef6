"""The pitch of a sound over time: export torchcrepe's network, and compare with torch.

    pip install torchcrepe matplotlib
    python examples/pitch.py [RECORDING.wav] [--plot pitch.png] [--model tiny|full]

The network takes windows of 1,024 samples at 16 kHz. For each window, it returns the probabilities of 360 pitches.
Without a recording, the sound is a tone that glides from 110 to 440 Hz with vibrato. The plot shows the probabilities
and the pitch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torchcrepe
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime

RATE = torchcrepe.SAMPLE_RATE
HOP = 160  # samples from the begin of a window to the begin of the next


def glide(seconds: float = 3.0) -> torch.Tensor:
    """Return a tone [1, samples] with five harmonics that rises by two octaves."""
    t = np.arange(int(seconds * RATE)) / RATE
    frequency = 110 * 4 ** (t / seconds) * (1 + 0.02 * np.sin(2 * np.pi * 5 * t))
    phase = 2 * np.pi * np.cumsum(frequency) / RATE
    tone = sum(np.sin(k * phase) / k for k in range(1, 6))
    return torch.tensor(0.2 * tone, dtype=torch.float32)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("pitch.png"))
    parser.add_argument("--model", choices=("tiny", "full"), default="full")
    options = parser.parse_args()

    torchcrepe.load.model("cpu", options.model)
    network = torchcrepe.infer.model
    sound, rate = glide(), RATE
    if options.recording is not None:
        sound, rate = torchcrepe.load.audio(str(options.recording))
    windows = next(torchcrepe.preprocess(sound[:1], rate, HOP)).contiguous()
    start = time.perf_counter()
    exported = torch.export.export(network, (windows,))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    buffer = manager.to_executorch().buffer
    print(f"exported in {time.perf_counter() - start:.1f} s: {partitioner.explain()}")

    program = Runtime.get().load_program(buffer)
    probabilities = program.load_method("forward").execute([windows])[0]
    with torch.no_grad():
        cosine = torch.cosine_similarity(probabilities.flatten(), network(windows).flatten(), dim=0)
    print(f"{len(windows)} windows, cosine to torch {cosine:.6f}")
    best = probabilities.argmax(1)
    pitch = torchcrepe.convert.bins_to_frequency(best)
    pitch[probabilities.max(1).values < 0.5] = torch.nan  # the window has no clear pitch

    seconds = np.arange(len(windows)) * HOP / RATE
    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7, 5), layout="constrained")
    upper.imshow(probabilities.T, origin="lower", aspect="auto", extent=(0, seconds[-1], 0, 360))
    upper.set_ylabel("pitch bin (20 cents)")
    lower.semilogy(seconds, pitch)
    lower.set_xlabel("time (s)")
    lower.set_ylabel("pitch (Hz)")
    figure.savefig(options.plot, dpi=80)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
