"""``python -m remote_ckpt.cli`` is ``remote-ckpt``."""

from remote_ckpt.cli import main

if __name__ == "__main__":
    main()
