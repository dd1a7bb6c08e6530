"""What all servers share: child processes on free loopback ports, ready when they serve, ended by pid."""

from __future__ import annotations

import itertools
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.testing.servers.system import (
    HOST,
    clean_environment,
    find_program,
    free_ports,
    http_get,
    uninterrupted,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_TRIES = 3
_buckets = itertools.count(1)


class LocalServer:
    """One S3 server as a child process, or as several; subclasses say how they are started.

    Args:
        ready_seconds: How long the server may take until it serves requests.

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
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ports: Sequence[int] = ()
        self._client: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and return once it has stored an object and given it back.

        Raises:
            MissingDependencyError: The package that ships the server is not installed.
            StoreUnavailableError: It ended, or was not ready in time; the message ends with its log.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._start_once()
            except StoreUnavailableError:
                if not tries_left:  # else somebody may have taken one of its ports: they were not held
                    raise

    def stop(self) -> None:
        """End the processes by their pids (kill what lingers) and remove the server's files."""
        processes, self._processes = self._processes[::-1], []
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(self.stop_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._clean_up(self._ports)
            self._folder.cleanup()
            self._folder = None

    @property
    def pid(self) -> int:
        """The process id of what answers the requests, while it runs."""
        if not self._processes:
            raise RuntimeError(f"{type(self).__name__} is not running")
        return self._processes[-1].pid

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
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }

    def client(self) -> Any:
        """Return a boto3 S3 client of this server, made once."""
        if self._client is None:
            self._client = self._new_client()
        return self._client

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    # --- for subclasses ------------------------------------------------------------------------------

    def _command(self, program: str, folder: Path, ports: Sequence[int]) -> Sequence[str]:
        """Return the command line of a server that is one process."""
        raise NotImplementedError

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {}

    def _launch(self, folder: Path, ports: Sequence[int]) -> None:
        """Start all processes with :meth:`_spawn`, that which answers the requests last."""
        self._spawn(self._command(find_program(self.program, f"pip install {self.package}"), folder, ports))

    def _answers(self, ports: Sequence[int]) -> bool:
        """Whether it answers at all; a cheap question, before objects are stored."""
        return http_get(ports[0], "/") is not None

    def _clean_up(self, ports: Sequence[int]) -> None:
        """Remove what the server leaves outside its folder."""

    # --- inside --------------------------------------------------------------------------------------

    def _start_once(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True)
        self._ports, self._client = free_ports(self.port_count), None
        self.endpoint_url = f"http://{HOST}:{self._ports[0]}"
        give_up_at = time.monotonic() + self._ready_seconds
        try:
            self._launch(Path(self._folder.name), self._ports)
            self._wait_until(lambda: self._answers(self._ports), give_up_at)
            self._wait_until(self._serves, give_up_at)
        except BaseException:
            self.stop()
            raise

    def _spawn(self, command: Sequence[str]) -> None:
        assert self._folder is not None  # set by start()
        folder = Path(self._folder.name)
        with open(folder / f"log{len(self._processes)}", "wb") as log, uninterrupted():
            process = subprocess.Popen(
                command,
                env={**clean_environment(), **self._environment(folder, self._ports)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends us, and we end it
            )
            self._processes.append(process)

    def _wait_until(self, is_ready: Callable[[], bool], give_up_at: float) -> None:
        while not is_ready():
            has_ended = any(process.poll() is not None for process in self._processes)
            if has_ended or time.monotonic() > give_up_at:
                raise StoreUnavailableError(f"{type(self).__name__} did not start: {self._log_tail()}")
            time.sleep(0.05)

    def _log_tail(self) -> str:
        assert self._folder is not None  # set by start()
        logs = sorted(Path(self._folder.name).glob("log*"))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.is_file())

    def _serves(self) -> bool:
        """Whether an object can be stored and read: some servers answer long before that."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._new_client(retries={"total_max_attempts": 1})
        bucket = {"Bucket": f"ready-{next(_buckets)}"}
        try:
            client.create_bucket(**bucket)
            client.put_object(**bucket, Key="ready", Body=b"yes")
            is_served: bool = client.get_object(**bucket, Key="ready")["Body"].read() == b"yes"
            client.delete_object(**bucket, Key="ready")
            client.delete_bucket(**bucket)
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return is_served

    def _new_client(self, **config: Any) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(**config),
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


def serve_until_interrupted(server: LocalServer, *, bucket: str = "demo") -> None:
    """Run a server for a person: print how to reach it, and end it at Ctrl-C or SIGTERM.

    What is printed can be read by a shell: endpoint and credentials as ``AWS_*`` variables.

    Args:
        server: Not started yet.
        bucket: Made in it, empty.

    Raises:
        The errors of :meth:`LocalServer.start`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.start()
        server.create_bucket(bucket)
        for name, value in server.environment().items():
            print(f"export {name}={value}")
        print(f"# {type(server).__name__} has an empty bucket s3://{bucket}. Ctrl-C ends it.", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an impatient second one would leave processes behind
        server.stop()
