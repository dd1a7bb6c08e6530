"""Run moto's S3 server on a free loopback port until Ctrl-C. It is in requirements-dev.txt."""

from remote_ckpt.testing.servers import MotoServer, serve_until_interrupted

if __name__ == "__main__":
    serve_until_interrupted(MotoServer())
