"""Programs that fail for a known reason: `python failing.py CASE`; the corpus of `why` is made of runs of them.

CASES maps a case to (label, how it fails). `SAYS` has vendors' lines with their source, for what no machine without a
GPU can do: a case prints them as a program would, and exits with 1. Labels are diagnoses of `why`; `exception` is an
error of the program's own code, and `not_known` means that nothing in the output tells the reason.
blind_failures.txt has programs and lines whose cause was written down before any sign was compared with them.
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
import typing
import urllib.request
import zipfile
from pathlib import Path

CGROUPS = "/sys/fs/cgroup/memory"


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


def _cgroup() -> None:
    """Let the kernel kill a child above the memory of its control group (version 1), where we may make one."""
    ours = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    parent = Path(CGROUPS, ours.rpartition(":")[2].lstrip("/"))
    group = parent / f"failing-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
    _bash(
        f"echo $$ >{group}/tasks; {sys.executable} -c 'print(len(bytearray(2**29)))'; code=$?; "
        f"echo $$ >{parent}/tasks; rmdir {group}; exit $code"
    )


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
    "cgroup": ("host_memory", _cgroup),
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
_TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 75, in <module>\n    main()\n'
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
    # What people posted, chosen before the signs were compared with it.
    "oom_step": ("host_memory", "https://github.com/ZwwWayne/K-Net/issues/30",
        "slurmstepd-gpu20-15: error: Detected 1 oom-kill event(s) in StepId=9411285.0. Some of your processes may "
        "have been killed by the cgroup out-of-memory handler.\nsrun: error: gpu20-15: task 0: Out Of "
        "Memory\nsrun: launch/slurm: _step_signal: Terminating StepId=9411285.0\nslurmstepd-gpu20-15: error: *** "
        "STEP 9411285.0 ON gpu20-15 CANCELLED AT 2022-05-17T17:58:10 "
        "***\nlib/python3.7/multiprocessing/semaphore_tracker.py:144: UserWarning: semaphore_tracker: There "
        "appear to be 56 leaked semaphores to clean up at shutdown\n  len(cache))"),
    "store_clients": ("rendezvous", "https://github.com/OpenRLHF/OpenRLHF/issues/1040",
        _TRACEBACK +
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined."),
    "store_socket": ("rendezvous", "https://github.com/nvidia-cosmos/cosmos-rl/issues/681",
        _TRACEBACK + ("File \"torch/distributed/elastic/rendezvous/dynamic_rendezvous.py\", line 1126, in "
        "_create_tcp_store_server\n    return dist.TCPStore(\ntorch.distributed.DistNetworkError: The client "
        "socket has timed out after 300000ms while trying to connect to (036c56dce41b, 41331).")),
    "cudnn": ("gpu_library", "https://github.com/Turoad/CLRNet/issues/94",
        _TRACEBACK + "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    "hub_offline": ("no_internet", "https://github.com/caoyunkang/Segment-Any-Anomaly/issues/18",
        _TRACEBACK +
        ("huggingface_hub.utils._errors.LocalEntryNotFoundError: Connection error, and we cannot find the "
        "requested files in the disk cache. Please try again or make sure your Internet connection is on.")),
    "loss_scale": ("not_a_number", "https://github.com/facebookresearch/fairseq/issues/1895",
        _TRACEBACK +
        ("FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering "
        "the learning rate, using gradient clipping or increasing the batch size.")),
    "nccl_symbol": ("wrong_version", "https://github.com/robotarium/robotarium_python_simulator/issues/42",
        "Traceback (most recent call last):\n    import torch\n  File \"torch/__init__.py\", line 431, in "
        "<module>\n    from torch._C import *  # noqa: F403\nImportError: "
        "/usr/local/lib/python3.10/site-packages/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommShrink"),
    "cublas": ("gpu_library", "https://github.com/isl-org/DPT/issues/4",
        _TRACEBACK +
        ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, "
        "m, n, k, &falpha, a, CUDA_R_16F, lda, b, CUDA_R_16F, ldb, &fbeta, c, CUDA_R_16F, ldc, CUDA_R_32F, "
        "CUBLAS_GEMM_DFALT_TENSOR_OP)`")),
    "unused_parameters": ("exception", "https://github.com/ZhengYinan-AIR/Diffusion-Planner/issues/65",
        _TRACEBACK +
        ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your module has parameters that were not used in producing loss. You can enable "
        "unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`torch.nn.parallel.DistributedDataParallel`")),
    "no_libcuda": ("missing_library", "https://github.com/pytorch/pytorch/issues/94582",
        "/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1 exit status\n" + _TRACEBACK +
        ("subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpj_1fdcu9/main.c', '-O3', '-shared', "
        "'-fPIC', '-lcuda', '-o', '/tmp/triton_.so']' returned non-zero exit status 1.")),
    "elastic_sigkill": ("host_memory", "https://github.com/lzhxmu/CPPO/issues/6",
        ("E0325 20:57:27.620000 2606 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) "
        "local_rank: 0 (pid: 14750) of binary: /usr/bin/python\n") + _TRACEBACK +
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
        "\n============================================================\nsrc/open_r1/grpo_gsm.py "
        "FAILED\n------------------------------------------------------------\nFailures:\n  "
        "<NO_OTHER_FAILURES>\n------------------------------------------------------------\nRoot Cause (first "
        "observed failure):\n[0]:\n  time      : 2025-05-21_15:43:03\n  rank      : 0 (local_rank: 0)\n  exitcode "
        ": -9 (pid: 14750)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID "
        "14750\n============================================================")),
    "wandb_init": ("no_internet", "https://github.com/Wuziyi616/EventCLIP/issues/8",
        ("wandb: Network error (SSLError), entering retry loop.\nwandb: ERROR Run initialization has timed out "
        "after 90.0 sec. Please try increasing the timeout with the `init_timeout` setting: "
        "`wandb.init(settings=wandb.Settings(init_timeout=120))`.\n") + _TRACEBACK +
        ("wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec. Please try increasing "
        "the timeout with the `init_timeout` setting: `wandb.init(settings=wandb.Settings(init_timeout=120))`.")),
    "hdf5_lock": ("file_locks", "https://github.com/open-mpi/ompi/issues/6535",
        _TRACEBACK +
        ("File \"h5py/h5f.pyx\", line 78, in h5py.h5f.open\nOSError: Unable to open file (unable to lock file, "
        "errno = 11, error message = 'Resource temporarily unavailable')")),
    "hdf5_no_locks": ("file_locks", "https://github.com/aertslab/pySCENIC/issues/192",
        _TRACEBACK +
        ("File \"h5py/h5f.pyx\", line 108, in h5py.h5f.create\nOSError: Unable to create file (unable to lock "
        "file, errno = 37, error message = 'No locks available')")),
    "numpy_abi": ("wrong_version", "https://github.com/mdtraj/mdtraj/issues/1628",
        "Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\n  File "
        "\"mdtraj/formats/dcd/dcd.pyx\", line 1, in init mdtraj.formats.dcd\nValueError: numpy.ndarray size "
        "changed, may indicate binary incompatibility. Expected 88 from C header, got 80 from PyObject"),
    "step_processors": ("srun", "https://github.com/PKUHPC/OpenSCOW/issues/1157",
        "srun: error: Unable to create step for job 65: More processors requested than permitted"),
    "step_credential": ("launch_failed", "https://github.com/ai4d-iasc/trixie/issues/58",
        "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired"),
    "nvml_mismatch": ("driver_mismatch", "https://github.com/mozilla/translations/issues/1167",
        "nvidia-smi failed with return code 18\nFailed to initialize NVML: Driver/library version mismatch\nNVML "
        "library version: 550.144"),
    "checkpoint_write": ("write_failed", "https://github.com/hiyouga/LlamaFactory/issues/1223",
        _TRACEBACK +
        ("File \"torch/serialization.py\", line 650, in _save\n    zip_file.write_record(name, storage.data_ptr(), "
        "num_bytes)\nRuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter failed writing "
        "file data/176: file write failed")),
    "agent_permission": ("permission", "https://github.com/elyall/wandb_on_slurm/issues/5",
        "slurmstepd: error: execve(): start-agent.sh: Permission denied\nsrun: error: my-node01: task 0: Exited "
        "with exit code 13"),
    "no_torchrun": ("missing_file", "https://github.com/CSCfi/pytorch-ddp-examples/issues/1",
        "slurmstepd: error: execve(): torchrun: No such file or directory\nsrun: error: g1301: task 0: Exited "
        "with exit code 2\nsrun: launch/slurm: _step_signal: Terminating StepId=3022331.0"),
    "same_gpu": ("nccl_usage", "https://github.com/horovod/horovod/issues/3929",
        ("smc-gpu-03:29881:30401 [0] NCCL INFO init.cc:916 -> 5\n\nsmc-gpu-03:29880:30398 [0] init.cc:497 NCCL "
        "WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000\nsmc-gpu-03:29880:30398 [0] "
        "NCCL INFO init.cc:867 -> 5\n") + _TRACEBACK +
        "RuntimeError: ncclCommInitRank failed: invalid usage"),
    "gloo_timeout": ("nccl_timeout", "https://github.com/meta-pytorch/torchtune/issues/2676",
        _TRACEBACK +
        ("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
        "1800000ms for recv operation to complete")),
    "write_fd": ("broken_disk", "https://github.com/pytorch/pytorch/issues/10577",
        _TRACEBACK +
        ("File \"torch/serialization.py\", line 297, in _save\n    serialized_storages[key]._write_file(f, "
        "_should_read_directly(f))\nRuntimeError: write(): fd 29 failed with Input/output error")),
    "hdf5_io": ("broken_disk", "https://github.com/h5py/h5py/issues/1679",
        _TRACEBACK +
        "OSError: Unable to open file (unable to lock file, errno = 5, error message = 'Input/output error')"),
    "step_memory": ("srun", "https://github.com/eth-cscs/DLA-Future/issues/337",
        "srun: Job 29986033 step creation temporarily disabled, retrying (Requested nodes are busy)\nsrun: Job "
        "29986033 step creation still disabled, retrying (Requested nodes are busy)\nsrun: error: Unable to "
        "create step for job 29986033: Memory required by task is not available"),
}  # fmt: skip


class Blind(typing.NamedTuple):
    """A section of blind_failures.txt: a program, or lines with their source."""

    label: str
    again: str
    """Whether the same run may succeed later: may_pass, comes_again or either."""
    source: str
    text: str


def _blind() -> dict[str, Blind]:
    sections = Path(__file__).with_name("blind_failures.txt").read_text().removeprefix("=== ").split("\n=== ")
    heads = [section.partition("\n")[::2] for section in sections]
    words = [(head.split(maxsplit=3), text) for head, text in heads]
    return {
        f"blind_{name}": Blind(label, again, "".join(source), text) for (name, label, again, *source), text in words
    }


def _run_blind(case: Blind) -> None:
    if case.source:
        print(case.text, file=sys.stderr)
        return
    os.chdir(os.environ["HPC_TRAINER_RUN_DIR"])
    Path("train.py").write_text(case.text)
    os.execv(sys.executable, [sys.executable, str(Path("train.py").absolute())])


BLIND = _blind()
LABELS = {name: label for name, (label, *_) in (CASES | SAYS | BLIND).items()}

if __name__ == "__main__":
    name = sys.argv[1]
    print("reading the data", flush=True)
    if name in CASES:
        CASES[name][1]()
    elif name in BLIND:
        _run_blind(BLIND[name])
    else:
        print(SAYS[name][2], file=sys.stderr)
    sys.exit(1)
