"""Members' samples made to go together."""

from __future__ import annotations

import pytest

from asyncfetch.errors import ConfigError
from asyncfetch.formats import Field
from asyncfetch.stream.shapes import shapes

PICTURE = Field("uint8", (3, 8, 8))
ONE = {"task": Field("string"), "top": PICTURE, "state": Field("float32", (2,))}
TWO = {"task": Field("string"), "front": PICTURE, "front_is_pad": Field("bool", (1,)), "state": Field("float32", (2,))}


def test_shapes_say_whether_members_agree_after_renaming() -> None:
    assert not shapes([ONE, TWO], [{}, {}], "keep")[1]
    assert shapes([ONE, TWO], [{}, {}], "drop")[1]
    assert shapes([ONE, TWO], [{}, {}], "pad")[1]
    plain = {key: field for key, field in TWO.items() if key != "front_is_pad"}
    assert shapes([ONE, plain], [{}, {"front": "top"}], "raise")[1]
    (_, two), _ = shapes([ONE, TWO], [{}, {"front": "top"}], "pad")
    assert two.rename == {"front": "top", "front_is_pad": "top_is_pad"}  # the window's mask goes along


@pytest.mark.parametrize(
    ("layouts", "renames", "missing", "message"),
    [
        ([ONE, TWO], [{}, {}], "raise", r"'front': \[0\].*'top': \[1\]"),
        ([ONE, ONE], [{"nowhere": "top"}, {}], "keep", "member 0 has no feature 'nowhere'; it has "),
        ([ONE, ONE], [{}, {"state": "top"}], "keep", "member 1: every key needs a name of its own"),
        ([ONE, ONE], [{"state": "dataset"}, {}], "keep", "name of its own"),
        ([ONE, {}, {"state": Field("float32", (3,))}], [{}] * 3, "pad", "the shape of 'state'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    layouts: list[dict[str, Field]], renames: list[dict[str, str]], missing: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shapes(layouts, renames, missing)  # type: ignore[arg-type]
