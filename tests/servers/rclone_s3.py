"""Run rclone's S3 server on a free loopback port until Ctrl-C. It is in requirements-dev.txt.

It ignores ``If-None-Match``: the package refuses it. See for yourself what that looks like.
"""

from remote_ckpt.testing.servers import RcloneServer, serve_until_interrupted

if __name__ == "__main__":
    serve_until_interrupted(RcloneServer())
