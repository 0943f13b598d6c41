"""Versions as hosts report them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpdeploy.sglang.versions import NEWEST, RELEASES, Version

ORDER = [
    "0.0.0.dev1+g1a2b3c4",
    "0.5.6.dev3",
    "0.5.6rc1",
    "0.5.6",
    "0.5.6.post2.dev8155+gabcdef",
    "0.5.6.post2",
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.11.dev4",
    "0.5.11",
    "0.5.23",
    "0.6.0a1",
    "0.6",
]


def test_versions_order_by_meaning_and_not_as_text():
    parsed = [Version.parse(text) for text in ORDER]
    by_text = sorted(parsed, key=lambda v: v.text)
    assert by_text != parsed
    assert sorted(by_text) == parsed


@pytest.mark.parametrize(
    ("text", "rules_of", "known"),
    [
        ("0.5.17", "0.5.17", True),
        ("v0.5.17", "0.5.17", True),
        ("0.5.10.post1", "0.5.10", True),
        ("0.5.6.post2.dev8155+gabc", "0.5.6", False),
        ("0.5.13.dev7", "0.5.13", False),
        ("0.0.0.dev1+gabc", "0.5.23", False),
        ("0.0.0", "0.5.23", False),
        ("0.5.24", "0.5.23", False),
        ("1.0", "0.5.23", False),
        ("0.5.5.post3", "0.5.6", False),
    ],
)
def test_each_version_is_judged_by_one_release_and_says_when_that_is_not_its_own(text, rules_of, known):
    version = Version.parse(text)
    assert str(version.nearest_table) == rules_of
    assert version.known is known
    assert (version.caveat is None) is known


@pytest.mark.parametrize("text", ["", "main", "0.5.x", "latest", "0.5.6 0.5.7"])
def test_what_is_no_version_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not a version"):
        Version.parse(text)


def test_a_git_build_counts_as_the_newest_and_an_old_one_as_the_oldest():
    git, old = Version.parse("0.0.0.dev0+g12"), Version.parse("0.4.9")
    assert git.at_least(str(NEWEST))
    assert not old.at_least("0.5.7")
    assert old.before("0.5.7")


@given(st.sampled_from(RELEASES), st.sampled_from(["", ".post1", ".post12"]))
def test_a_post_release_lies_between_its_release_and_the_next(release, post):
    version, base = Version.parse(release + post), Version.parse(release)
    assert version >= base
    assert all(version < Version.parse(r) for r in RELEASES if Version.parse(r) > base)
    assert hash(version) == hash(Version.parse(release + post))
