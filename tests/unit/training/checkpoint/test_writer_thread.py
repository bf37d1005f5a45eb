"""The copy of the state: exact, of any form, and apart from what it was made of."""

from __future__ import annotations

import pytest
import torch

from hpc_trainer.training.checkpoint.trees import DTYPE_NAMES
from hpc_trainer.training.checkpoint.writer import HostCopy


def tensors() -> dict[str, torch.Tensor]:
    plain = {
        f"{name}{shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype, name in DTYPE_NAMES.items()
        for shape in ((), (0,), (3,), (2, 3, 5))
    }
    odd = {
        "transposed": torch.rand(4, 7).t(),
        "every_second": torch.rand(9)[::2],
        "expanded": torch.rand(1).expand(5),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.rand(3, dtype=torch.complex64).conj(),
        "negative": torch.rand(3, dtype=torch.complex64).conj().imag,
        "of_a_parameter": torch.nn.Parameter(torch.rand(3)).detach(),
    }
    return {**plain, **odd}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_copy_is_exact_contiguous_and_apart() -> None:
    given = tensors()
    expected = {name: (tensor.shape, tensor.dtype, bits(tensor)) for name, tensor in given.items()}
    copies = HostCopy().copy({"a": given})["a"]
    for tensor in given.values():
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg() and tensor.stride() != (0,):
            tensor.zero_()
    assert {name: (copy.shape, copy.dtype, bits(copy)) for name, copy in copies.items()} == expected
    assert all(copy.is_contiguous() for copy in copies.values())


def test_the_buffer_is_used_again_and_grows_when_it_must() -> None:
    host_copy = HostCopy()
    first = host_copy.copy({"a": {"x": torch.ones(1000)}, "b": {"x": torch.zeros(5)}})
    place = first["a"]["x"].data_ptr()
    again = host_copy.copy({"a": {"x": torch.full((900,), 2.0)}})
    assert again["a"]["x"].data_ptr() == place
    larger = host_copy.copy({"a": {"x": torch.full((5000,), 3.0)}})
    assert larger["a"]["x"].sum() == 15000


def test_nothing_is_drawn_and_nothing_is_copied_twice() -> None:
    state = torch.get_rng_state()
    tied = torch.rand(10)
    copies = HostCopy().copy({"a": {"x": tied}})
    assert torch.equal(copies["a"]["x"], tied)
    copies = HostCopy().copy({})
    assert copies == {}
    torch.set_rng_state(state)
    HostCopy().copy({"a": {"x": torch.ones(100)}})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_from_a_gpu_is_of_the_moment_of_the_call() -> None:
    weight = torch.ones(1 << 24, device="cuda")
    host_copy = HostCopy()
    for value in (2.0, 3.0):
        weight.fill_(value)
        copy = host_copy.copy({"a": {"weight": weight}})["a"]["weight"]
        weight.fill_(-1.0)
        torch.cuda.synchronize()
        assert copy.is_pinned()
        assert torch.equal(copy, torch.full_like(copy, value))
