"""The package's logger: ``logging.getLogger("remote_ckpt")``."""

import logging

logger = logging.getLogger("remote_ckpt")
