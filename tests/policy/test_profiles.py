"""Shipped profiles of sites: each has a line that says what it is, a source for its figures, and a date."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_trainer.hardware.profiles import read_cluster, read_profile, read_profiles, site_of, split_sources

CONF = Path(__file__).parents[2] / "conf"
GENERIC = {path.stem for path in (CONF / "hardware").glob("*.yaml")}
PROFILES = {profile.name: profile for profile in read_profiles() if profile.name not in GENERIC}
CLUSTERS = {
    name: read_cluster(name)
    for path in (CONF / "cluster").glob("*/*.yaml")
    for name in [path.relative_to(CONF / "cluster").with_suffix("").as_posix()]
}
# A URL, the version of the document that was read if it tells one, and which figures it has.
_SOURCE = re.compile(
    r"https?://[\w.-]+\.\w+(/[^\s(),;]*)?(, version of \d{4}-\d{2}-\d{2})? \([^()]+(\([^()]*\)[^()]*)*\)"
)

# Figures that no public document of the site confirms.
_UNVERIFIED = re.compile(r"unverified \([^()]+\)")


def problems_with_source(source: str, checked: str, today: datetime.date) -> list[str]:
    """What is wrong with the source and the date of a file."""
    parts = split_sources(source)
    public = [part for part in parts if not _UNVERIFIED.fullmatch(part)]
    wrong = [f"no URL with its figures in parentheses: {part}" for part in public if not _SOURCE.fullmatch(part)]
    if not public:
        wrong.append("no source")
    try:
        if datetime.date.fromisoformat(checked) > today:
            wrong.append(f"checked {checked}, which is to come")
    except ValueError:
        wrong.append(f"checked {checked!r} is no date")
    return wrong


@pytest.mark.parametrize(
    ("source", "checked", "problem"),
    [
        ("", "2026-01-01", "no source"),
        ("the site's user guide", "2026-01-01", "no URL"),
        ("unverified (cores)", "2026-01-01", "no source"),
        ("https://docs.site.org/gpu", "2026-01-01", "no URL with its figures"),
        ("https://docs.site.org/gpu (cores); from memory", "2026-01-01", "no URL"),
        ("https://docs.site.org/gpu (cores)", "", "no date"),
        ("https://docs.site.org/gpu (cores)", "2026-02-31", "no date"),
        ("https://docs.site.org/gpu (cores)", "2026-03-02", "to come"),
    ],
)
def test_a_source_that_is_none_is_found(source: str, checked: str, problem: str) -> None:
    (found,) = problems_with_source(source, checked, datetime.date(2026, 3, 1))
    assert problem in found


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_tells_its_sources(name: str) -> None:
    profile = PROFILES[name]
    assert problems_with_source(profile["source"], profile["checked"], datetime.date.today()) == []
    assert profile.about.endswith("."), "the first line is a comment that says what it is"
    assert profile["name"] == name
    if not name.startswith("node/"):
        assert profile.cluster in CLUSTERS
        assert profile.cluster.partition("/")[0] == name.partition("/")[0]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_tells_its_sources_and_reasons_and_names_no_account(name: str) -> None:
    cluster = CLUSTERS[name]
    values, site = cluster.values, site_of(cluster)
    assert problems_with_source(site["source"], site["checked"], datetime.date.today()) == []
    assert cluster.about.endswith(".")
    given = {*(values.get("env") or {}), *(values.get("sbatch") or {})}
    given |= {argument.partition("=")[0] for argument in values.get("srun_args") or []}
    assert given == set(site["reasons"]), "each variable and option has a reason, and no other has"
    assert "account" not in values
    known = {*values, *(values.get("site") or {})}
    assert set(site["unverified"]) <= known - {"source", "checked"}
    assert any(profile.cluster == name for profile in PROFILES.values()), "no profile chooses it"


def test_time_limits_of_a_site_fit_its_profiles() -> None:
    """A profile that the site's own facts refuse would warn with every plan."""
    wrong = []
    for profile in PROFILES.values():
        limits: list[dict[str, Any]] = (
            [] if profile.cluster is None else site_of(CLUSTERS[profile.cluster])["time_limits"]
        )
        own = [
            limit
            for limit in limits
            if limit.get("partition") in (None, profile["partition"]) and limit.get("qos") in (None, profile["qos"])
        ]
        if any(profile["time_limit_min"] > limit["max_time_min"] for limit in own if limit.get("min_nodes", 1) == 1):
            wrong.append(profile.name)
    assert wrong == []


def test_a_thin_profile_has_its_figures_from_another() -> None:
    """That is, a file without a source of its own names the file that has it."""
    bare = [name for name in PROFILES if "source:" not in read_profile(name).path.read_text()]
    assert [name for name in bare if not PROFILES[name]["source"]] == []
