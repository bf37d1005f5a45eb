"""Programs that fail for a known reason: `python failing.py CASE`; the corpus of `why` is made of runs of them.

CASES maps a case to (label, how it fails). `SAYS` has vendors' lines with their source, for what no machine without a
GPU can do: a case prints them as a program would, and exits with 1. Labels are diagnoses of `why`; `exception` is an
error of the program's own code, and `not_known` means that nothing in the output tells the reason.
"""

import ctypes
import errno
import gzip
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from pathlib import Path


def _bash(line: str) -> None:
    sys.stdout.flush()
    os.execvp("bash", ["bash", "-c", line])


def _die(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(20)


def _fill(kind: int, size: int) -> None:
    resource.setrlimit(kind, (size, size))


def _files() -> None:
    _fill(resource.RLIMIT_NOFILE, 64)
    kept = [Path(os.devnull).open() for _ in range(100)]  # noqa: SIM115  (they stay open)
    print(len(kept))


def _grow() -> None:
    _fill(resource.RLIMIT_AS, 2**30)
    print(len(b"x" * 2**31))


def _bus() -> None:
    import mmap

    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        print(memory[0])


def _too_large() -> None:
    _fill(resource.RLIMIT_FSIZE, 4096)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with tempfile.TemporaryFile("wb", buffering=0) as file:
        for _ in range(100):
            file.write(b"x" * 1024)


def _listen_twice() -> None:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        one.listen()
        two.bind(one.getsockname())


def _full() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x" * 4096)


def _zip() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.zip")
        path.write_bytes(b"PK half of an archive")
        zipfile.ZipFile(path)


def _gzip() -> None:
    whole = gzip.compress(b"data" * 1000)
    print(gzip.decompress(whole[:-8]))


def _late_warning() -> None:
    print("WARNING: No space left on device for the cache, going on without it", file=sys.stderr)
    raise ValueError("the split adds up to 1.2")


def _caught() -> None:
    try:
        Path("/no/cache").read_text()
    except FileNotFoundError:
        import traceback

        traceback.print_exc()
    print("no cache: all is read anew")
    raise KeyError("label")


def _chained() -> None:
    try:
        Path("/no/data/train.bin").read_bytes()
    except FileNotFoundError as error:
        raise RuntimeError("the data set cannot be opened") from error


def _passed_on() -> None:
    subprocess.run([sys.executable, "-c", "import no_such_package"], check=True)


def _torch(line: str) -> None:
    import torch

    sys.setrecursionlimit(1000)
    exec(line, {"torch": torch})  # lines of this file


def _no_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "run.sh")
        script.write_text("#!/bin/sh\n")
        subprocess.run([str(script)], check=True)


def _wrong_binary() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program")
        script.write_bytes(b"\x00\x01\x02")
        script.chmod(0o700)
        subprocess.run([str(script)], check=True)


def _parse() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.parse_args(["--learning-rate", "1"])


def _raise(error: Exception) -> None:
    raise error


# Case -> (label, what it does). These fail by themselves.
CASES = {
    "silent": ("not_known", lambda: sys.exit(1)),
    "exit_3": ("not_known", lambda: sys.exit(3)),
    "own_words": ("not_known", lambda: sys.exit("the licence server said no")),
    "usual_log": ("not_known", lambda: (print("epoch 3: loss 0.31, accuracy 0.9"), sys.exit(2))),
    "value_error": ("exception", lambda: int("seven")),
    "assertion": ("exception", lambda: _raise(AssertionError("batch of -1"))),
    "late_warning": ("exception", _late_warning),
    "caught": ("exception", _caught),
    "recursion": ("exception", lambda: _torch("def f(x): return f(x)\nf(1)")),
    "segv": ("crash", lambda: ctypes.string_at(0)),
    "abort": ("crash", os.abort),
    "bus": ("crash", _bus),
    "illegal": ("crash", lambda: _die(signal.SIGILL)),
    "fpe": ("crash", lambda: _die(signal.SIGFPE)),
    "kill": ("killed", lambda: _die(signal.SIGKILL)),
    "term": ("signal", lambda: (signal.signal(signal.SIGTERM, signal.SIG_DFL), _die(signal.SIGTERM))),
    "hup": ("signal", lambda: (signal.signal(signal.SIGHUP, signal.SIG_DFL), _die(signal.SIGHUP))),
    "cpu_time": ("cpu_time", lambda: _die(signal.SIGXCPU)),
    "module": ("missing_module", lambda: __import__("no_such_package")),
    "passed_on": ("missing_module", _passed_on),
    "import_name": ("wrong_version", lambda: exec("from os import no_such_name")),
    "attribute": ("wrong_version", lambda: (json.no_such_function(),)),
    "library": ("missing_library", lambda: ctypes.CDLL("libcudart.so.99")),
    "data": ("missing_file", lambda: Path("/no/data/train.bin").read_bytes()),
    "chained": ("missing_file", _chained),
    "no_script": ("missing_file", lambda: _bash("exec python3 /no/train.py")),
    "command": ("missing_command", lambda: _bash("nvcc_of_nobody --version")),
    "env_module": ("no_modules", lambda: _bash("module load cuda/12")),
    "conda": ("no_conda", lambda: _bash("unset -f conda; PATH=/bin conda activate trains")),
    "full": ("disk_full", _full),
    "too_large": ("file_too_large", _too_large),
    "files": ("open_files", _files),
    "memory": ("host_memory", _grow),
    "torch_memory": ("host_memory", lambda: _torch("torch.empty(2**47)")),
    "no_permission": ("permission", _no_permission),
    "read_only": ("permission", lambda: Path("/proc/sys/kernel/osrelease").write_text("x")),
    "wrong_binary": ("wrong_binary", _wrong_binary),
    "pickle": ("damaged_file", lambda: pickle.loads(b"")),
    "zip": ("damaged_file", _zip),
    "gzip": ("damaged_file", _gzip),
    "json": ("damaged_file", lambda: json.loads("{half")),
    "unicode": ("encoding", lambda: str(b"abb\xe9", "utf-8")),
    "dns": ("no_internet", lambda: socket.getaddrinfo("no.such.host.invalid", 443)),
    "refused": ("refused", lambda: urllib.request.urlopen("http://127.0.0.1:9/", timeout=5)),
    "port": ("port_taken", _listen_twice),
    "arguments": ("arguments", _parse),
    "syntax": ("syntax", lambda: exec(compile("def f(:\n", "net.py", "exec"))),
    "shapes": ("shapes", lambda: _torch("torch.ones(2, 3) @ torch.ones(4, 5)")),
    "sizes": ("shapes", lambda: _torch("torch.ones(2, 3) + torch.ones(4, 5)")),
    "labels": ("labels", lambda: _torch("torch.nn.functional.nll_loss(torch.ones(1, 3), torch.tensor([10]))")),
    "embedding": ("labels", lambda: _torch("torch.nn.Embedding(4, 2)(torch.tensor([9]))")),
    "weights": ("weights", lambda: _torch("torch.nn.Linear(2, 2).load_state_dict({'w': torch.ones(1)})")),
    "weights_size": ("weights", lambda: _torch(
        "torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 3).state_dict())"
    )),
    "no_driver": ("gpu_build", lambda: _torch("torch.ones(1).cuda()")),
}  # fmt: skip

_ECC = "https://github.com/jade-hpc-gpu/jade-hpc-gpu.github.io/issues/194"
_NOTES = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
_WATCHDOG = (
    "[rank{0}]:[E626 06:24:44.904 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 "
    "milliseconds before timing out.\n"
    "[rank{0}]:[E626 06:24:44.906 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
    "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: {1}, last completed NCCL "
    "work: 807."
)
# Case -> (label, source, lines).
SAYS = {
    "cuda_memory": ("gpu_memory", "https://github.com/pytorch/pytorch/issues/16417",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of "
        "23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB in use."),
    "cuda_memory_old": ("gpu_memory", "https://github.com/shllln/GenerativeGraph/issues/5",
        "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 KiB (GPU 0; 11.17 GiB total capacity)"),
    "jax_memory": ("gpu_memory", "https://github.com/google-deepmind/alphafold/issues/1023",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "7406166528 bytes."),
    "ecc": ("gpu_ecc", _ECC, f"RuntimeError: CUDA error: uncorrectable ECC error encountered\n{_NOTES}"),
    "ecc_tensorflow": ("gpu_ecc", "https://github.com/nagadit/DeepFaceLab_Linux/issues/89",
        "F tensorflow/stream_executor/lib/statusor.cc:34] Internal: failed call to cuDevicePrimaryCtxRetain: "
        "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"),
    "xid_48": ("gpu_ecc", "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, An uncorrectable double bit error (DBE) has been detected on GPU"),
    "xid_63": ("gpu_ecc",
        "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/nvidia/debug.md",
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."),
    "xid_79": ("gpu_lost", "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1151",
        "May 18 19:02:39 kernel: NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus."),
    "nvml_lost": ("gpu_lost", "https://github.com/leptonai/gpud/issues/604",
        "failed to get remapped rows: failed to get device remapped rows: ERROR_GPU_IS_LOST"),
    "xid_31": ("gpu_program", "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
        "NVRM: Xid (PCI:0000:01:00): 31, pid=1, Ch 0000000b, engmask 00000120, intr 10000000"),
    "xid_119": ("gpu_broken", "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=1, Timeout after 6s of waiting for RPC response from GPU0 GSP!"),
    "assert": ("gpu_assert", "https://github.com/karpathy/nanoGPT/issues/470",
        f"RuntimeError: CUDA error: device-side assert triggered\n{_NOTES}"),
    "no_kernel": ("gpu_build", "https://github.com/hustvl/Vim/issues/74",
        f"RuntimeError: CUDA error: no kernel image is available for execution on the device\n{_NOTES}"),
    "access": ("gpu_access", "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        f"RuntimeError: CUDA error: an illegal memory access was encountered\n{_NOTES}"),
    "nccl_timeout": ("nccl_timeout", "https://github.com/XPixelGroup/BasicSR/issues/737",
        "\n".join((_WATCHDOG.format(1, 811), _WATCHDOG.format(0, 811), _WATCHDOG.format(2, 808)))),
    "nccl_system": ("network", "https://github.com/pytorch/pytorch/issues/149984",
        "torch.distributed.DistBackendError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.25.1\nncclSystemError: System call (e.g. socket, malloc) or external library call "
        "failed or device error. \nLast error:"),
    "nccl_remote": ("peer_lost", "https://github.com/NVIDIA/nccl/issues/795",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."),
    "shared_memory": ("shared_memory", "https://github.com/pytorch/pytorch/issues/108861",
        "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit."),
    "quota": ("disk_full", "errno(3): EDQUOT", f"OSError: [Errno {errno.EDQUOT}] {os.strerror(errno.EDQUOT)}"),
    "stale": ("broken_disk", "errno(3): ESTALE", f"OSError: [Errno {errno.ESTALE}] {os.strerror(errno.ESTALE)}"),
    "disk": ("broken_disk", "errno(3): EIO", f"OSError: [Errno {errno.EIO}] {os.strerror(errno.EIO)}"),
}  # fmt: skip

LABELS = {name: label for name, (label, _) in CASES.items()} | {name: label for name, (label, _, _) in SAYS.items()}

if __name__ == "__main__":
    name = sys.argv[1]
    print("reading the data", flush=True)
    if name in CASES:
        CASES[name][1]()
    else:
        print(SAYS[name][2], file=sys.stderr)
    sys.exit(1)
