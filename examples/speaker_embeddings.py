"""Who speaks? Export Resemblyzer's voice encoder, a 3-layer LSTM, and compare recordings.

    pip install Resemblyzer matplotlib
    python examples/speaker_embeddings.py [RECORDING.wav ...] [--plot similarity.png]

The program takes mel spectrograms of any length. Without recordings, three synthetic voices each say two vowels. The
plot shows the cosine similarity of each pair of recordings.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime, dynamic_steps
from resemblyzer import VoiceEncoder, preprocess_wav, wav_to_mel_spectrogram
from scipy.signal import lfilter

RATE = 16000
VOICES = {"low": (95, 0.9), "middle": (160, 1.0), "high": (240, 1.15)}  # pitch in Hz, factor for the formants
VOWELS = {"a": (730, 1090, 2440), "i": (270, 2290, 3010)}  # formants in Hz


def synthesize(pitch: float, formant_factor: float, formants: tuple[float, ...], seconds: float) -> np.ndarray:
    """Return a vowel: pulses of a slightly varying pitch, filtered by resonances at the formants."""
    t = np.arange(int(seconds * RATE)) / RATE
    phase = np.cumsum(pitch * (1 + 0.03 * np.sin(2 * np.pi * 3 * t))) / RATE
    sound = np.diff(np.floor(phase), prepend=0) + 0.003 * np.random.default_rng(0).standard_normal(len(t))
    for formant in formants:
        pole = np.exp((-np.pi * 90 + 2j * np.pi * formant * formant_factor) / RATE)  # a resonance of 90 Hz bandwidth
        sound = lfilter([1], [1, -2 * pole.real, abs(pole) ** 2], sound)
    return (0.1 * sound / np.abs(sound).max()).astype(np.float32)


def recordings(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return the samples of the recordings, or of synthetic vowels if there are no paths, by name."""
    if paths:
        return {p.stem: preprocess_wav(p) for p in paths}
    return {
        f"{voice} {vowel}": synthesize(*VOICES[voice], VOWELS[vowel], seconds)
        for voice in VOICES
        for vowel, seconds in (("a", 1.6), ("i", 2.5))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("similarity.png"))
    options = parser.parse_args()

    encoder = VoiceEncoder("cpu", verbose=False).eval()
    frames = torch.export.Dim("frames", min=1, max=6000)
    start = time.perf_counter()
    with dynamic_steps():
        exported = torch.export.export(encoder, (torch.randn(1, 160, 40),), dynamic_shapes=({1: frames},))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    buffer = manager.to_executorch().buffer
    print(f"exported in {time.perf_counter() - start:.1f} s: {partitioner.explain()}")

    program = Runtime.get().load_program(buffer)
    method = program.load_method("forward")
    names, embeddings = [], []
    for name, sound in recordings(options.recordings).items():
        mel = torch.from_numpy(wav_to_mel_spectrogram(sound)).contiguous()[None]
        embedding = method.execute([mel])[0]
        with torch.no_grad():
            error = (embedding - encoder(mel)).abs().max()
        print(f"{name}: {mel.shape[1]} frames, difference from torch {error:.1e}")
        names.append(name)
        embeddings.append(embedding)
    similarity = torch.cat(embeddings) @ torch.cat(embeddings).T

    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    image = axes.imshow(similarity, vmin=0.5, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, label="cosine similarity")
    figure.savefig(options.plot, dpi=150)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
