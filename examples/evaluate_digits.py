"""Score a checkpoint on the held-out digits with stock torch alone: nobody is locked in.

python examples/evaluate_digits.py s3://bucket/run/ckpt/best --at-least 0.9
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed.checkpoint as dcp
from digits import VisionTransformer, read_digits
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader


def load_model(url: str) -> torch.nn.Module:
    """Return the model of a checkpoint, in one process, whatever number of ranks saved it."""
    model = VisionTransformer()
    state = {"model": model.state_dict()}
    reader = FsspecReader(url) if "://" in url else FileSystemReader(url)
    dcp.load(state, storage_reader=reader, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail below this accuracy")
    arguments = parser.parse_args()

    model = load_model(arguments.url)
    _, _, images, labels = read_digits()
    accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    print(f"{accuracy:.1%} of {len(labels)} held-out digits, read by torch {torch.__version__} alone")
    if "remote_ckpt" in sys.modules:
        sys.exit("remote_ckpt was imported, so this proves nothing")
    if accuracy < arguments.at_least:
        sys.exit(f"below {arguments.at_least:.0%}")


if __name__ == "__main__":
    main()
