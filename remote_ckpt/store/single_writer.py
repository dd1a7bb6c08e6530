"""Creating where the store has no create-only: looking first, then writing, for who accepted that.

Backblaze's B2 refuses ``If-None-Match`` (501), others answer 400 or have no such write at all. With
``accept_single_writer`` a store is wrapped in :class:`SingleWriterStore` and works all the same.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

from remote_ckpt.errors import ObjectExistsError, ObjectNotFoundError, StoreError, UnsupportedStoreError
from remote_ckpt.store.base import Buffer, CreateOnly, Store, StoreCapabilities
from remote_ckpt.store.wrappers import DelegatingStore


def may_refuse_condition(error: Exception) -> bool:
    """Whether a create may have failed for its condition: it was said, or refused for no reason we know."""
    return isinstance(error, UnsupportedStoreError) or type(error) is StoreError


class SingleWriterStore(DelegatingStore):
    """Creates without a condition where the store refuses it; two writers are then not kept apart.

    Once that has worked, :attr:`capabilities` say ``CreateOnly.NONE``, here and in all scopes.

    Args:
        inner: The driver.
        has_fallen_back: Set when an object was created without the condition.
    """

    def __init__(self, inner: Store, has_fallen_back: threading.Event | None = None) -> None:
        super().__init__(inner)
        self._has_fallen_back = has_fallen_back or threading.Event()

    def _wrap(self, inner: Store) -> SingleWriterStore:
        return SingleWriterStore(inner, self._has_fallen_back)

    @property
    def capabilities(self) -> StoreCapabilities:
        """Those of the driver, create-only as far as it is known by now."""
        known = self.inner.capabilities
        return replace(known, create_only=CreateOnly.NONE) if self._has_fallen_back.is_set() else known

    def create(self, key: str, data: Buffer) -> None:
        """See :meth:`Store.create`."""
        try:
            self.inner.create(key, data)
        except (StoreError, UnsupportedStoreError) as error:
            if not may_refuse_condition(error):
                raise
            self._create_plainly(key, data)

    def _create_plainly(self, key: str, data: Buffer) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            self.inner.info(key)
            raise ObjectExistsError("the object exists", url=self.url, key=key, operation="create")
        self.inner.write(key, data)
        self._has_fallen_back.set()
