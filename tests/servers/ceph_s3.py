"""Run a Ceph cluster of one, with its RADOS Gateway, on free loopback ports until Ctrl-C.

Its programs come with the system: ``apt-get install --no-install-recommends radosgw ceph-mon ceph-osd``.
"""

from remote_ckpt.testing.servers import CephServer, serve_until_interrupted

if __name__ == "__main__":
    serve_until_interrupted(CephServer())
