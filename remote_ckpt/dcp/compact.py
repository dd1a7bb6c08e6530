"""``torch.save`` of an object whose tensors are views, without the memory around them.

``torch.save`` writes a tensor's storage whole: ten elements of a base of 40 MB take 40 MB, and take along
whatever else lies there. Here a tensor that alone refers to its storage is written as its own elements.
Tensors that share one keep sharing it, as ``torch.save`` promises.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch


class _ViewsFoundError(Exception):
    """Ends the first attempt before any storage is written."""

    def __init__(self, views: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.views = views


class _Looking(pickle.Pickler):
    """Pickles as usual, and raises at the end if there are views to write otherwise."""

    def __init_subclass__(cls) -> None:
        """Look at bare storages too: torch's subclass answers for these before they are reduced."""
        answer = cls.persistent_id

        def persistent_id(self: _Looking, value: Any) -> Any:
            if isinstance(value, torch.UntypedStorage):  # a tensor brings its own as a TypedStorage
                self._shared.add(value._cdata)
            return answer(self, value)

        cls.persistent_id = persistent_id  # type: ignore[assignment, method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._views: dict[int, torch.Tensor] = {}  # by storage, which they keep alive
        self._shared: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (storage := _storage_of(value)) is not None:
            known = self._views.setdefault(storage._cdata, value)
            if not _is_plain(value) or not _is_same_part(known, value):
                self._shared.add(storage._cdata)
        return NotImplemented

    def dump(self, value: Any) -> None:
        super().dump(value)
        views = {number: view for number, view in self._views.items() if number not in self._shared}
        if views := {number: view for number, view in views.items() if _is_part(view)}:
            raise _ViewsFoundError(views)


def save_compactly(value: Any) -> bytes:
    """Return ``value`` as a ``torch.save`` archive without the surroundings of its views. Any thread.

    Where it holds no view that is alone with its storage, these are exactly torch's own bytes.
    """
    try:
        return _saved(value, _Looking)
    except _ViewsFoundError as found:
        return _saved(value, _cloning(found.views))


def _saved(value: Any, pickler: type[pickle.Pickler]) -> bytes:
    stream = io.BytesIO()
    # torch makes a class of its own from the module's Pickler, and looks at the module's name.
    torch.save(value, stream, pickle_module=SimpleNamespace(__name__=__name__, Pickler=pickler))
    return stream.getvalue()


def _cloning(views: Mapping[int, torch.Tensor]) -> type[pickle.Pickler]:
    # Detached: a clone of the view itself would need a gradient or not as the thread's grad mode says.
    copies = {
        number: view.detach().clone().requires_grad_(view.requires_grad) for number, view in views.items()
    }

    class Cloning(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and (storage := _storage_of(value)) is not None:
                copy = copies.get(storage._cdata)
                return NotImplemented if copy is None else copy.__reduce_ex__(2)
            return NotImplemented

    return Cloning


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided:
        return None  # its parts are tensors, which are met on their own
    try:
        return tensor.untyped_storage()
    except Exception:  # of wrappers, whose inner tensors are met on their own
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether all that it says is in its elements."""
    return type(tensor) is torch.Tensor and not tensor.is_quantized and not vars(tensor)


def _is_same_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(
        getattr(one, name)() == getattr(other, name)()
        for name in ("storage_offset", "size", "stride", "is_conj", "is_neg")
    ) and (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
