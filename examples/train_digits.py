"""Train on handwritten digits with FSDP2 and keep the checkpoints under any URL.

    torchrun --nproc-per-node 2 examples/train_digits.py s3://bucket/run/ckpt

Start it again after a crash, on as many ranks as you like: it resumes from the newest committed
checkpoint. On the same number of ranks the losses are those of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from digits import VisionTransformer, read_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from remote_ckpt import (
    KeyMismatchError,
    find_latest_checkpoint,
    keep_last_n_checkpoints,
    load_checkpoint,
    save_checkpoint,
)


class Sampler:
    """Shuffled global batches that do not depend on the number of ranks; knows where it stands."""

    def __init__(self, count: int, batch: int, seed: int = 0) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.epoch, self.position = 0, 0

    def next_batch(self) -> Tensor:
        """Return the indices of the next global batch."""
        if self.position + self.batch > self.count:
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.count, generator=generator)
        self.position += self.batch
        return order[self.position - self.batch : self.position]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class RandomState:
    """This rank's random state (dropout), under a key of its own so that every rank's is kept."""

    def state_dict(self) -> dict[str, Any]:
        return {f"rank{dist.get_rank()}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state[f"rank{dist.get_rank()}"])


class Best:
    """The best held-out accuracy so far."""

    accuracy = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accuracy = state["accuracy"]


def resume(url: str, **state: Any) -> int:
    """Load the newest committed checkpoint, if there is one, and return its step (else 0).

    On another number of ranks, the random states do not match one to one: a new rank keeps the state
    that it was seeded with, one of a rank that is gone is left. Any other mismatch is an error.
    """
    latest = find_latest_checkpoint(url)
    if latest is None:
        return 0
    report(f"resuming from {latest}")
    try:
        step = load_checkpoint(latest, **state)
    except KeyMismatchError as error:
        if not all(name.startswith("rng.") for name in error.missing + error.unexpected):
            raise
        step = load_checkpoint(latest, strict_loading=False, **state)
    return step or 0


def report(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def my_share(indices: Tensor) -> Tensor:
    """Return this rank's part of a global batch."""
    return indices.tensor_split(dist.get_world_size())[dist.get_rank()]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Take one step on this rank's share and return the mean loss of all ranks."""
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


@torch.no_grad()
def held_out_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy over all ranks' shares of the held-out digits."""
    model.eval()
    mine = my_share(torch.arange(len(labels)))
    correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    dist.all_reduce(correct)
    model.train()
    return int(correct) / len(labels)


def build_model() -> nn.Module:
    """Return the model, the same on all ranks before it is sharded; then seed each rank apart."""
    torch.manual_seed(0)
    model = VisionTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())
    return model


def train(url: str, *, steps: int, stop_after: int, save_every: int) -> None:
    """Train from wherever the checkpoints under ``url`` say; the newest two and ``best`` are kept."""
    images, labels, held_out_images, held_out_labels = read_digits()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    sampler, best = Sampler(len(labels), batch=60), Best()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state |= {"sampler": sampler, "rng": RandomState(), "best": best}

    for step in range(resume(url, **state) + 1, stop_after + 1):
        batch = my_share(sampler.next_batch())
        loss = train_step(model, optimizer, images[batch], labels[batch])
        schedule.step()
        report(f"step {step} loss {loss.hex()} ({loss:.4f})")
        if step % save_every:
            continue
        accuracy = held_out_accuracy(model, held_out_images, held_out_labels)
        if accuracy > best.accuracy:
            best.accuracy = accuracy
            save_checkpoint(f"{url}/best", iteration=step, **state)
        report(f"saving {step} accuracy {accuracy:.4f}")
        save_checkpoint(f"{url}/{step}", iteration=step, **state)
        if dist.get_rank() == 0:
            keep_last_n_checkpoints(url, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url", help="where the checkpoints go: a path, s3://, gs://, az:// or any fsspec URL")
    parser.add_argument("--steps", type=int, default=120, help="length of the learning-rate schedule")
    parser.add_argument("--stop-after", type=int, help="last step of this run (default: --steps)")
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    try:
        train(
            arguments.url.rstrip("/"),
            steps=arguments.steps,
            stop_after=arguments.stop_after or arguments.steps,
            save_every=arguments.save_every,
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
