"""The rank of this process, as a caller or a launcher's environment says it."""

from __future__ import annotations

from typing import Any

import pytest

from asyncfetch.errors import ConfigError
from asyncfetch.stream.ranks import ENVIRONMENTS, find_rank, found_placement


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
