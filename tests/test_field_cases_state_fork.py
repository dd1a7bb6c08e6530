"""Field case of forked processes: a child loads, or is told why it cannot, and never hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remote_ckpt import ForkedProcessError, load_checkpoint, save_checkpoint
from remote_ckpt.testing.servers import LocalServer

LONG_SECONDS = 60.0
"""How long a child may take for what is done at once: a test that hangs is to end."""


def in_forked_child(work: Callable[[], str]) -> str:
    """Return what ``work`` returns in a forked child, or its error; an alarm ends one that hangs."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(int(LONG_SECONDS))
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(target, answer.encode())
        os._exit(0)
    os.close(target)
    _, status = os.waitpid(child, 0)
    with os.fdopen(source, "rb") as stream:
        answer = stream.read().decode()
    assert status == 0, f"the child was ended by signal {status}: {answer}"
    return answer


@pytest.mark.server
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 says it too
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_br_110_a_forked_child_loads_or_is_told_and_never_hangs(
    real_server: LocalServer, fresh_root: Callable[[LocalServer], str], transport: str
) -> None:
    access: dict[str, Any] = {"storage_options": real_server.storage_options(), "transport": transport}
    url = f"{fresh_root(real_server)}/1"
    model = nn.Linear(3, 2)
    save_checkpoint(url, iteration=7, model=model, **access)

    def load_in_child() -> str:
        torch.set_num_threads(1)
        other = nn.Linear(3, 2)
        iteration = load_checkpoint(url, model=other, **access)
        return f"{iteration} {torch.equal(other.weight, model.weight)}"

    answer = in_forked_child(load_in_child)
    assert answer == "7 True" or answer.startswith(ForkedProcessError.__name__)
    assert load_checkpoint(url, model=nn.Linear(3, 2), **access) == 7


class Loading(torch.utils.data.Dataset[torch.Tensor]):
    """Its worker processes, which the loader forks, read a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> torch.Tensor:
        model = nn.Linear(3, 2)
        load_checkpoint(self.url, model=model)
        return model.weight.detach() * position


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_br_110_the_workers_of_a_data_loader_load_from_a_disk(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(tmp_path / "1", iteration=1, model=model)
    loader = torch.utils.data.DataLoader(
        Loading(str(tmp_path / "1")),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=60,
    )
    for position, weight in enumerate(loader):
        assert torch.equal(weight, model.weight.detach() * position)
