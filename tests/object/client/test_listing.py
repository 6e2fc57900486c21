"""Pages of a listing: what stores answer, and what nobody should."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.object.object_servers import ENTRY

from kvtier.backends.object.client.listing import ListedObject, Page, list_query, name_from_key
from kvtier.backends.object.stores.errors import WrongEndpoint

BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaa">]><ListBucketResult>&a;</ListBucketResult>'


def page(entries: str, facts: str = "", space: str = "") -> bytes:
    return (
        f'<?xml version="1.0"?><ListBucketResult{space}><Name>b</Name>{facts}{entries}'
        "</ListBucketResult>"
    ).encode()


def read_page(body: bytes) -> tuple[list[ListedObject], str]:
    found = Page(body)
    return list(found), found.token


@pytest.mark.parametrize("space", ["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'])
def test_a_page_is_read_with_and_without_a_namespace(space: str) -> None:
    entries = ENTRY.format(key="a%20b/c%2Bd", size=5) + ENTRY.format(key="e", size=0)
    facts = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+b=</NextContinuationToken>"
    listed, token = read_page(page(entries, facts, space))
    assert [(one.key, one.size) for one in listed] == [("a%20b/c%2Bd", 5), ("e", 0)]
    assert listed[0].modified_s == 1795168800.25
    assert token == "a+b="


def test_a_time_without_a_zone_is_no_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "XYZ+9")
        time.tzset()
        listed, _ = read_page(page(ENTRY.format(key="e", size=0).replace("Z<", "<")))
    time.tzset()
    assert listed[0].modified_s == 1795168800.25
    listed, _ = read_page(
        page(ENTRY.format(key="e", size=0).replace("10:00:00.250Z", "12:00:00+02:00"))
    )
    assert listed[0].modified_s == 1795168800.0


def test_a_page_may_end_anywhere() -> None:
    for length in range(4090, 4100):  # it is read by so many bytes at a time
        short = page(ENTRY.format(key="a", size=5))
        body = short.replace(b"<Name>b<", b"<Name>%s<" % (b"b" * (length + 1 - len(short))))
        assert len(body) == length
        assert [one.size for one in read_page(body)[0]] == [5]


def test_the_last_page_has_no_token() -> None:
    facts = "<IsTruncated>false</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
    assert read_page(page("", facts)) == ([], "")
    assert read_page(page("")) == ([], "")


@pytest.mark.parametrize("token", ["", "<NextContinuationToken></NextContinuationToken>"])
def test_a_page_is_never_taken_for_the_last_when_there_is_more(token: str) -> None:
    """Old servers know only markers; all behind the first page would be taken for gone."""
    more = f"<IsTruncated>true</IsTruncated><NextMarker>e</NextMarker>{token}"
    with pytest.raises(WrongEndpoint, match="more"):
        read_page(page(ENTRY.format(key="e", size=1), more))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>hello</html>",
        b"<ListBucketResult>",
        page(ENTRY.format(key="a", size="many")),
        page("<Contents><Key>a</Key></Contents>"),
        page(ENTRY.format(key="a", size=1) + "<Contents><Key>b</Key></Contents>"),
        page(ENTRY.format(key="a", size=1).replace("2026", "long ago")),
        page(ENTRY.format(key="a", size=-1)),
        page(ENTRY.format(key="a", size=1 << 63)),
        page(ENTRY.format(key="a", size=1).replace("2026", "0000")),
        BOMB.encode(),
        BOMB.encode("utf-16"),
        b'<?xml version="1.0" encoding="nonsense"?><ListBucketResult/>',
        b'<?xml version="1.0" encoding="hex"?><ListBucketResult/>',
    ],
)
def test_what_is_no_listing_is_a_wrong_endpoint(body: bytes) -> None:
    with pytest.raises(WrongEndpoint):
        read_page(body)


@given(body=st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_else(body: bytes) -> None:
    with pytest.raises(WrongEndpoint):
        read_page(body)


def test_queries_are_in_the_order_in_which_they_are_signed() -> None:
    query = list_query("some where/p", "some where/p/a", "")
    assert query == (
        "encoding-type=url&list-type=2&max-keys=1000&prefix=some%20where%2Fp"
        "&start-after=some%20where%2Fp%2Fa"
    )
    assert "start-after" not in list_query("p", "a", "token+/=")
    assert "continuation-token=token%2B%2F%3D" in list_query("p", "a", "token+/=")


@pytest.mark.parametrize("key", ["my%20pre%2Bfix/a/b-1", "my+pre%2Bfix/a/b-1", "my pre+fix/a/b-1"])
def test_a_prefix_is_known_however_the_store_writes_it(key: str) -> None:
    assert name_from_key("my pre+fix/", key) == "a/b-1"
    assert name_from_key("my prefix/", key) is None


def test_a_prefix_that_looks_as_if_it_were_encoded() -> None:
    for key in ("my%2541/a", "my%41/a"):
        assert name_from_key("my%41/", key) == "a"


def test_a_page_is_read_while_it_is_asked_for() -> None:
    entries = "".join(ENTRY.format(key=f"k{n:03}", size=n) for n in range(1000))
    reading = iter(Page(page(entries)[:-100]))  # what is wrong comes late
    assert [next(reading).size for _ in range(900)] == list(range(900))
    with pytest.raises(WrongEndpoint):
        list(reading)
