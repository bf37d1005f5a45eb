"""A copy of the state in host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Of each tensor in the buffer: a cache line, and wide enough for every element type.
_ALIGNMENT = 64


class Staging:
    """One host buffer, as large as the largest state, reused from save to save; pinned where tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """The same tensors by the same names, contiguous in the buffer; what was copied before is overwritten.

        When it returns, the originals may change. Tensors may be of any stride and on any device.
        Raises RuntimeError: there is not enough memory for the buffer.
        """
        tensors = [tensor for file in files.values() for tensor in file.values()]
        is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        views = iter(self._views(tensors, pinned=is_on_gpu))
        copies = {
            name: {key: next(views).copy_(tensor, non_blocking=True) for key, tensor in file.items()}
            for name, file in files.items()
        }
        if is_on_gpu:
            # The copies run on each device's current stream, after the kernels that made the tensors.
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
        return copies

    def _views(self, tensors: list[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if self._buffer.numel() < end or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        return [
            self._buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, offsets, strict=True)
        ]
