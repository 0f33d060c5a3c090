"""The rank of this process, as a caller or a launcher's environment says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.config import StreamConfig
from asyncfetch.errors import ConfigError
from asyncfetch.stream.ranks import ENVIRONMENTS, find_nodes, find_rank, found_placement
from asyncfetch.streams import Stream
from asyncfetch.testing import write_dataset

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"RANK": "2"}, (0, 1)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}, (1, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a job's script, which runs once
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 2)),
    ],
)
def test_rank_and_world_size_are_found(environ: dict[str, str], found: tuple[int, int]) -> None:
    assert find_rank(environ) == found


@pytest.mark.parametrize(("rank_name", "size_name"), ENVIRONMENTS)
@pytest.mark.parametrize(("rank", "world_size"), [("x", "2"), ("2", "x"), ("2", "2"), ("-1", "2"), ("0", "0")])
def test_an_environment_without_a_rank_of_its_world_is_refused(
    rank_name: str, size_name: str, rank: str, world_size: str
) -> None:
    with pytest.raises(ConfigError, match=f"{rank_name}=.*{rank}.*{size_name}=.*{world_size}"):
        find_rank({rank_name: rank, size_name: world_size})


def test_a_given_rank_is_taken_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = found_placement()
    assert (found.rank, found.world_size) == (2, 4)
    given = found_placement(1, 3)
    assert (given.rank, given.world_size) == (1, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, None, "both rank and world_size"),
        (None, 2, "both rank and world_size"),
        (0.0, 2, "whole numbers, not 0.0 of 2"),
        (0, "2", "whole numbers, not 0 of '2'"),
        (True, 2, "whole numbers, not True of 2"),
        (2, 2, "not 2 of 2"),
        (-1, 2, "not -1 of 2"),
    ],
)
def test_a_rank_that_can_not_be_meant_is_refused(rank: Any, world_size: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        found_placement(rank, world_size)


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "6"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "1"}, 6),
        ({"LOCAL_WORLD_SIZE": "4"}, 0),  # others have 2
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 2),
        ({"SLURM_STEP_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "1"}, 3),
        ({"GROUP_WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "3"}, 2),  # of another run
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "2(x3)"}, 1),
    ],
)
def test_nodes_are_those_on_which_all_ranks_agree(environ: dict[str, str], nodes: int) -> None:
    assert find_nodes(6, environ) == nodes


def test_shares_are_not_kept_where_machines_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = write_dataset(tmp_path / "data", cameras=())
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"keep_shares=None"):
        next(iter(Stream(str(truth.root), config=StreamConfig(keep_shares="node"))))
    assert len(list(Stream(str(truth.root)))) == truth.num_frames // 6 + (truth.num_frames % 6 > 0)
