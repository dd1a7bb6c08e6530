"""The shipped contract shows values in its failures, like any test."""

import pytest

pytest.register_assert_rewrite("remote_ckpt.testing.contract")
