"""No files of a layer import each other in a circle: also not inside functions, or for a type checker alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hpc_trainer"
LAYERS = sorted(each.name for each in PACKAGE.iterdir() if (each / "__init__.py").is_file())


def circles(imports: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of files of which each leads to each other one."""
    reached = {name: set(direct) & set(imports) for name, direct in imports.items()}
    for middle in imports:
        for begin in imports:
            if middle in reached[begin]:
                reached[begin] |= reached[middle]
    return {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in imports
        if name in reached[name]
    }


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hpc_trainer", cache_dir=None)


@pytest.mark.parametrize("layer", LAYERS)
def test_no_circle_inside_a_layer(graph: grimp.ImportGraph, layer: str) -> None:
    files = {f"hpc_trainer.{layer}", *graph.find_descendants(f"hpc_trainer.{layer}")}
    imports = {each: graph.find_modules_directly_imported_by(each) & files for each in files}
    assert circles(imports) == set()


def test_every_file_is_looked_at(graph: grimp.ImportGraph) -> None:
    # Hydra's plugins lie in a namespace package of their own.
    paths = [path for path in PACKAGE.rglob("*.py") if "hydra_plugins" not in path.parts]
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths}
    assert {each.removesuffix(".__init__") for each in files} == graph.modules
    alone = {"hpc_trainer", "hpc_trainer.__main__", "hpc_trainer.api", "hpc_trainer.domains", "hpc_trainer.errors"}
    assert {each.split(".")[1] for each in graph.modules - alone} == set(LAYERS)


def test_a_circle_is_found() -> None:
    straight = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert circles(straight) == set()
    assert circles({**straight, "c": {"d"}, "d": {"b"}, "e": {"a"}}) == {frozenset("bcd")}
