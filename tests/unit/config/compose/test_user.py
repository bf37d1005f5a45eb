"""The person's own file: plain values, refused with its name where it is no mapping, and never executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_trainer.config.compose.composer import Composer
from hpc_trainer.config.compose.overrides import default_overrides
from hpc_trainer.config.compose.own_files import read_user_config, user_config_path
from hpc_trainer.errors import ConfigError


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    path = tmp_path / "own" / "hpc_trainer" / "config.yaml"
    path.parent.mkdir(parents=True)
    return path


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_config_path() == tmp_path / ".config" / "hpc_trainer" / "config.yaml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x")
    assert user_config_path() == Path("/x/hpc_trainer/config.yaml")


def test_no_file_is_no_defaults(own_file: Path) -> None:
    assert read_user_config() == {}


@pytest.mark.parametrize("text", ["", "# cluster.account: my_account\n", "{}\n"])
def test_a_file_that_says_nothing_is_no_defaults(own_file: Path, text: str) -> None:
    own_file.write_text(text)
    assert read_user_config() == {}


def test_dotted_and_nested_keys_are_the_same(own_file: Path) -> None:
    own_file.write_text("cluster.account: lab\nhardware:\n  partition: gpu\n  exclude: null\n")
    assert read_user_config() == {"cluster.account": "lab", "hardware.partition": "gpu", "hardware.exclude": None}


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "just words", "a: [1", "a: b: c", "\ta: 1", "a: 1\n a: 2", "3", "a: &x\n  b: *y\n"],
)
def test_a_malformed_file_is_named(own_file: Path, text: str) -> None:
    own_file.write_text(text)
    with pytest.raises(ConfigError, match=str(own_file)):
        read_user_config()


def test_bytes_that_are_no_text_are_refused(own_file: Path) -> None:
    own_file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=str(own_file)):
        read_user_config()


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {ran}']",
        "!!python/object/new:os.system ['touch {ran}']",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
def test_python_tags_do_not_execute(own_file: Path, tmp_path: Path, tag: str) -> None:
    own_file.write_text(f"cluster.account: {tag.replace('{ran}', str(tmp_path / 'ran'))}\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read_user_config()
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_slurm")
def test_the_file_stands_before_the_command_line(own_file: Path) -> None:
    own_file.write_text(
        "cluster: slurm\ncluster.account: my_lab\noptim.lr: 1e-3\nhardware.partition: 'a,b'\nhardware: cpu_x2\n"
        "cluster.setup: ['module load \"x\"', 'echo $HOME']\npaths.group_readable: true\n"
    )
    lines = list(default_overrides(["seed=1"]))
    assert not any(line.startswith("cluster=local") for line in lines), "the file names the cluster"
    with Composer() as composer:
        config = composer.compose([*lines, "seed=1"])
    assert (config.cluster.name, config.cluster.account, config.optim.lr) == ("slurm", "my_lab", 1e-3)
    assert (config.hardware.name, config.hardware.partition) == ("cpu_x2", "a,b")
    assert config.cluster.setup == ['module load "x"', "echo $HOME"]
    assert config.paths.group_readable is True


@pytest.mark.usefixtures("no_slurm")
def test_the_command_line_wins(own_file: Path) -> None:
    own_file.write_text("cluster.account: my_lab\nseed: 3\nhardware: cpu_x2\n")
    given = ["seed=4", "++cluster.account=other", "hardware=cpu_x1"]
    assert list(default_overrides(given)) == []


@pytest.mark.usefixtures("no_slurm")
def test_a_wrong_key_in_the_file_is_answered_like_one_on_the_command_line(own_file: Path) -> None:
    own_file.write_text("cluster.my_account: my_lab\n")
    with Composer() as composer, pytest.raises(ConfigError, match=r"cluster\.my_account: .*Did you mean account\?"):
        composer.compose(list(default_overrides([])))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "text",
    ["cluster:\n  env: {NCCL_DEBUG: INFO}\n  sbatch: {mail-type: END}\n",
     "cluster.env.NCCL_DEBUG: INFO\ncluster.sbatch.mail-type: END\n"],
)  # fmt: skip
def test_names_of_ones_own_in_a_mapping_are_defaults_too(own_file: Path, text: str) -> None:
    own_file.write_text(text)
    with Composer() as composer:
        config = composer.compose(list(default_overrides([])))
        assert (config.cluster.env, config.cluster.sbatch) == ({"NCCL_DEBUG": "INFO"}, {"mail-type": "END"})
        line = "+cluster.env.NCCL_DEBUG=WARN"
        assert composer.compose([*default_overrides([line]), line]).cluster.env == {"NCCL_DEBUG": "WARN"}
