"""Every kind of device answers; one that is not here says what is missing. XLA is tried whole by `make xla`."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from hpc_trainer.config.schema.cluster import Device
from hpc_trainer.errors import ConfigError, HpcTrainerError
from hpc_trainer.runtime.devices import kind_of, kinds_in_use, share_of_memory


def test_there_is_a_kind_for_each_choice() -> None:
    assert {kind_of(each.value).type for each in Device if each is not Device.auto} == {"cpu", "cuda", "mps", "xla"}
    with pytest.raises(KeyError):
        kind_of("auto")


def test_the_cpu() -> None:
    kind = kind_of(torch.device("cpu"))
    assert kind.device(7) == torch.device("cpu")  # ranks share it
    assert kind.name(torch.device("cpu")) == torch.backends.cpu.get_cpu_capability()
    assert (kind.backend, kind.versions(), kind.is_in_use()) == ("gloo", {}, False)
    before = kind.rng_state()
    drawn = torch.rand(3)
    kind.set_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)
    kind.launch()
    kind.synchronize(torch.device("cpu"))


def test_a_process_takes_no_more_than_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a GB of each share is for the CUDA context, which torch's allocator does not count."""
    gib, bounds = 2**30, []
    assert share_of_memory(80 * gib, 1) == 80 * gib
    assert share_of_memory(80 * gib, 4) == 20 * gib - gib // 2
    assert share_of_memory(2 * gib, 4) == gib // 4, "at least half of a small share"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * gib))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *asked: bounds.append(asked))
    device = torch.device("cuda", 0)
    for per_gpu in (1, 2):
        kind_of("cuda").take_share(device, per_gpu)
        kind_of("cpu").take_share(torch.device("cpu"), per_gpu)
    assert bounds == [(39.5 / 80, device)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu_names_what_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(HpcTrainerError, match=r"sees no GPU here \(\{'CUDA_VISIBLE_DEVICES': '3'\}\)"):
        kind_of("cuda").device(0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for GPUs")
def test_a_build_for_cpus_is_no_matter_of_the_node() -> None:
    with pytest.raises(ConfigError, match=r"It is a build for CPUs\. Install one for CUDA"):
        kind_of("cuda").device(0)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="an Apple machine")
def test_no_apple_machine() -> None:
    with pytest.raises(HpcTrainerError, match="no MPS device"):
        kind_of("mps").device(0)


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch-xla is here")
def test_no_torch_xla_says_how_to_get_it() -> None:
    with pytest.raises(HpcTrainerError, match=r"torch-xla of torch's own release.*pip install 'hpc_trainer\[xla\]'"):
        kind_of("xla").device(0)


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="a GPU is here")
def test_only_what_is_in_use_has_random_numbers_to_keep() -> None:
    assert [kind.type for kind in kinds_in_use()] == []
