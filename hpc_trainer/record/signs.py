"""Signs: lines of a failed run's output with a known meaning, what each means, and what helps.

A line without a sign means nothing: `why` then says that it does not know. record/tracebacks.py finds the sign of an
output. tests/programs/failing.py fails in most of these ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """Pattern of a job's last output (`pattern`), its meaning (`says`), and help for the run {run} (`advice`).

    `matched` is the pattern's first matching group, for {found} in the texts. `line` is the line that matched.
    `sign_of` fills both in, and {found} only in `says`.
    """

    name: str
    pattern: str
    says: str
    advice: tuple[str, ...]
    is_of_node: bool = False
    """True if the node is at fault: the same run may succeed on another one."""
    may_pass: bool = False
    """True if the same run may succeed later, without a change."""
    unless: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern and a name: if any line of the output has the pattern, the sign of that name is meant."""
    finds: Callable[[Sequence[str]], str] | None = None
    """Function of all lines whose result stands for {found} in `says`; None: `matched` stands for it."""
    matched: str = ""
    line: str = ""


def _sign(
    name: str, pattern: str, says: str, *advice: str, is_of_node: bool = False, may_pass: bool = False,
    unless: tuple[tuple[str, str], ...] = (), finds: Callable[[Sequence[str]], str] | None = None,
) -> Sign:  # fmt: skip
    return Sign(name, pattern, says, advice, is_of_node, may_pass, unless, finds)


_ENQUEUED = re.compile(r"Rank (\d+)\].*last enqueued NCCL work: (\d+)")
_LONGEST = 2000
"""Letters of such a line that are looked through; a longer text without it would take time squared."""


def _late_ranks(lines: Sequence[str]) -> str:
    """Return which ranks came late to a collective, from what the ranks' watchdogs printed; "" if they do not say."""
    matches = (_ENQUEUED.search(line[:_LONGEST]) for line in lines)
    enqueued = {int(match[1]): int(match[2]) for match in matches if match is not None}
    last = [rank for rank, work in sorted(enqueued.items()) if work == min(enqueued.values())]
    if len(last) == len(enqueued):
        return ""
    ranks = f"ranks {', '.join(map(str, last[:8]))} were" if len(last) > 1 else f"rank {last[0]} was"
    return f": {ranks} behind the others"


_UNKNOWN_MODULE = re.compile(
    r"The following module\(s\) are unknown: *\"?([\w./+-]*)|Unable to locate a modulefile for '([\w./+-]+)"
)


def _unknown_module(lines: Sequence[str]) -> str:
    """Return the first name of a module that Lmod or Environment Modules does not know. Lmod may start a new line."""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = _UNKNOWN_MODULE.search(line)
        if match is not None:
            return match[1] or match[2] or following.strip().partition(" ")[0].strip('"')
    return ""


_ELSEWHERE = "hpc-trainer retry {run} hardware.exclude={exclude}: the same run continues, on another node"
_CENTRE = "tell your centre which node it was: {node}"
_MORE_MEMORY = "hpc-trainer retry {run} {memory}"
_LESS_GPU_MEMORY = (
    "a smaller batch, or its own checkpointing of activations; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True by "
    "cluster.env, if much is reserved and not allocated",
    "larger GPUs: hardware.gpu_type, hardware.constraint",
)
_OWN_CODE = "fix the code or its input, then: hpc-trainer retry {run}"
_AGAIN = "hpc-trainer retry {run}"
_FABRIC = r"IBV_WC_\w+|Got completion .* with (?:error|status)"
"""The InfiniBand network reports an error to NCCL."""
_READS_DATA = r"/torch/utils/data/"
"""In a frame of a traceback: the program waited for a worker of torch's DataLoader."""

# A line is compared with the signs in this order. The first group may be empty.
SIGNS = (
    # The GPU, its driver, and what it says of a program.
    _sign(
        "gpu_lost",
        r"fallen off the bus|GPU is lost|ERROR_GPU_IS_LOST|Xid \([^)]*\): 79\b",
        "the node has lost contact with a GPU", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "gpu_ecc",
        r"(?i:uncorrectable ECC error)|CUDA_ERROR_ECC_UNCORRECTABLE|Xid \([^)]*\): (?:48|63|64|92|94|95|140)\b",
        "the memory of a GPU is faulty (ECC)", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "gpu_program",
        r"Xid \([^)]*\): (13|31|43|45|68|69)\b",
        "the driver ended the program's work on a GPU (Xid {found}): usually an error of the program, such as an "
        "illegal access",
        "run once with CUDA_LAUNCH_BLOCKING=1 in cluster.env: the traceback then names the operation",
        "if other programs fail on the same node too: " + _ELSEWHERE,
    ),
    _sign(
        "gpu_broken",
        r"Xid \([^)]*\): (\d+)\b",
        "the driver reports an error of a GPU (Xid {found})", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "gpu_memory",
        r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
        r"|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor|CUDA_ERROR_OUT_OF_MEMORY",
        "the memory of a GPU was not enough", *_LESS_GPU_MEMORY,
    ),
    _sign(
        "gpu_none",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|Found no NVIDIA driver|CUDA unknown error"
        r"|NVIDIA-SMI has failed|CUDA_ERROR_NO_DEVICE|invalid device ordinal|No supported gpu backend found"
        r"|deserialize object on (?:a )?CUDA device|Unable to initialize backend '(?:cuda|gpu|rocm)'",
        "the program sees no GPU, or fewer than it uses",
        "does the run ask for them (hardware=gpu_x1, hardware.gpus_per_node)? Is CUDA_VISIBLE_DEVICES set?",
        "to read weights of a GPU without one: torch.load(.., map_location='cpu')",
        "if other runs found one, its node may be at fault: " + _ELSEWHERE,
    ),
    _sign(
        "gpu_busy",
        r"all CUDA-capable devices are busy or unavailable|CUDA_ERROR_DEVICE_UNAVAILABLE",
        "another process holds the GPU, or its compute mode forbids a second one", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "gpu_driver",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old"
        r"|forward compatibility was attempted",
        "the node's NVIDIA driver is older than the program's CUDA needs",
        "an environment with an older CUDA, or nodes with a newer driver: hardware.constraint, hardware.partition",
    ),
    _sign(
        "driver_mismatch",
        r"(?i)driver/library version mismatch|NVML/RM version mismatch|LibRmVersionMismatch",
        "the node's NVIDIA driver was updated, and the old one is still at work", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "gpu_build",
        r"no kernel image is available|CUDA_ERROR_NO_BINARY_FOR_GPU|Torch not compiled with CUDA enabled"
        r"|only supports? [A-Z]\w+ GPUs?\b|requires? (?:a GPU with )?compute capability",
        "the program's CUDA code was not built for this GPU, or not at all",
        "an environment that is built for it (`python -c 'import torch; print(torch.cuda.get_arch_list())'`)",
        "or another GPU: hardware.gpu_type, hardware.constraint",
    ),
    _sign(
        "gpu_assert",
        r"device-side assert triggered",
        "an assertion failed on the GPU: usually an index or a label outside its range",
        "run once with CUDA_LAUNCH_BLOCKING=1 in cluster.env, or on a CPU: the message then names the operation",
    ),
    _sign(
        "gpu_access",
        r"CUDA error: (an illegal memory access|misaligned address|unspecified launch failure|an illegal instruction)",
        "a kernel on the GPU failed ({found})",
        "run once with CUDA_LAUNCH_BLOCKING=1 in cluster.env: the traceback then names the operation",
        "if it works on other nodes: " + _ELSEWHERE,
    ),
    _sign(
        "gpu_library",
        r"\b(CUDNN_STATUS_\w+|CUBLAS_STATUS_\w+|CUSPARSE_STATUS_\w+|CUSOLVER_STATUS_\w+|CUFFT_(?!SUCCESS)\w+)",
        "a library of the GPU failed ({found}): its memory may be full, or it may not fit the driver or the GPU",
        "a smaller batch: if that works, it was the memory",
        "compare the versions (`python -m torch.utils.collect_env`) with an environment in which it works",
        "if it works on other nodes: " + _ELSEWHERE,
    ),
    # Ranks that wait for each other, and the network.
    _sign(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout(?:: (WorkNCCL\([^)]*\)))?"
        r"|gloo/\S+ Timed out waiting \d+ms for \w+ operation",
        "a collective did not end in time, because a rank came late or not at all{found}",
        "{logs}: look at the rank that is named, or at one that did not print this line",
        "if a rank loads or evaluates for long: a larger parallel.timeout_s, or the program's own time-out",
        finds=_late_ranks,
    ),
    _sign(
        "nccl_usage",
        r"Duplicate GPU detected|ncclInvalidUsage|\bnccl\w+ failed: invalid usage|invalid usage \(run with NCCL",
        "NCCL was called wrongly: usually two ranks use the same GPU",
        "as many ranks on a node as GPUs (hardware.gpus_per_node), and each takes the GPU with the number $LOCAL_RANK",
    ),
    _sign(
        "network",
        r"nccl(?:SystemError|UnhandledCudaError|InternalError)|NCCL error: unhandled (?:system|cuda) error"
        rf"|{_FABRIC}",
        "NCCL, by which the ranks communicate, failed",
        "NCCL_DEBUG=INFO in cluster.env names the call; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose the network",
        "if it works on other nodes: " + _ELSEWHERE,
        may_pass=True,
    ),
    _sign(
        "port_taken",
        r"(?i)Address already in use|EADDRINUSE",
        "the port that it wanted to listen at is in use",
        _AGAIN,
        "let the program choose a free port, or take $MASTER_PORT",
        may_pass=True,
    ),
    _sign(
        "no_launcher",
        r"environment variable (\w+) expected, but not set",
        "the program expects variables of a launcher, and {found} is not set",
        "start it with torchrun in the command, also for one rank; a run with several ranks gets the variables from "
        "hpc-trainer",
    ),
    _sign(
        "rendezvous",
        r"DistStoreError|DistNetworkError|Rendezvous\w*Error|[Tt]he client socket has (?:timed out|failed to connect)"
        r"|waiting for (?:clients|workers)\. \d+/\d+",
        "the ranks did not all meet: some did not start in time, or do not reach the address at which they meet",
        "{logs}: which rank started late, or failed first?",
        "each rank finds the address in $MASTER_ADDR and $MASTER_PORT, its number in $RANK, and the number of ranks "
        "in $WORLD_SIZE",
        "if no rank failed first: hpc-trainer retry {run}",
        may_pass=True,
    ),
    _sign(
        "slow_data",
        r"DataLoader timed out after",
        "a process that reads data for the program took longer than its DataLoader allows",
        "a longer `timeout` of the DataLoader, more data workers, or data on a faster disk",
        "if the file system was slow for a while: hpc-trainer retry {run}",
        may_pass=True,
    ),
    _sign(
        "data_worker",
        r"DataLoader worker \(pid.* exited unexpectedly",
        "a process that reads data for the program (num_workers) ended, most likely because it was killed as the "
        "memory was full, or by an error in compiled code",
        _MORE_MEMORY,
        "fewer data workers; num_workers=0 shows an error of the code that reads data",
    ),
    _sign(
        "peer_lost",
        r"ncclRemoteError|Connection closed by peer|Connection reset by peer|remote process exited|Broken pipe",
        "another process broke the connection: usually because it had failed first",
        "{logs}: which rank failed first, and why?",
        "if none did: hpc-trainer retry {run}",
        may_pass=True, unless=((_READS_DATA, "data_worker"), (_FABRIC, "network")),
    ),
    _sign(
        "server_failed",
        r"\b((?:429|50[0234]) (?:Client|Server) Error)|HTTP Error (429|50[0234])\b|too many (\d+) error responses"
        r"|(?i:\b(too many requests|service unavailable|bad gateway|gateway time-?out)\b)",
        "a server refused for the moment, or failed ({found})",
        "hpc-trainer retry {run}, later",
        "fetch what it needs once, on a login node, and not in each run",
        may_pass=True,
    ),
    _sign(
        "certificate",
        r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|SSLCertVerificationError",
        "the certificate of a server is not trusted: usually that of a proxy of the site, or the list is old",
        "SSL_CERT_FILE and REQUESTS_CA_BUNDLE in cluster.env name the site's list of certificates",
        "or fetch it on a login node first",
    ),
    _sign(
        "no_internet",
        r"Name or service not known|Temporary failure in name resolution|Network is unreachable|Failed to resolve '"
        r"|No address associated with hostname|LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'http"
        r"|Max retries exceeded with url(?!.*Connection refused)|Run initialization has timed out",
        "the node cannot reach an address: compute nodes often have no internet",
        "fetch it on a login node first; HF_HUB_OFFLINE=1 and WANDB_MODE=offline in cluster.env",
    ),
    _sign(
        "refused",
        r"Connection refused",
        "no process listens at the address that it connects to",
        "does the server that it needs run, and on which node?",
    ),
    _sign(
        "not_logged_in",
        r"\b401 Client Error|GatedRepoError|api_key not configured|No API key configured"
        r"|Invalid username or password|\b403 Client Error",
        "a service on the internet does not accept the run's credentials, or got none",
        "log in on a login node, or set the service's variable in cluster.env",
    ),
    # Environments and files.
    _sign(
        "missing_module",
        r"No module named '?([\w.]+)",
        "its Python has no module {found}",
        "does cluster.python, or the last line of cluster.setup, lead to the environment that you mean?",
        "install {found} there (pip install), or add its folder to PYTHONPATH in cluster.env",
    ),
    _sign(
        "no_modules",
        r"\bmodule: (?:command )?not found",
        "the node's shell has no `module`",
        "source the site's own file first, in cluster.setup: often `source /etc/profile.d/modules.sh` or "
        "/etc/profile.d/lmod.sh",
    ),
    _sign(
        "unknown_module",
        _UNKNOWN_MODULE.pattern,
        "there is no module {found}",
        "run `module avail` on such a node, and write the right name into cluster.environment.modules or cluster.setup",
        finds=_unknown_module,
    ),
    _sign(
        "no_conda",
        r"\bconda: (?:command )?not found|Run 'conda init'|not been properly configured to use 'conda activate'",
        "the node's shell does not know conda",
        "with cluster.environment.conda set cluster.environment.conda_root=CONDA_FOLDER; with `conda activate` in "
        "cluster.setup add this line before it: source CONDA_FOLDER/etc/profile.d/conda.sh",
        "or set the Python without activation: cluster.python=CONDA_FOLDER/envs/NAME/bin/python",
    ),
    _sign(
        "no_environment",
        r"Could not find conda environment: (\S+)|Environment(?:Name|Location)NotFound: .*?: (\S+)",
        "there is no conda environment {found}",
        "`conda env list` shows the existing ones",
    ),
    _sign(
        "old_system",
        r"version `?(GLIBC\w*_[\w.]+)'? not found",
        "a library or program was built for a newer system than the node's ({found})",
        "use an environment that was made on such a node, or a container",
    ),
    _sign(
        "missing_library",
        r"([\w.+-]+\.so[\w.]*): cannot open shared object file|\bld: cannot find (-l[\w.+-]+)",
        "the library {found} is not found on the node",
        "load the module that provides it in cluster.setup, or set LD_LIBRARY_PATH in cluster.env",
    ),
    _sign(
        "wrong_version",
        r"cannot import name '(\w+)'|undefined symbol: (\S+)|module '[\w.]+' has no attribute '(\w+)'"
        r"|([\w.]+) size changed, may indicate binary incompatibility|compiled using (NumPy 1)\.x"
        r"|(\S+) failed to import$|`?([\w.]+)`? was removed in (?:the )?\w+ \d"
        r"|(Descriptors) cannot (?:not )?be created",
        "packages do not fit each other ({found}): usually another version of one is installed",
        "compare `pip list` in cluster.python's environment with the one in which it worked",
    ),
    _sign(
        "wrong_binary",
        r"Exec(?:utable file)? format error",
        "a program was built for another kind of processor, or is not a program",
        "run `file PROGRAM` on such a node, then use another cluster.python or environment",
    ),
    _sign(
        "no_compiler",
        r"No working C\+\+ compiler|[Ff]ailed to find C compiler|(CUDA_HOME) environment variable is not set"
        r"|(Ninja) is required to load"
        r"|No such file or directory: '(?:\S*/)?(nvcc|gcc|g\+\+|ninja|hipcc)'",
        "a compiler that it needs to build code is not found on the node",
        "load the modules that bring it in cluster.setup, such as gcc and cuda",
        "or build on a login node, or switch off what is compiled (torch.compile, extensions)",
    ),
    _sign(
        "two_openmp",
        r"OMP: Error #15",
        "two packages of its environment bring different OpenMP libraries",
        "install both from the same source (only conda, or only pip)",
    ),
    _sign(
        "encoding",
        r"Unicode(?:Decode|Encode)Error",
        "a text has characters that the encoding does not have",
        "PYTHONUTF8=1 in cluster.env, or name the encoding where the file is opened",
    ),
    _sign(
        "pickled_file",
        r"Unsupported global: GLOBAL|Unsupported class \S+|Object arrays cannot be loaded"
        r"|file contains pickled|containing pickled data when allow_pickle=False",
        "a file that it reads holds pickled Python objects, which the loader refuses because they can run code",
        "if the file is yours: weights_only=False for torch.load, allow_pickle=True for numpy.load",
        "else save plain tensors and numbers",
    ),
    _sign(
        "damaged_file",
        r"Ran out of input|UnpicklingError|invalid load key|BadZipFile|not a zip file|Compressed file ended before"
        r"|PytorchStreamReader failed|JSONDecodeError|zlib\.error|BadGzipFile|SafetensorError|image file is truncated"
        r"|CRC check failed|CRC-32|unexpected end of (?:data|file)|cannot identify image file"
        r"|Failed to read all data|No data left in file|No columns to parse from file|magic bytes not found"
        r"|(?i:truncated (?:file|data|image))|file signature not found",
        "a file that it reads is damaged, cut short, or of another kind",
        "the traceback names the file: compare its size and checksum with the original",
    ),
    _sign(
        "missing_file",
        r"(?:execve\(\)|bash|line \d+): (\S+): No such file|exec: (\S+): not found|can't open file '([^']+)'"
        r"|No such file or directory: '([^']+)'",
        "the node has no file {found}",
        "is the file on a disk that this node sees? If cluster.python is missing, write its full path",
    ),
    _sign(
        "missing_command",
        r"(\S+): command not found",
        "the node's shell finds no program {found}",
        "in cluster.setup, write its full path, or load the module that brings it",
    ),
    # Memory, disks and limits of the node.
    _sign(
        "shared_memory",
        r"out of shared memory|insufficient shared memory|unable to (?:allocate|write|mmap).*/(?:dev/shm|torch_)"
        r"|No space left on device: '/dev/shm",
        "the shared memory of the node, /dev/shm, is full",
        "fewer data workers; in a container a larger --shm-size; or torch's `file_system` sharing strategy",
    ),
    _sign(
        "host_memory",
        r"(?i)oom[-_ ]kill|Out Of Memory|task\w* [\d,-]+: Killed|^Killed$|(?:\b(?:ba)?sh|line \d+): +\d+ Killed"
        r"|^MemoryError\b|MemoryError: |Unable to allocate [\d.]+ \wi?B for an array"
        r"|DefaultCPUAllocator: (?:can't|not enough)|Cannot allocate memory"
        r"|killed by signal: Killed"
        r"|\(exitcode: -9\)|Signal 9 \(SIGKILL\) received|std::bad_alloc",
        "the host's memory was not enough: an allocation failed, or a process was most likely killed for it",
        _MORE_MEMORY,
        "if the message names a size that is far too large: is a shape wrong?",
    ),
    _sign(
        "disk_full",
        r"No space left on device|Disk quota exceeded",
        "a disk is full, or its quota is used up",
        "make room; `quota` or the site's own command shows what is used",
    ),
    _sign(
        "broken_disk",
        r"Input/output error|Stale file handle|Remote I/O error|Read-only file system"
        r"|Transport endpoint is not connected|Cannot send after transport endpoint shutdown",
        "the node's disk or file server failed",
        "hpc-trainer retry {run}", "if it fails again: " + _ELSEWHERE,
        is_of_node=True,
    ),
    _sign(
        "write_failed",
        r"PytorchStreamWriter failed|inline_container\.cc:\d+\] \. unexpected pos|file write failed",
        "torch could not write a file whole: usually the disk, or its quota, is full",
        "`quota` or the site's own command shows what is used; make room, then: hpc-trainer retry {run}",
    ),
    _sign(
        "file_locks",
        r"[Uu]nable to lock file|No locks available",
        "a file could not be locked: another process has it open, or its file system has no locks",
        "HDF5_USE_FILE_LOCKING=FALSE by cluster.env, if the run only reads the file; else a copy for each run",
    ),
    _sign(
        "lock_held",
        r"database is locked|The file lock '.+' could not be acquired",
        "another process held a lock for longer than the program waits",
        _AGAIN,
        "a longer time-out of the lock, or a database or file for each run; SQLite is slow on a shared file system",
        may_pass=True,
    ),
    _sign(
        "file_too_large",
        r"File too large|SIGXFSZ|File size limit exceeded",
        "a file became larger than a limit (ulimit -f) or the file system allows",
        "ulimit -f unlimited in cluster.setup, if the site allows it; else write smaller files",
    ),
    _sign(
        "open_files",
        r"Too many open files",
        "it has more files open than its limit allows (ulimit -n)",
        "ulimit -n 65536 in cluster.setup, if the site allows it; fewer data workers",
    ),
    _sign(
        "processes",
        r"can't start new thread|fork: (?:retry: )?(?:Resource temporarily unavailable|Cannot)"
        r"|BlockingIOError: \[Errno 11\]|Resource temporarily unavailable",
        "it has more processes or threads than its limit allows (ulimit -u)",
        "fewer data workers or threads (OMP_NUM_THREADS in cluster.env)",
    ),
    _sign(
        "exists",
        r"\bFileExistsError\b|: File exists$",
        "a file or folder that it wants to make exists already",
        "did an attempt before make it, or another rank? Then exist_ok=True in os.makedirs, or another name",
        "or a folder for each run: {{run.dir}} in train.command",
    ),
    _sign(
        "permission",
        r"(\S+): Permission denied|Permission denied: '([^']+)'|Permission denied|Operation not permitted",
        "there is no permission to read, write or run a file: {found}",
        "run `ls -ld` on it and on the folders above it, on such a node",
    ),
    # The program itself.
    _sign(
        "weights",
        r"(?:Missing|Unexpected) key\(s\) in state_dict|size mismatch for \S+|Error\(s\) in loading state_dict",
        "the weights that it loads are of another model",
        "use the model of the weights, or weights of this model",
    ),
    _sign(
        "shapes",
        r"shapes cannot be multiplied|must match the (?:existing )?size|Sizes of tensors must match"
        r"|shape '.*' is invalid for|could not be broadcast together|Expected input batch_size",
        "two tensors have incompatible shapes",
        _OWN_CODE,
    ),
    _sign(
        "labels",
        r"Target -?\d+ is out of bounds|index out of range in self",
        "a label or an index in the data is outside its range",
        "compare the number of classes, or of tokens, with the largest one in the data; then: hpc-trainer retry {run}",
    ),
    _sign(
        "no_data",
        r"but got num_samples=0|Couldn't find any class folder"
        r"|(?i:\bfound (?:0|no) (?:valid )?(?:files?|images?|samples?)\b|\bno (?:data )?(?:files|images|samples) found)"
        r"|(?i:data ?set is empty)",
        "it found no data",
        "does the path of its data exist on the node? Is a filter or a split too narrow?",
    ),
    _sign(
        "arguments",
        r"error: (unrecognized arguments: .*|the following arguments are required: .*|argument \S+: .*)"
        r"|(Could not override '[^']+')",
        "the program does not accept its command line: {found}",
        "another command is another run: hpc-trainer submit --command '..'",
    ),
    _sign(
        "syntax",
        r"\b(SyntaxError|IndentationError|TabError): ",
        "Python cannot parse the code ({found})",
        "is it meant for another version of Python? Else " + _OWN_CODE,
    ),
    _sign(
        "not_a_number",
        r"(?i)\b(?:loss|gradients?) (?:is|are|was|became) (?:nan|inf)|returned nan values|FloatingPointError"
        r"|(?i:loss scale (?:already at|below|reached)|minimum loss scale)",
        "a loss or a gradient became NaN or infinite",
        "a smaller learning rate, clipping, fp32; is there NaN in the data?",
    ),
    _sign(
        "crash",
        r"(Segmentation fault|Bus error|Illegal instruction|Aborted|ended with SIG(?:SEGV|BUS|ILL|FPE|ABRT)"
        r"|double free or corruption|terminate called after throwing)",
        "a compiled library crashed ({found})",
        "hpc-trainer logs {run} --all-ranks shows what came before; `Illegal instruction`: built for another "
        "processor; `Bus error`: /dev/shm may be full (fewer data workers)",
    ),
    _sign(
        "cpu_time",
        r"ended with SIGXCPU|CPU time limit exceeded",
        "it used more processor time than its limit allows (ulimit -t)",
        "ulimit -t unlimited in cluster.setup, if the site allows it",
    ),
    _sign(
        "signal",
        r"ended with SIG(TERM|INT|HUP|USR1|USR2|PIPE|QUIT|ALRM)",
        "a signal ended it that neither hpc-trainer nor Slurm sent: SIG{found}",
        "did it, or a user on the node, send the signal? {logs}", _AGAIN,
        may_pass=True,
    ),
    _sign(
        "launch_failed",
        r"Task launch for \S+ failed on node (\S+): ",
        "Slurm could not start the ranks on node {found}", _ELSEWHERE, _CENTRE,
        is_of_node=True,
    ),
    _sign(
        "srun",
        r"^srun: (?:(?:error|fatal): )?(?!\S+: tasks? )(.*(?:option|[Ii]nvalid|[Uu]nable|permitted|requested).*)",
        "srun did not start the ranks: {found}",
        "check cluster.srun_args, and hardware.* if the error names a resource",
    ),
)  # fmt: skip
