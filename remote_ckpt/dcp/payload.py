"""A tensor's elements as plain bytes in row-major order, without copies where its layout allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def is_plain(value: object) -> bool:
    """Whether a value is a dense strided tensor of torch's own type, whose bytes are its whole content."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name from an index; ``ValueError`` where this torch has none of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes; writable, no copy, not empty."""
    # Of one element torch calls any stride contiguous, and view() then refuses: state the stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def is_byte_viewable(tensor: torch.Tensor) -> bool:
    """Whether :func:`byte_view` gives the tensor's own memory, in row-major order."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def payload_windows(tensor: torch.Tensor, *, window_bytes: int) -> Iterator[memoryview]:
    """Yield a plain tensor's bytes in row-major order, in windows of at most about ``window_bytes``.

    A contiguous CPU tensor gives views of its own memory. Anything else (another device, a
    transposed or expanded view) is copied window by window, so memory stays bounded.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if is_byte_viewable(tensor):
        whole = byte_view(tensor)
        for start in range(0, len(whole), window_bytes):
            yield whole[start : start + window_bytes]
        return
    yield from _copied_windows(tensor, window_bytes)


def _copied_windows(tensor: torch.Tensor, window_bytes: int) -> Iterator[memoryview]:
    total_bytes = tensor.numel() * tensor.element_size()
    if total_bytes <= window_bytes or tensor.dim() == 0:
        yield byte_view(_on_host(tensor))
        return
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    rows = window_bytes // row_bytes
    if rows == 0:
        for row in tensor:
            yield from _copied_windows(row, window_bytes)
        return
    for first in range(0, tensor.shape[0], rows):
        yield byte_view(_on_host(tensor[first : first + rows]))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().to("cpu").contiguous()


def from_bytes(data: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this dtype and shape over a copy-free view of ``data`` (read it only)."""
    import warnings

    with warnings.catch_warnings():
        # The buffer may be read-only; the tensor is only ever the source of a copy.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.storage_offset() or flat.data_ptr() % max(1, dtype.itemsize):
        flat = flat.clone()  # views of wider types need aligned memory
    return flat.view(dtype).reshape(sizes)
