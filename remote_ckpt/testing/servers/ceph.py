"""Ceph's RADOS Gateway: the object store of many clusters that offer S3 without being AWS."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from remote_ckpt.errors import StoreUnavailableError
from remote_ckpt.options import GiB
from remote_ckpt.testing.servers.base import LocalServer
from remote_ckpt.testing.servers.system import HOST, clean_environment, find_program, uninterrupted

INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd (Debian, Ubuntu; as root)"

_QUIET = (
    "ms",
    "mon",
    "paxos",
    "auth",
    "osd",
    "objecter",
    "crush",
    "tp",
    "throttle",
    "optracker",
    "perfcounter",
)

_SETTINGS = """
[global]
fsid = {fsid}
mon host = [v2:{host}:{mon_port},v1:{host}:{old_mon_port}]
public addr = {host}
cluster addr = {host}
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}
crash dir = {folder}
log file = {folder}/log.$name
mon cluster log file = {folder}/log.cluster
admin socket =
pid file =
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail warn = 2
mon data avail crit = 1
# Each new pool waits for the monitor's next proposal: a second each, by default.
paxos propose interval = 0.05
paxos min wait = 0.01
{quiet}
[mon]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {memory_bytes}
# Without a disk's limits an object's name may be as long as S3 allows.
osd max object name len = 1024
[client]
rgw frontends = beast endpoint={host}:{port}
rgw data = {folder}/rgw
rgw dynamic resharding = false
rgw run sync thread = false
rgw override bucket index max shards = 1
"""


class CephServer(LocalServer):
    """One monitor, one OSD that keeps its data in memory, and one RADOS Gateway, without systemd.

    Its programs come with the system, see :data:`INSTALL`; it needs no rights of root to run.
    """

    stop_seconds = 0.1  # nothing is worth a clean shutdown, which takes seconds
    port_count: ClassVar[int] = 3
    memory_bytes: ClassVar[int] = 8 * GiB

    def _launch(self, folder: Path, ports: Sequence[int]) -> None:
        for name in ("radosgw", "ceph-mon", "ceph-osd"):
            find_program(name, INSTALL)
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        (folder / "ceph.conf").write_text(self._settings(fsid, folder, ports))
        self._make_keys(folder)
        self._make_monitor(fsid, folder, ports)
        self._spawn(["ceph-mon", "-f", "-i", "a"])
        self._run(folder, "ceph", "--connect-timeout", "30", "osd", "new", osd_id, "0")
        self._run(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        self._spawn(["ceph-osd", "-f", "-i", "0"])
        self._make_user(folder)
        self._spawn(["radosgw", "-f", "-n", "client.rgw"])

    def _environment(self, folder: Path, ports: Sequence[int]) -> Mapping[str, str]:
        return {"CEPH_CONF": str(folder / "ceph.conf"), "TMPDIR": str(folder)}

    def _settings(self, fsid: str, folder: Path, ports: Sequence[int]) -> str:
        return _SETTINGS.format(
            fsid=fsid,
            folder=folder,
            host=HOST,
            port=ports[0],
            mon_port=ports[1],
            old_mon_port=ports[2],
            memory_bytes=self.memory_bytes,
            quiet="\n".join(f"debug {part} = 0/0" for part in _QUIET),
        )

    def _make_keys(self, folder: Path) -> None:
        (folder / "keyring").touch(mode=0o600)
        for name in ("mon.", "client.admin", "client.rgw", "osd.0"):
            rights = [("mon", "allow *"), ("osd", "allow *"), ("mgr", "allow *")]
            caps = [word for part, right in rights for word in ("--cap", part, right)]
            self._run(folder, "ceph-authtool", str(folder / "keyring"), "--gen-key", "-n", name, *caps)

    def _make_monitor(self, fsid: str, folder: Path, ports: Sequence[int]) -> None:
        monitors = str(folder / "monmap")
        address = f"[v2:{HOST}:{ports[1]},v1:{HOST}:{ports[2]}]"
        self._run(folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monitors)
        keys = ("--keyring", str(folder / "keyring"))
        self._run(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, *keys)

    def _make_user(self, folder: Path) -> None:
        keys = ("--access-key", self.access_key, "--secret-key", self.secret_key)
        who = ("--uid", "ckpt", "--display-name", "ckpt")
        self._run(folder, "radosgw-admin", "user", "create", *who, *keys)

    def _run(self, folder: Path, *command: str) -> None:
        environment = {**clean_environment(), **self._environment(folder, self._ports)}
        try:
            with uninterrupted():
                subprocess.run(
                    command,
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=True,
                    timeout=self._ready_seconds,
                )
        except subprocess.SubprocessError as error:
            output = getattr(error, "stderr", None) or b""
            said = output.decode(errors="replace")[-2000:]
            raise StoreUnavailableError(f"{command[0]} failed: {said}\n{self._log_tail()}") from error
