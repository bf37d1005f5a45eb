"""A stand-in for NVIDIA's MPS control program, for machines without a GPU: it records its calls, and answers them.

It is written as a shell script `nvidia-cuda-mps-control` into a folder that a test puts first on PATH, with an
`nvidia-smi` that names eight GPUs. `-d` leaves a daemon behind, whose process id is in the folder of pipes. Commands
come on standard input. What CUDA would do with the service is not imitated.
"""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """#!/bin/bash
told={told}
if [ "$1" = -d ]; then
    echo "start $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY $(stat -c %a "$CUDA_MPS_PIPE_DIRECTORY")" >> "$told"
    [ {fails} = start ] && {{ echo "an instance is running"; exit 1; }}
    setsid sleep 3600 < /dev/null > /dev/null 2>&1 &
    echo $! > "$CUDA_MPS_PIPE_DIRECTORY/pid"
    exit 0
fi
pid=$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid" 2> /dev/null) || {{ echo "cannot find MPS control daemon"; exit 1; }}
read -r command
echo "$command" >> "$told"
case "$command" in
    get_server_list) [ {fails} = server ] || echo "$pid" ;;
    quit) kill -9 "$pid" ;;
esac
"""


def write_stand_in(folder: Path, fails: str = "nothing") -> Path:
    """Write the program into a folder, and return the file into which it writes its calls.

    Args:
        fails: `start`: the daemon does not start; `server`: the daemon starts no server.
    """
    folder.mkdir(exist_ok=True)
    told = folder / "told"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(_SCRIPT.format(told=told, fails=fails))
    program.chmod(0o755)
    smi = folder / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, GPU-0000000$gpu"; done\n')
    smi.chmod(0o755)
    return told
