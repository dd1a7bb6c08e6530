"""Run SeaweedFS, telemetry off, on free loopback ports until Ctrl-C. It is in requirements-dev.txt."""

from remote_ckpt.testing.servers import SeaweedServer, serve_until_interrupted

if __name__ == "__main__":
    serve_until_interrupted(SeaweedServer())
