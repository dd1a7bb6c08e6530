"""Faults that only a store's own answers show: wrong ranges, short listings, keys that are not deleted.

:class:`IgnoreRange` and :class:`FailKeys` change what was signed: they need a store that does not check
signatures (MiniStack, moto). All others work with any store.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from remote_ckpt.testing.proxy.exchange import Answer, Call, Proceed, in_one_piece, read_body
from remote_ckpt.testing.proxy.s3 import add_delete_errors, shorten_listing, split_deletion

_CONTENT_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class WrongRange:
    """A range comes with the bytes of another place: they are rotated, its length stays.

    Args:
        shift_bytes: By how many bytes.
        is_labelled: ``Content-Range`` says so; else it names the range that was asked for.
    """

    shift_bytes: int = 1
    is_labelled: bool = False

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        answer = await proceed(call)
        if answer.status != 206:
            return answer
        content = await read_body(answer.body)
        cut = self.shift_bytes % max(1, len(content))
        headers = self._labelled(answer.headers) if self.is_labelled else answer.headers
        return replace(answer, headers=headers).with_content(content[cut:] + content[:cut])

    def _labelled(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if found is None:
            return headers
        first, last = (int(found[group]) + self.shift_bytes for group in (1, 2))
        return {**headers, "content-range": f"bytes {first}-{last}/{found[3]}"}


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """The store does not know ranges: it answers with the whole object, and 200."""

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        headers = {name: text for name, text in call.headers.items() if name != "range"}
        return await proceed(replace(call, headers=headers))


@dataclass(frozen=True, slots=True)
class ShortListing:
    """Entries of a listing are missing.

    Args:
        keep_count: How many entries of a page stay: 0 for an empty listing, None leaves all.
        drop: Glob of whole keys and prefixes that are left out, for example ``"*/manifest.*"``.
        is_truncated: The page says that there is more, but not where; else it says that this is all.
    """

    keep_count: int | None = None
    drop: str = ""
    is_truncated: bool = False

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        answer = await proceed(call)
        content = await read_body(answer.body)
        changed = shorten_listing(
            content, keep_count=self.keep_count, drop=self.drop, is_truncated=self.is_truncated
        )
        return answer.with_content(changed)


@dataclass(frozen=True, slots=True)
class FailKeys:
    """A batch deletion succeeds but for some keys, which stay: 200 with an error for each of them.

    Args:
        keys: Glob of the keys, whole.
        code: Their error code.
    """

    keys: str = "*"
    code: str = "AccessDenied"

    async def apply(self, call: Call, proceed: Proceed) -> Answer:
        """See :meth:`Fault.apply`."""
        document = await read_body(call.body)
        rest, refused = split_deletion(document, self.keys)
        if rest is None:
            answer = Answer(status=200, headers={"content-type": "application/xml"}, body=in_one_piece(b""))
            return answer.with_content(add_delete_errors(None, refused, self.code))
        answer = await proceed(_rewritten(call, rest, refused))
        content = await read_body(answer.body)
        return answer.with_content(add_delete_errors(content, refused, self.code) if refused else content)


def _rewritten(call: Call, content: bytes, changes: Sequence[str]) -> Call:
    """Return the call with another body, and with digests that fit it."""
    if not changes:
        return call.with_content(content)
    kept = {name: text for name, text in call.headers.items() if not name.startswith("x-amz-checksum-")}
    digests = {
        "content-md5": base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
        "x-amz-content-sha256": hashlib.sha256(content).hexdigest(),
    }
    return replace(call, headers={**kept, **digests}).with_content(content)
