"""Write the golden checkpoint of the present format. Run once per format version, never over an old one.

python tests/golden_state.py FOLDER    (then copy it to tests/golden/VERSION/checkpoint)
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from remote_ckpt.archive import SUPPORTED_DTYPES
from remote_ckpt.dcp.writer import RemoteStorageWriter
from remote_ckpt.options import KiB, Options, TransferOptions


def golden_state() -> dict[str, Any]:
    """Return the state that every golden checkpoint holds; it must never change."""
    counting = torch.arange(256, dtype=torch.uint8)
    return {
        "model": {
            "weight": torch.arange(6000, dtype=torch.float32).reshape(60, 100),
            "bias": torch.arange(7, dtype=torch.float32).to(torch.bfloat16),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
        },
        "dtypes": {
            name: counting[: 8 * size].view(getattr(torch, name))
            for name, size in SUPPORTED_DTYPES.items()
            if not name.startswith("bits") and name != "bool"
        },
        "mask": torch.tensor([True, False, True]),
        "layers": [torch.ones(2), {"lr": 0.1}],
        "python": {"step": 7, "name": "golden", "none": None, "pair": (1, "two")},
    }


def main(folder: Path) -> None:
    """Write it."""
    warnings.filterwarnings("ignore")
    options = Options(transfer=TransferOptions(block_bytes=4 * KiB))
    writer = RemoteStorageWriter(
        folder,
        options=options,
        metrics={"accuracy": 0.75},
        user_metadata={"note": "golden"},
        left_out=["model.frozen"],
    )
    dcp.save(golden_state(), storage_writer=writer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
