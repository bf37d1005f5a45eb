"""Parameters of submitit become keys that ask Slurm for the same; what has no equivalent is said with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from tests.unit.slurm.fake_slurm import FakeSlurm

Play = Callable[..., tuple[int, str]]
Document = Callable[..., Any]
# Parameters of one executor each, as published scripts give them, with names and figures of our own.
EXAMPLES = {
    "one_gpu": {
        "timeout_min": 240, "gpus_per_node": 1, "cpus_per_task": 10, "mem_gb": 60, "slurm_partition": "dev",
        "slurm_array_parallelism": 16,
    },
    "ddp": {
        "timeout_min": 2880, "nodes": 2, "gpus_per_node": 8, "tasks_per_node": 8, "cpus_per_task": 10, "mem_gb": 320,
        "slurm_partition": "learn", "slurm_constraint": "volta32gb", "slurm_signal_delay_s": 120,
    },
    "typed_gres": {
        "slurm_time": 580, "slurm_gres": "gpu:a40:2", "tasks_per_node": 2, "cpus_per_task": 16, "slurm_mem": "16G",
        "slurm_qos": "high", "slurm_account": "rrg-lab", "slurm_exclude": "n[1-3]",
    },
    "memory_for_each_gpu": {
        "timeout_min": 60, "slurm_gpus_per_node": "h100:4", "slurm_ntasks_per_node": 4, "cpus_per_task": 24,
        "slurm_mem_per_gpu": "120G", "slurm_additional_parameters": {"mail-type": "END", "reservation": "school"},
    },
    "no_gpu": {
        "timeout_min": 30, "tasks_per_node": 4, "cpus_per_task": 2, "slurm_mem_per_cpu": "2000MB",
        "slurm_exclusive": True, "slurm_nodelist": "n7", "slurm_setup": ["module load cuda"],
    },
}  # fmt: skip
_NOT_COMPARED = {"output", "error", "open-mode", "signal", "wckey", "job-name", "comment", "array", "requeue"}


def directives(script: str) -> dict[str, Any]:
    """Options of a batch script; memory in MB."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
    options = {key: value.strip("'") for key, value in options.items() if key not in _NOT_COMPARED}
    units = {"G": 1024, "M": 1}
    for key in ("mem", "mem-per-gpu", "mem-per-cpu"):
        if key in options:
            amount, unit = re.fullmatch(r"([\d.]+)([GM])B?", options[key]).groups()  # type: ignore[union-attr]
            options[key] = float(amount) * units[unit]
    return options


def of_submitit(parameters: dict[str, Any]) -> dict[str, Any]:
    """Options of the script that submitit writes for these parameters."""
    executor = object.__new__(SlurmExecutor)  # it makes none without srun
    generic = {"timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node"}
    own = executor._convert_parameters({key: value for key, value in parameters.items() if key in generic})
    own |= {key.removeprefix("slurm_"): value for key, value in parameters.items() if key not in generic}
    return directives(_make_sbatch_string(command="true", folder="/tmp", **own))


def write_all(files: dict[str, str], folder: Path) -> None:
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("is_hydra", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_translated_asks_slurm_for_the_same(
    name: str, is_hydra: bool, tmp_path: Path, document: Document, fake_slurm: FakeSlurm
) -> None:
    parameters = EXAMPLES[name]
    if is_hydra:
        path = tmp_path / "launcher.yaml"
        path.write_text(yaml.safe_dump({k.removeprefix("slurm_"): v for k, v in parameters.items()}))
        if "time" in yaml.safe_load(path.read_text()):
            pytest.skip("the launcher has timeout_min only")
        told = document("init", "--from-hydra-submitit", str(path))["translation"]
    else:
        path = tmp_path / "launcher.py"
        words = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        path.write_text(f"import submitit\nex = submitit.AutoExecutor(folder='logs')\nex.update_parameters({words})\n")
        told = document("init", "--from-submitit", str(path))["translation"]
    write_all(told["files"], tmp_path)
    fake_slurm.print("scontrol", "ClusterName = bed\n")
    more = [f"cluster.account={told['account']}"] if told["account"] else []
    chosen = ["--config-dir", "conf", "hardware=launcher", "cluster=launcher"]
    planned = document("plan", *chosen, *more, "train.main=json.loads", "--trust", "json", "sweep_name=s")
    ours, theirs = directives(planned["arrays"][0]["script"]), of_submitit(parameters)
    theirs.setdefault("ntasks-per-node", "1")
    assert ours == theirs
    lead = parameters.get("slurm_signal_delay_s")
    assert lead is None or f"--signal=USR2@{lead}" in planned["arrays"][0]["script"]
    assert all(line in planned["arrays"][0]["script"] for line in parameters.get("slurm_setup", ()))


SCRIPT = """
import argparse
import submitit

class Trainer:
    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)

parser = argparse.ArgumentParser()
parser.add_argument("--ngpus", default=8, type=int)
parser.add_argument("--partition")
args = parser.parse_args()
raise SystemExit("the script was run")
HOURS = 48
executor = submitit.AutoExecutor("logs/%j", slurm_max_num_timeout=30)
extra = dict(slurm_comment="mine", slurm_gpus_per_task=1)
if args.partition == "big":
    extra["slurm_qos"] = "high"
executor.update_parameters(
    mem_gb=40 * args.ngpus,
    timeout_min=HOURS * 60,
    slurm_partition=args.partition,
    tasks_per_node=args.ngpus,
    slurm_additional_parameters={"begin": "now+10", "gres-flags": "enforce-binding", "nonsense": 1},
    **extra,
    **unknown(),
)
jobs = executor.map_array(Trainer(), [1, 2])
"""


def test_values_of_a_script_are_found_where_they_are_set(tmp_path: Path, document: Document) -> None:
    (tmp_path / "go.py").write_text(SCRIPT)
    told = document("init", "--from-submitit", "go.py")["translation"]
    hardware = yaml.safe_load(told["files"]["conf/hardware/go.yaml"])
    assert hardware == {
        "name": "go", "gpus_per_node": 8, "mem_gb_per_node": 320, "time_limit_min": 2880, "qos": "high",
    }  # fmt: skip
    rows = {row["theirs"].split("=")[0]: row for row in told["rows"]}
    assert rows["slurm_partition"]["note"] == "computed there: set hardware.partition yourself"
    assert rows["slurm_qos"]["note"] == "there only if args.partition == 'big'"
    assert rows["slurm_partition"]["line"] == SCRIPT.splitlines().index("    slurm_partition=args.partition,") + 1
    assert "hpc-trainer recognises its jobs by the comment" in rows["slurm_comment"]["note"]
    assert rows["begin"]["note"] == "no equivalent: a pending job blocks no other; submit later instead."
    assert rows["gres-flags"]["ours"] == "cluster.sbatch.gres-flags=enforce-binding"
    assert "sbatch has no such option" in rows["nonsense"]["note"]
    assert "cluster.max_no_progress" in rows["slurm_max_num_timeout"]["note"]
    assert "computed there" in rows["**unknown()"]["note"]
    assert "run.restore" in rows["Trainer.checkpoint"]["ours"]
    assert "axes of a grid" in rows["executor.map_array(..)"]["ours"]


def test_one_task_that_starts_its_own_ranks_becomes_a_rank_for_each_gpu(tmp_path: Path, document: Document) -> None:
    (tmp_path / "go.py").write_text(
        "ex = AutoExecutor('logs')\nex.update_parameters(gpus_per_node=8, tasks_per_node=1, cpus_per_task=80)\n"
    )
    told = document("init", "--from-submitit", "go.py")["translation"]
    assert yaml.safe_load(told["files"]["conf/hardware/go.yaml"]) == {
        "name": "go", "gpus_per_node": 8, "cpus_per_gpu": 10
    }  # fmt: skip
    assert any("torchrun, spawn" in row["note"] for row in told["rows"])


def test_a_launcher_in_a_hydra_configuration_is_found(tmp_path: Path, document: Document) -> None:
    (tmp_path / "slurm.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: submitit_slurm\nngpu: 2\nhydra:\n  launcher:\n"
        "    partition: gpu\n    gres: gpu:1\n    timeout_min: 240\n    account: ${oc.env:PROJECT}\n"
        "    cpus_per_task: ${num_workers}\n    nodes: ${ngpu}\n    setup: ['source ${oc.env:HOME}/env/bin/activate']\n"
        "    additional_parameters: {clusters: ukko, output: /dev/null}\n"
    )
    told = document("init", "--from-hydra-submitit", "slurm.yaml")["translation"]
    assert yaml.safe_load(told["files"]["conf/hardware/slurm.yaml"]) == {
        "name": "slurm", "gpus_per_node": 1, "gpu_request": "gres", "partition": "gpu", "time_limit_min": 240,
        "num_nodes": 2,
    }  # fmt: skip
    cluster = yaml.safe_load(told["files"]["conf/cluster/slurm.yaml"])
    assert cluster["setup"] == ["source ${oc.env:HOME}/env/bin/activate"]
    notes = {row["theirs"].split("=")[0]: row["note"] for row in told["rows"]}
    assert "set hardware.cpus_per_gpu yourself" in notes["cpus_per_task"], "the run has GPUs"
    assert notes["clusters"] == "no equivalent: Use one cluster= for each grid."
    assert notes["output"] == "no equivalent: Use hpc-trainer logs."


def test_a_launcher_that_refers_to_its_own_keys_and_names_two_kinds_of_memory(
    tmp_path: Path, document: Document
) -> None:
    """`${.gpus_per_node}` counts from the launcher; Slurm takes one option of memory, and a profile one key."""
    (tmp_path / "slurm.yaml").write_text(
        "# @package hydra.launcher\ngpus_per_node: 4\ntasks_per_node: ${.gpus_per_node}\ncpus_per_task: 12\n"
        "mem_gb: 96\nmem_per_cpu: 4G\nname: ${hydra.job.name}\n"
    )
    told = document("init", "--from-hydra-submitit", "slurm.yaml")["translation"]
    assert yaml.safe_load(told["files"]["conf/hardware/slurm.yaml"]) == {
        "name": "slurm", "gpus_per_node": 4, "cpus_per_gpu": 12, "mem_gb_per_node": 96,
    }  # fmt: skip
    notes = {row["theirs"].split("=")[0]: row["note"] for row in told["rows"]}
    assert notes["mem_per_cpu"] == "no equivalent: a job has one memory option, and hardware.mem_gb_per_node is set"


def test_cores_of_a_task_are_not_divided_by_a_number_of_tasks_that_is_computed(
    tmp_path: Path, document: Document
) -> None:
    (tmp_path / "go.py").write_text(
        "words = {'gpus_per_node': 4, 'cpus_per_task': 12}\nif large:\n    words.update(slurm_qos='high', **more())\n"
        "words.update(tasks_per_node=count())\nex = AutoExecutor('logs')\nex.update_parameters(**words, "
        "slurm_additional_parameters={'exclusive': ''})\n"
    )
    told = document("init", "--from-submitit", "go.py")["translation"]
    assert yaml.safe_load(told["files"]["conf/hardware/go.yaml"]) == {
        "name": "go", "gpus_per_node": 4, "qos": "high",
    }  # fmt: skip
    assert yaml.safe_load(told["files"]["conf/cluster/go.yaml"])["sbatch"] == {"exclusive": True}
    rows = {row["theirs"].split("=")[0]: row for row in told["rows"]}
    assert rows["tasks_per_node"]["ours"] == "one rank for each GPU"
    assert "set hardware.cpus_per_gpu yourself" in rows["cpus_per_task"]["note"]
    assert rows["slurm_qos"]["note"] == "there only if large"
    assert rows["**more()"]["note"] == "computed there: set it yourself; there only if large"


SUBMITTER = """
import argparse
import submitit

parser = argparse.ArgumentParser()
parser.add_argument("--use_volta32", action="store_true")
parser.add_argument("--comment", default="")
parser.add_argument("--exclude")
args = parser.parse_args()
kwargs = {}
if args.use_volta32:
    kwargs["slurm_constraint"] = "volta32gb"
else:
    kwargs["slurm_qos"] = "low"
if args.comment:
    kwargs["slurm_comment"] = args.comment
ex = submitit.AutoExecutor("logs")
ex.update_parameters(name="mae", timeout_min=30, gpus_per_node=4, slurm_mem=100000, slurm_signal_delay_s=0, **kwargs)
if args.exclude:
    ex.update_parameters(slurm_exclude="n1")
other = submitit.AutoExecutor("logs")
other.update_parameters(timeout_min=60, slurm_additional_parameters={"mail_user": "", "ntasks-per-gpu": 2})
job = other.submit(train)
job.wait()
submitit.helpers.monitor_jobs([job])
"""


def test_what_a_published_submitter_sets_by_default_is_translated_and_the_rest_told(
    tmp_path: Path, document: Document
) -> None:
    """The form of submitters of DINO, MAE and ConvNeXt: options under switches that are off by default."""
    (tmp_path / "go.py").write_text(SUBMITTER)
    told = document("init", "--from-submitit", "go.py")["translation"]
    assert yaml.safe_load(told["files"]["conf/hardware/go.yaml"]) == {
        "name": "go", "gpus_per_node": 4, "time_limit_min": 60, "mem_gb_per_node": 97.65625, "qos": "low",
    }  # fmt: skip
    assert yaml.safe_load(told["files"]["conf/cluster/go.yaml"]) == {"name": "go", "executor": "slurm"}
    rows = {row["theirs"].rpartition("(")[0] or row["theirs"]: row for row in told["rows"]}
    assert rows["slurm_constraint=volta32gb"]["note"] == (
        "not set here, as by default; set it yourself: hardware.constraint; there only if args.use_volta32"
    )
    assert rows["slurm_qos=low"]["note"] == "there only if not args.use_volta32"
    assert not any("slurm_comment" in name for name in rows), "an empty comment under a switch that is off"
    assert rows["slurm_exclude=n1"]["note"].startswith("not set here")
    assert rows["name=mae"]["ours"] == "sweep_name=mae"
    assert "a later line sets another value" in rows["timeout_min=30"]["note"]
    assert "needs time to save" in rows["slurm_signal_delay_s=0"]["note"]
    assert rows["mail_user="]["note"] == "left out: it has no value"
    assert "pool.per_gpu" in rows["ntasks-per-gpu=2"]["note"]
    assert "remove what your script starts itself" in rows["gpus_per_node=4"]["note"], "one task there"
    assert rows["job.wait"]["ours"] == "hpc-trainer submit --wait"
    assert "hpc-trainer top" in rows["submitit.helpers.monitor_jobs"]["ours"]


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (
            "--from-submitit",
            "import submitit\nex = submitit.LocalExecutor('logs')\nex.update_parameters(timeout_min=5)\n",
        ),
        ("--from-submitit", "ex = AutoExecutor('logs', cluster='debug')\nex.update_parameters(timeout_min=5)\n"),
        ("--from-hydra-submitit", "defaults: [submitit_local]\ntimeout_min: 5\n"),
        ("--from-hydra-submitit", "_target_: a.submitit_launcher.LocalLauncher\ntimeout_min: 5\n"),
    ],
)
def test_an_executor_of_this_machine_becomes_the_local_one(
    flag: str, text: str, tmp_path: Path, document: Document
) -> None:
    (tmp_path / "here").write_text(text)
    told = document("init", flag, "here")["translation"]
    assert yaml.safe_load(told["files"]["conf/cluster/here.yaml"]) == {"name": "here", "executor": "local"}


def test_what_a_launcher_leaves_open_is_told(tmp_path: Path, document: Document) -> None:
    (tmp_path / "given.yaml").write_text(
        "defaults: [submitit_slurm, base]\ngres: shard:5\nmem_gb: 0\ngpus_per_node: 0\n"
        "additional_parameters: {mail-user: '${oc.env:USER}@x.org'}\n"
    )
    told = document("init", "--from-hydra-submitit", "given.yaml")["translation"]
    notes = {row["theirs"]: row["note"] for row in told["rows"]}
    assert notes["timeout_min"].startswith("not set there: submitit's short default counts")
    assert "pool.per_gpu" in notes["gres=shard:5"]
    assert "hardware.whole_node=true" in notes["mem_gb=0"]
    assert notes["mail-user=${oc.env:USER}@x.org"] == "computed there: set cluster.sbatch.mail-user yourself"
    assert "gpus_per_node=0" in notes
    assert any(name.startswith("defaults: base") for name in notes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (("--from-submitit",), "import torch\n", "makes no AutoExecutor"),
        (("--from-submitit",), "def (:\n", "is not Python (line 1)"),
        (("--from-hydra-submitit",), "a: 1\n", "none of the launcher's keys"),
        (("--from-hydra-submitit",), "a: [\n", "cannot be read as YAML"),
        (("--from",), "x = (\n", "is not Python"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    words: tuple[str, ...], text: str, message: str, tmp_path: Path, play: Play
) -> None:
    (tmp_path / "given").write_text(text)
    code, said = play("init", *words, "given")
    assert code == 2
    assert message in said
    code, said = play("init", *words, "missing")
    assert code == 2
    assert "missing cannot be read" in said


TRAIN = """
import argparse, os
import torch
import torch.distributed as dist
raise SystemExit("the script was run")
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--local_rank", type=int)
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("nccl")
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
net = build().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
sched = torch.optim.lr_scheduler.StepLR(opt, 10)
loader = torch.utils.data.DataLoader(data, shuffle=True)
if args.resume:
    saved = torch.load(args.resume)
    net.load_state_dict(saved["net"])
for epoch in range(args.epochs):
    for x, y in loader:
        loss = net(x).sum()
        loss.backward()
        opt.step()
    wandb.log({"loss": loss})
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "last.pt")
if __name__ == "__main__":
    main()
"""


def test_a_script_is_led_to_a_loop_of_ours_in_five_steps(tmp_path: Path, document: Document) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    told = document("init", "--from", "train.py")
    assert told["as_it_is"] == (
        "hpc-trainer submit --command 'python train.py --lr {params.lr}' params.lr=0.1 train.command_env=torchrun"
    )
    lines = TRAIN.splitlines()

    def changes(number: int) -> dict[str, str]:
        return {lines[place["line"] - 1].strip(): place["change"] for place in told["steps"][number - 1]["places"]}

    assert len(told["steps"]) == 5
    arguments = [*changes(1).values()]
    assert arguments[0] == 'config.params["lr"]'
    assert arguments[1] == "config.train.num_steps, which counts steps: epochs * batches in an epoch"
    assert arguments[2] == "remove: hardware= decides"
    assert {'dist.init_process_group("nccl")', 'rank = int(os.environ["RANK"])', "net = build().cuda()"} <= {
        *changes(2)
    }
    assert {"saved = torch.load(args.resume)", 'net.load_state_dict(saved["net"])'} == {*changes(3)}
    assert "run.restore(net=net, opt=opt, sched=sched)" in told["steps"][2]["advice"]
    assert "for x, y in loader:" in changes(4)
    assert "loader = torch.utils.data.DataLoader(data, shuffle=True)" in changes(4)
    assert any("torch.save" in line for line in changes(4))
    assert {'wandb.log({"loss": loss})', 'if __name__ == "__main__":'} == {*changes(5)}


PUBLISHED = """
import os, torch
import argparse
from torch.utils.tensorboard import SummaryWriter
p = argparse.ArgumentParser()
p.add_argument("data", metavar="DIR")
p.add_argument("-j", "--workers", default=4, type=int)
p.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
p.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
p.add_argument("--run-name", required=True)
args = p.parse_args()
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.getenv("WORLD_SIZE", "1"))
device = torch.device("cuda", local_rank)
torch.cuda.manual_seed_all(0)
writer = SummaryWriter("out")
for x, y in loader:
    loss = net(x.to("cuda")).sum() + args.weight_decay
    scaler.scale(loss).backward()
"""


def test_a_published_script_is_read_with_what_its_command_needs(tmp_path: Path, document: Document) -> None:
    """A positional and a required argument, `dest`, variables read by os.getenv, devices by their names."""
    (tmp_path / "train.py").write_text(PUBLISHED)
    told = document("init", "--from", "train.py")
    assert told["as_it_is"] == (
        "hpc-trainer submit --command 'python train.py DATA --run-name RUN_NAME --lr {params.lr}' params.lr=0.1 "
        "train.command_env=torchrun"
    )
    assert told["note"] is None
    arguments, ranks, start, _, end = (
        {place["text"]: place["change"] for place in step["places"]} for step in told["steps"]
    )
    assert arguments["data"] == 'config.params["data"]'
    assert arguments["--wd"] == 'config.params["weight_decay"]'
    assert ranks["os.getenv('WORLD_SIZE', '1')"] == "run.world_size"
    assert (ranks["x.to('cuda')"], ranks["torch.device('cuda', local_rank)"]) == (".to(run.device)", "run.device")
    assert "torch.cuda.manual_seed_all(0)" in start
    assert end["SummaryWriter('out')"] == "remove: tracker=tensorboard"


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("import lightning as L\nL.Trainer(max_epochs=3).fit(model)\n", "Lightning"),
        ("from transformers import Trainer\nTrainer(model).train()\n", "Hugging Face's Trainer"),
        ("from accelerate import Accelerator\naccelerator = Accelerator()\n", "Accelerate"),
        ("import keras\nmodel.fit(x, y)\n", "Keras"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(Net)\n", "Lightning"),
        ("from lightning.fabric import Fabric\nfabric = Fabric()\n", "Lightning Fabric"),
        (
            "from trl import SFTTrainer\nclass Own(SFTTrainer):\n    pass\nOwn(model).train()\n",
            "Hugging Face's Trainer",
        ),
        ("from transformers import AutoModel\nmodel = AutoModel.from_pretrained('a')\n", None),
        ("import torch\nfrom sklearn.metrics import f1_score\nloss.backward()\n", None),
    ],
)
def test_a_script_that_trains_with_a_library_stays_a_program(
    text: str, library: str | None, tmp_path: Path, document: Document
) -> None:
    (tmp_path / "train.py").write_text(text)
    note = document("init", "--from", "train.py")["note"]
    assert ("It trains with" in note) == (library is not None)
    assert library is None or note.startswith(f"It trains with {library}, which has ranks and checkpoints of its own")


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("import jax\nimport flax.linen as nn\nmain()\n", "JAX"),
        ("from sklearn.svm import SVC\nSVC().fit(x, y)\n", "scikit-learn"),
        ("import xgboost as xgb\nxgb.train({}, data)\n", "XGBoost"),
    ],
)
def test_a_script_without_pytorch_stays_a_program(text: str, library: str, tmp_path: Path, document: Document) -> None:
    (tmp_path / "train.py").write_text(text)
    assert document("init", "--from", "train.py")["note"].startswith(f"It trains with {library}, without PyTorch: keep")


def test_a_hydra_app_needs_no_change(tmp_path: Path, document: Document) -> None:
    (tmp_path / "app.py").write_text("import hydra\n@hydra.main(version_base=None)\ndef main(config):\n    pass\n")
    assert document("init", "--from", "app.py")["as_it_is"] == "hpc-trainer submit hardware=cpu_x1 --app app.py"
