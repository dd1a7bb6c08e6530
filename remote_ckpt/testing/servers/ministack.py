"""MiniStack: an emulator with exact conditional writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from remote_ckpt.testing.servers.base import LocalServer
from remote_ckpt.testing.servers.system import HOST, http_get


class MiniStackServer(LocalServer):
    """MiniStack's S3 emulator, data in memory."""

    program = "ministack"
    package = "ministack"

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        return [program]

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {
            "AUTH": "true",  # else unknown access keys are let in
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "BIND_HOST": HOST,  # its default is every interface
            "GATEWAY_PORT": str(ports[0]),
            "SERVICES": "s3",
            "IOT_MTLS_ENABLED": "false",  # further listeners
            "SFTP_ENABLED": "false",
            "LOG_LEVEL": "WARNING",
            "S3_DATA_DIR": str(folder / "data"),
            "S3_PERSIST": "0",
            "HOME": str(folder),
            "TMPDIR": str(folder),
        }

    def _answers(self, ports: Sequence[int]) -> bool:
        return http_get(ports[0], "/_ministack/health") is not None
