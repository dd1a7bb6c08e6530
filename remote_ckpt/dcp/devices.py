"""``torch.save`` archives that were written where tensors were on another device."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

import torch

from remote_ckpt.stock_payload import ZIP_ERRORS

_OTHER_DEVICES = re.compile(rb"cuda|hpu|maia|mps|mtia|npu|privateuseone|xla|xpu")
"""Devices that torch's pickles name. In the text of an object such a name costs time, and nothing else."""


def moved_to_cpu(archive: bytes) -> bytes:
    """Return a trusted archive as it would be if all of it had been saved from the CPU.

    torch's own load planner unpickles without saying where to. That fails on a machine without the device,
    and otherwise fills the one that the saver used: of several ranks on a machine, all of them the same.
    """
    if not _OTHER_DEVICES.search(_program(archive)):
        return archive
    is_elsewhere = False

    def look(storage: Any, location: str) -> Any:
        nonlocal is_elsewhere
        is_elsewhere = is_elsewhere or location != "cpu"
        return storage

    value = torch.load(io.BytesIO(archive), map_location=look, weights_only=False)
    if not is_elsewhere:
        return archive
    moved = io.BytesIO()
    torch.save(value, moved)
    return moved.getvalue()


def _program(archive: bytes) -> bytes:
    """Return the archive's pickle, or all of it where it is of the older format or damaged."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            return files.read(next(name for name in files.namelist() if name.endswith("/data.pkl")))
    except (StopIteration, *ZIP_ERRORS):
        return archive
