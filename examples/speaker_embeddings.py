"""Who speaks? Export Resemblyzer's voice encoder, a 3-layer LSTM, and compare recordings.

    pip install Resemblyzer matplotlib soundfile
    python examples/speaker_embeddings.py [RECORDING.wav ...] [--plot similarity.png]

The program takes mel spectrograms of any length. Without recordings, three voices of espeak-ng each say two
sentences. The plot shows the cosine similarity of each pair of recordings.
"""

from __future__ import annotations

import argparse
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
from resemblyzer import VoiceEncoder, preprocess_wav, wav_to_mel_spectrogram

VOICES = ("en+m2", "en+f3", "en-us+croak")
SENTENCES = ("The quick brown fox jumps over the lazy dog.", "My mother told me to be home before six.")


def spoken(voice: str, sentence: str) -> np.ndarray:
    """Return a sentence of espeak-ng, at 16 kHz."""
    command = ["espeak-ng", "-v", voice, "--stdout", sentence]
    sound, rate = soundfile.read(io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout))
    return preprocess_wav(sound.astype(np.float32), rate)


def recordings(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return the samples of the recordings, or of voices of espeak-ng if there are no paths, by name."""
    if paths:
        return {p.stem: preprocess_wav(p) for p in paths}
    return {f"{voice} {i}": spoken(voice, text) for voice in VOICES for i, text in enumerate(SENTENCES, 1)}


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
            cosine = torch.cosine_similarity(embedding, encoder(mel))[0]
        print(f"{name}: {mel.shape[1]} frames, cosine to torch {cosine:.6f}")
        names.append(name)
        embeddings.append(embedding)
    similarity = torch.cat(embeddings) @ torch.cat(embeddings).T

    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    image = axes.imshow(similarity, vmin=0.5, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, label="cosine similarity")
    figure.savefig(options.plot, dpi=80)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
