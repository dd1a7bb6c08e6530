"""Run MiniStack's S3 emulator on a free loopback port until Ctrl-C. It is in requirements-dev.txt."""

from remote_ckpt.testing.servers import MiniStackServer, serve_until_interrupted

if __name__ == "__main__":
    serve_until_interrupted(MiniStackServer())
