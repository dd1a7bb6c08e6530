"""Pickles from a checkpoint, read without running code from it.

torch's own ``weights_only`` unpickler allows tensors and plain containers. On top of it we allow what
numpy needs to rebuild plain arrays (random states hold them). Stock ``.metadata`` files are read by
an unpickler that knows just the classes that DCP writes there.
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from remote_ckpt.errors import CheckpointDamagedError, UntrustedDataError

_METADATA_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "builtins": {"set", "frozenset"},
}
"""Every class and function that torch 2.3 to 2.13 writes into a DCP ``.metadata`` file."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_GLOBALS.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        raise UntrustedDataError(
            f"DCP metadata refers to {module}.{name}, which is not on the list of what such files hold; "
            "it was not executed"
        )


def parse_stock_metadata(data: bytes, *, url: str, key: str) -> Metadata:
    """Read a stock DCP ``.metadata`` file through an allow-list.

    Raises:
        UntrustedDataError: It refers to anything that such files do not hold; nothing was executed.
        CheckpointDamagedError: It is no such file, or is cut.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except UntrustedDataError as error:
        raise UntrustedDataError(error.message, url=url, key=key, operation="read metadata") from None
    except Exception as error:
        raise CheckpointDamagedError(
            f"cannot read DCP metadata: {type(error).__name__}: {error}", url=url, key=key
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointDamagedError("not a DCP metadata file", url=url, key=key)
    return metadata


def _numpy_globals() -> list[Any]:
    try:
        import numpy as np
    except ImportError:  # pragma: no cover - numpy is optional for torch
        return []
    core = getattr(np, "_core", None) or np.core
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, core.multiarray.scalar, *dtypes]


def load_pickle(data: io.BytesIO | memoryview | bytes, *, is_trusted: bool, what: str) -> Any:
    """Load a ``torch.save`` archive without running code from it, unless it is trusted.

    Args:
        data: The archive's bytes.
        is_trusted: Unpickle without limits.
        what: Names the item in errors.

    Raises:
        UntrustedDataError: It needs a class that is not allowed; the message names it.
        CheckpointDamagedError: It is no such archive.
    """
    stream = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(stream, map_location="cpu", weights_only=not is_trusted)
    except pickle.UnpicklingError as error:
        stream.seek(0)
        raise UntrustedDataError(
            f"{what} holds Python objects that are not loaded from an untrusted checkpoint"
            f"{_named(unsafe_globals(stream))}: pass trusted=True if you trust whoever wrote it"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointDamagedError(f"{what} cannot be read: {error}") from error


def unsafe_globals(stream: io.BytesIO) -> list[str]:
    """Return names of classes in a ``torch.save`` archive that safe loading refuses, sorted."""
    stream.seek(0)
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except Exception:  # the archive is damaged or hostile: the load itself says so
        return []
    finally:
        stream.seek(0)


def _named(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


__all__ = ["load_pickle", "parse_stock_metadata", "unsafe_globals"]
