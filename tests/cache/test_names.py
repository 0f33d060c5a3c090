from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.fetch.urls import object_name

URL = "https://bucket.example.org/a/b.mp4"
SIGNATURES = {
    "s3": "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F1&X-Amz-Date={0}&X-Amz-Expires=9"
    "&X-Amz-SignedHeaders=host&X-Amz-Security-Token={0}&X-Amz-Signature={0}",
    "s3, first form": "AWSAccessKeyId=K&Signature={0}&Expires={0}",
    "google": "X-Goog-Algorithm=A&X-Goog-Credential={0}&X-Goog-Date=1&X-Goog-Expires=1&X-Goog-SignedHeaders=host"
    "&X-Goog-Signature={0}",
    "cloudfront": "Policy={0}&Signature={0}&Key-Pair-Id=K",
    "azure": "sv=2024-01-01&se={0}&sr=b&sp=r&sig={0}",
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_two_signatures_of_one_object_give_one_name(kind: str) -> None:
    first, second = (f"{URL}?{SIGNATURES[kind].format(number)}" for number in (1, 22))
    assert object_name(first) == object_name(second) == URL


@pytest.mark.parametrize("kind", SIGNATURES)
def test_what_names_another_content_stays_whatever_its_place(kind: str) -> None:
    signature = SIGNATURES[kind].format("x")
    for query in (f"versionId=3&{signature}", f"{signature}&versionId=3"):
        assert object_name(f"{URL}?{query}#part") == f"{URL}?versionId=3#part"


@pytest.mark.parametrize("query", ["expires=3", "st=2&se=5", "policy=open", "token=a", "x-amz-date=1", "", "a&b=&=c"])
def test_without_a_signature_every_parameter_counts(query: str) -> None:
    assert object_name(f"{URL}?{query}") == f"{URL}?{query}"


@given(st.text(max_size=60))
def test_a_name_is_its_own_name(url: str) -> None:
    assert object_name(object_name(url)) == object_name(url)
