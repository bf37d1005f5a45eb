"""Windows of token folders: all tokens once, sources in exact proportions; what cannot be is refused at plan time."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_trainer.config.rules.data_rules import data_problems, with_absolute_paths
from hpc_trainer.config.rules.validate import find_problems
from hpc_trainer.config.schema.model import GptConfig
from hpc_trainer.config.schema.task import TaskConfig
from hpc_trainer.data.tokens import TokensConfig, epoch_shares
from hpc_trainer.data.tokens import dataset as tokens
from hpc_trainer.data.tokens.files import write_tokens
from hpc_trainer.datasets import MapDataset
from hpc_trainer.errors import DataError, HpcTrainerError
from hpc_trainer.training.data.protocol import SPLITS
from tests.seeds import chosen_seed
from tests.unit.record.builders import make_config


def prepare(folder: Path, first: int = 0, count: int = 100, *, with_eval: bool = True, **values: Any) -> str:
    """Tokens first, first + 1, .. in documents of 10; those of eval go on after them."""
    parts = {"train": (first, count), "eval": (first + count, 20)} if with_eval else {"": (first, count)}
    for name, (start, number) in parts.items():
        numbers = np.arange(start, start + number)
        documents = [numbers[at : at + 10] for at in range(0, number, 10)]
        write_tokens(folder / name, documents, **{"vocab_size": 1000, **values})
    return str(folder)


def build(split: Any = "train", **values: Any) -> tokens.Tokens:
    return tokens.build(TokensConfig(**values), split)


def test_windows_are_the_tokens_in_a_row(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a")
    for split, first, length in (("train", 0, 12), ("eval", 100, 2)):
        data = build(split, path=path, seq_len=8)
        assert isinstance(data, MapDataset)
        assert (data.input_shape, data.num_classes, len(data)) == ((8,), 1000, length)
        inputs, targets = data.__getitems__(range(length))
        assert inputs.flatten().tolist() == list(range(first, first + 8 * length))
        assert targets.equal(inputs + 1)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()


def test_without_a_part_of_its_own_the_end_is_for_evaluation(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a", with_eval=False)
    found = {}
    for split in ("train", "eval"):
        data = build(split, path=path, seq_len=4, eval_fraction=0.3)
        inputs, targets = data.__getitems__(range(len(data)))
        found[split] = {*inputs.flatten().tolist(), *targets.flatten().tolist()}
    assert found == {"train": set(range(69)), "eval": set(range(70, 99))}


def test_ends_of_documents_are_kept_and_starts_may_be_masked(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a", end_of_document=999)
    inputs, targets = build(path=path, seq_len=22).__getitems__([0])
    assert inputs[0].tolist() == [*range(10), 999, *range(10, 20), 999]
    masked = build(path=path, seq_len=22, mask_document_starts=True)
    assert not masked.all_targets_count
    same, others = masked.__getitems__([0])
    assert same.equal(inputs)
    assert [at for at, each in enumerate(others[0].tolist()) if each == -100] == [10, 21]
    assert others[others != -100].equal(targets[others != -100])


def test_sources_are_mixed_in_exact_proportions(tmp_path: Path) -> None:
    sources = {prepare(tmp_path / "b", 500, 81): 3.0, prepare(tmp_path / "a", 0, 41): 1.0}
    data = build(sources=sources, seq_len=4)
    # a has 10 windows and b 20: a comes whole, and b three times as often.
    assert len(data) == 40
    firsts = data.__getitems__(range(40))[0][:, 0].tolist()
    counts = Counter(firsts)
    assert [counts[first] for first in range(0, 40, 4)] == [1] * 10
    assert [counts[first] for first in range(500, 580, 4)] == [2] * 10 + [1] * 10
    assert build(sources=dict(reversed(sources.items())), seq_len=4).__getitems__([0, 17, 39])[0][:, 0].tolist() == [
        firsts[0], firsts[17], firsts[39],
    ]  # fmt: skip
    assert len(build("eval", sources=sources, seq_len=4)) == 4 + 4  # each window once, whatever the weights


def test_shares_of_an_epoch_are_exact_and_leave_nothing_out() -> None:
    draws = np.random.default_rng(chosen_seed())
    for _ in range(300):
        count = int(draws.integers(1, 6))
        sizes = draws.integers(1, 10_000, size=count).tolist()
        weights = draws.choice([0.1, 0.3, 1, 2, 7.5], size=count).tolist()
        shares = epoch_shares(sizes, weights)
        length = sum(shares)
        for size, weight, share in zip(sizes, weights, shares, strict=True):
            assert share >= size
            assert abs(share - length * weight / sum(weights)) < 1 + 1e-6
        assert any(share <= size + 1 for size, share in zip(sizes, shares, strict=True))


def test_a_pickled_copy_holds_no_tokens_and_reads_the_same(tmp_path: Path) -> None:
    data = build(path=prepare(tmp_path / "a", count=900), seq_len=8)
    expected = data.__getitems__([0, 3])[0]
    state = pickle.dumps(data)
    assert len(state) < 2500
    assert pickle.loads(state).__getitems__([0, 3])[0].equal(expected)


def test_the_fingerprint_is_that_of_content_not_of_place(tmp_path: Path) -> None:
    here, there = prepare(tmp_path / "a"), prepare(tmp_path / "b")
    prints = [build(path=path, seq_len=8).fingerprint() for path in (here, there)]
    assert prints[0] == prints[1]
    assert build(path=prepare(tmp_path / "c", first=1), seq_len=8).fingerprint() != prints[0]
    assert build("eval", path=here, seq_len=8).fingerprint() != prints[0]
    other = build(sources={here: 1.0, str(tmp_path / "c"): 2.0}, seq_len=8).fingerprint()
    assert build(sources={there: 1.0, str(tmp_path / "c"): 2.0}, seq_len=8).fingerprint() == other
    assert build(sources={here: 1.0, str(tmp_path / "c"): 3.0}, seq_len=8).fingerprint() != other


def test_a_damaged_token_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = prepare(tmp_path / "a", vocab_size=300)
    stored = np.memmap(tmp_path / "a/train/tokens.bin", dtype="<u2", mode="r+")
    stored[50] = 301
    stored.flush()
    data = build(path=path, seq_len=8)
    data.__getitems__([0, 1])
    with pytest.raises(DataError, match=r"a/train has the token 301, and a vocabulary of 300: it is damaged"):
        data.__getitems__([0, 6])


def _refused(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    good = prepare(tmp_path / "good")
    wide = prepare(tmp_path / "wide", vocab_size=2000)
    other = prepare(tmp_path / "other", tokenizer="bpe.json", tokenizer_sha256="a" * 64)
    alone = prepare(tmp_path / "alone", with_eval=False)
    write_tokens(tmp_path / "empty", [], vocab_size=1000)
    (tmp_path / "bare").mkdir()
    return {
        "nothing": ({}, "data=tokens needs data.path, a folder that"),
        "both": ({"path": good, "sources": {wide: 1.0}}, "data.path and data.sources both say"),
        "twice": ({"sources": {good: 1.0, f"{good}/../good": 1.0}}, "names a folder twice"),
        "missing": ({"path": f"{tmp_path}/no"}, "no must be a folder of tokens, and has no meta.json"),
        "bare": ({"path": f"{tmp_path}/bare"}, "it may be unfinished"),
        "empty": ({"path": f"{tmp_path}/empty"}, "it has 0 tokens for split=train, and a window needs"),
        "long": ({"path": good, "seq_len": 20}, "good/eval: it has 20 tokens for split=eval, and a window needs"),
        "longer": ({"path": good, "seq_len": 20}, "Use data.seq_len=19 or less."),
        "wide": ({"sources": {good: 1.0, wide: 1.0}}, "wide/train have different values of vocabulary: 1000 and 2000"),
        "other": ({"sources": {good: 1.0, other: 1.0}}, "different values of tokenizer (SHA-256): None and aaa"),
        "starts": ({"path": good, "mask_document_starts": True}, "has none. Prepare it with one"),
        "fraction": ({"path": good, "eval_fraction": 0.2}, "data.eval_fraction=0.2 has no effect"),
        "weight": ({"sources": {good: 0.0, alone: 1.0}}, f"data.sources[{good}]=0 must be greater than 0"),
    }


def _build_both(data: TokensConfig) -> None:
    for split in SPLITS:
        tokens.build(data, split)


def test_what_cannot_be_is_refused_at_plan_time_and_in_the_run(tmp_path: Path) -> None:
    for name, (values, said) in _refused(tmp_path).items():
        data = TokensConfig(**{"seq_len": 8, **values})
        config = make_config(data=data, model=GptConfig(num_layers=1), train__global_batch_size=1)
        problems = list(find_problems(config))
        assert len(problems) == 1, (name, problems)
        assert said in problems[0], name
        if name != "weight":
            with pytest.raises(HpcTrainerError) as caught:
                _build_both(data)
            assert str(caught.value) == problems[0], name


def test_an_epoch_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    sources = {prepare(tmp_path / "a"): 1.0, prepare(tmp_path / "b"): 1e9}
    (problem,) = data_problems(TokensConfig(sources=sources, seq_len=8), TaskConfig())
    assert "Give the largest source a larger weight, or leave the smallest out." in problem


def test_plan_knows_samples_and_vocabulary(tmp_path: Path) -> None:
    data = TokensConfig(path=prepare(tmp_path / "a"), seq_len=8)
    config = make_config(data=data, model=GptConfig(num_layers=1), train__global_batch_size=13)
    (problem,) = find_problems(config)
    assert "must be at most the 12 training samples of data=tokens" in problem
    config = make_config("hardware=gpu_x2", "parallel=tp", data=data, model=GptConfig(num_layers=1))
    config.train.global_batch_size = 4
    config.data = dataclasses.replace(data, path=prepare(tmp_path / "odd", vocab_size=1001))
    (problem,) = find_problems(config)
    assert "vocabulary of data=tokens=1001" in problem


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(TokensConfig(path="a")).path == str(tmp_path / "a")
    assert with_absolute_paths(TokensConfig(sources={"a": 1.0, "../b": 2.0})).sources == {
        str(tmp_path / "a"): 1.0, str(tmp_path.parent / "b"): 2.0,
    }  # fmt: skip
    (problem,) = data_problems(TokensConfig(sources={"~nobody-of-this-name/a": 1.0}), TaskConfig())
    assert "begins with the home of a user whom this machine does not know" in problem


def test_the_meta_file_is_plain_json(tmp_path: Path) -> None:
    prepare(tmp_path / "a")
    found = json.loads((tmp_path / "a/train/meta.json").read_text())
    assert found["format"] == 1
    assert (found["dtype"], found["num_tokens"], found["num_documents"]) == ("uint16", 100, 10)
