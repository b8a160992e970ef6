"""Where are faces? Export the three networks of MTCNN with the weights of facenet-pytorch, and compare with torch.

    pip install --no-deps facenet-pytorch && pip install pillow scikit-image
    python examples/faces.py [PICTURE.jpg] [--plot faces.jpg]

The first network looks for faces in the picture at several sizes, the second one refuses most of what it finds, and the
last one finds eyes, nose and mouth. Each of them is one program. Without a picture, it is the portrait of an astronaut
by NASA, which scikit-image has.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from PIL import Image, ImageDraw
from torch import nn

SMALLEST, FACTOR = 24, 0.709  # pixels of the smallest face, and the factor from size to size
CELL, STRIDE = 12, 2  # of the first network: the pixels that a result depends on, and between two of them
LEAST = 16  # pixels of an edge of its input, which is even
WEIGHTS = Path(importlib.util.find_spec("facenet_pytorch").origin).parent / "data"


class Network(nn.Module):
    """Convolutions `conv1`, `conv2` … with pooling between them, and a result for each of `heads`.

    - `kernels`: the size of each convolution. `channels`: the channels of the input and of each result.
    - `pools`: the size of the pooling behind each convolution, 1 for none.
    - `hidden`: the name and width of a linear layer behind them, or None: the heads are convolutions of one pixel.
    - `heads`: the name and the width of each result. The first one is the logits of no face and of a face.
    """

    def __init__(self, channels, kernels, pools, hidden, heads):
        super().__init__()
        self.pools, self.hidden, self.heads = pools, hidden, list(heads)
        for i, kernel in enumerate(kernels, 1):
            self.add_module(f"conv{i}", nn.Conv2d(channels[i - 1], channels[i], kernel))
            self.add_module(f"prelu{i}", nn.PReLU(channels[i]))
        if hidden is not None:
            self.add_module(f"dense{hidden[0]}", nn.Linear(channels[-1] * 9, hidden[1]))
            self.add_module(f"prelu{hidden[0]}", nn.PReLU(hidden[1]))
        for name, width in heads.items():
            self.add_module(name, nn.Conv2d(channels[-1], width, 1) if hidden is None else nn.Linear(hidden[1], width))

    def forward(self, pixels):
        x = pixels
        for i, pool in enumerate(self.pools, 1):
            x = getattr(self, f"prelu{i}")(getattr(self, f"conv{i}")(x))
            x = x if pool == 1 else nn.functional.max_pool2d(x, pool, 2, ceil_mode=True)
        if self.hidden is not None:
            x = getattr(self, f"dense{self.hidden[0]}")(x.permute(0, 3, 2, 1).flatten(1))
            x = getattr(self, f"prelu{self.hidden[0]}")(x)
        logits, *others = (getattr(self, name)(x) for name in self.heads)
        return logits.softmax(1)[:, 1], *others


def network(name: str) -> Network:
    """Return one of the networks with its weights."""
    settings = {
        "pnet": ((3, 10, 16, 32), (3, 3, 3), (2, 1, 1), None, {"conv4_1": 2, "conv4_2": 4}),
        "rnet": ((3, 28, 48, 64), (3, 3, 2), (3, 3, 1), ("4", 128), {"dense5_1": 2, "dense5_2": 4}),
        "onet": ((3, 32, 64, 64, 128), (3, 3, 3, 2), (3, 3, 2, 1), ("5", 256), {"dense6_1": 2, "dense6_2": 4}),
    }
    channels, kernels, pools, hidden, heads = settings[name]
    heads |= {"dense6_3": 10} if name == "onet" else {}
    found = Network(channels, kernels, pools, hidden, heads)
    found.load_state_dict(torch.load(WEIGHTS / f"{name}.pt", weights_only=True))
    return found.eval().requires_grad_(False)


def exported(module: Network, example: torch.Tensor, shapes: dict) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return a function that runs the program of `module`, and prints its cosine to torch."""
    program = torch.export.export(module, (example,), dynamic_shapes=(shapes,))
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner])
    loaded = Runtime.get().load_program(manager.to_executorch().buffer)
    method = loaded.load_method("forward")

    def run(pixels: torch.Tensor) -> list[torch.Tensor]:
        results = method.execute([pixels.contiguous()])
        pairs = [torch.cat([x.flatten() for x in found]) for found in (results, module(pixels))]
        print(f"input {tuple(pixels.shape)}: cosine to torch {torch.cosine_similarity(*pairs, dim=0):.6f}")
        return results

    print(partitioner.explain())
    return run


def pixels_of(picture: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    levels = np.asarray(picture.resize(size, Image.BILINEAR), np.float32)
    return torch.from_numpy((levels - 127.5) / 128).permute(2, 0, 1)[None]


def best(boxes: torch.Tensor, scores: torch.Tensor, most: float) -> torch.Tensor:
    """Return the indices of boxes, best first, that overlap better ones by at most `most` of their union."""
    kept, order = [], scores.argsort(descending=True)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        corners = torch.maximum(boxes[order, :2], boxes[first, :2]), torch.minimum(boxes[order, 2:], boxes[first, 2:])
        shared = (corners[1] - corners[0]).clamp(min=0).prod(1)
        order = order[shared <= most * (areas[order] + areas[first] - shared)]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.int64)


def moved(boxes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return boxes whose corners move by `offsets`, which are parts of their sizes."""
    return boxes + offsets * (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)


def square(boxes: torch.Tensor) -> torch.Tensor:
    """Return squares around boxes with the same centres."""
    half = (boxes[:, 2:] - boxes[:, :2]).max(1, keepdim=True).values / 2
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    return torch.cat([centre - half, centre + half], 1).round()


def proposals(picture: Image.Image, run: Callable) -> torch.Tensor:
    """Return squares that may be faces, from the picture in several sizes."""
    found, offsets, scores = [], [], []
    scale = CELL / SMALLEST
    while min(picture.size) * scale >= LEAST:
        probability, move = run(pixels_of(picture, tuple(2 * round(edge * scale / 2) for edge in picture.size)))
        rows, columns = torch.where(probability[0] > 0.6)
        corner = torch.stack([columns, rows], 1) * STRIDE
        found.append(torch.cat([corner, corner + CELL], 1) / scale)
        offsets.append(move[0, :, rows, columns].T)
        scores.append(probability[0, rows, columns])
        scale *= FACTOR
    boxes, scores = torch.cat(found), torch.cat(scores)
    kept = best(boxes, scores, 0.5)
    return square(moved(boxes[kept], torch.cat(offsets)[kept]))


def crops(picture: Image.Image, boxes: torch.Tensor, edge: int) -> torch.Tensor:
    return torch.cat([pixels_of(picture.crop(box), (edge, edge)) for box in boxes.int().tolist()])


def faces(picture: Image.Image, runs: dict[str, Callable]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the boxes of faces [N, 4] and their five landmarks [N, 5, 2], in pixels."""
    boxes = proposals(picture, runs["pnet"])
    for name, edge, least in (("rnet", 24, 0.7), ("onet", 48, 0.8)):
        if len(boxes) == 0:
            break
        scores, offsets, *marks = runs[name](crops(picture, boxes, edge))
        likely = scores > least
        scores, squares = scores[likely], boxes[likely]
        boxes = moved(squares, offsets[likely])
        kept = best(boxes, scores, 0.5)
        boxes, squares = (boxes[kept], squares[kept]) if name == "onet" else (square(boxes[kept]), squares)
    if len(boxes) == 0:
        return torch.zeros(0, 4), torch.zeros(0, 5, 2)
    places = marks[0][likely][kept].unflatten(1, (2, 5)).mT  # of the eyes, the nose and the mouth, in the square
    return boxes, squares[:, None, :2] + places * (squares[:, 2:] - squares[:, :2])[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("faces.jpg"))
    options = parser.parse_args()
    if options.picture is None:
        from skimage.data import astronaut

        picture = Image.fromarray(astronaut())
    else:
        picture = Image.open(options.picture).convert("RGB")

    number = torch.export.Dim("number", min=2, max=4096)
    rows, columns = (2 * torch.export.Dim(f"half_{axis}", min=LEAST // 2, max=2048) for axis in ("height", "width"))
    runs = {
        "pnet": exported(network("pnet"), torch.randn(1, 3, 64, 80), {2: rows, 3: columns}),
        "rnet": exported(network("rnet"), torch.randn(2, 3, 24, 24), {0: number}),
        "onet": exported(network("onet"), torch.randn(2, 3, 48, 48), {0: number}),
    }
    boxes, landmarks = faces(picture, runs)
    print(f"{len(boxes)} faces")
    draw = ImageDraw.Draw(picture)
    for box, places in zip(boxes.tolist(), landmarks.tolist()):
        draw.rectangle(box, outline=(0, 255, 0), width=3)
        for x, y in places:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=(255, 0, 0))
    picture.save(options.plot)
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
