"""moto's server: the emulator that most Python projects test with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from remote_ckpt.testing.servers.base import LocalServer
from remote_ckpt.testing.servers.system import HOST, http_get


class MotoServer(LocalServer):
    """moto's S3 server, data in memory, every credential accepted."""

    program = "moto_server"
    package = "moto[server]"

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        return [program, "-H", HOST, "-p", str(ports[0])]

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {"TMPDIR": str(folder)}  # large bodies are spooled to files there

    def _answers(self, ports: Sequence[int]) -> bool:
        return http_get(ports[0], "/moto-api/") is not None
