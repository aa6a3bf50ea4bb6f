"""The rule by which actions are recorded, and the count of those that are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.graphs import recorded_shares, recording_order

ACTIONS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)).map(lambda pair: (pair[0], pair[0] + 10)))
"""Pairs of tokens and bytes: graphs of equally many tokens take as many bytes."""


def recorded(actions: list[tuple[int, int]], most_bytes: int) -> list[tuple[int, int]]:
    """The actions that are recorded one after the other, as long as their graphs fit."""
    done, used = [], 0
    for action in recording_order(actions, lambda action: action[0]):
        if used + action[1] > most_bytes:
            break
        used += action[1]
        done.append(action)
    return done


def bytes_by_tokens(actions: list[tuple[int, int]]) -> dict[int, int]:
    """The bytes of all actions with this number of tokens."""
    return {tokens: sum(size for other, size in actions if other == tokens) for tokens, _ in actions}


@given(ACTIONS, st.integers(0, 500))
def test_the_shares_count_what_is_recorded_one_by_one(actions: list[tuple[int, int]], most_bytes: int) -> None:
    shares = recorded_shares(bytes_by_tokens(actions), most_bytes)
    done = recorded(actions, most_bytes)
    for tokens, share in shares.items():
        counted = share * sum(other == tokens for other, _ in actions)
        assert 0 <= counted - sum(other == tokens for other, _ in done) < 1


@given(ACTIONS, st.integers(0, 500), st.integers(0, 100))
def test_more_memory_records_no_fewer(actions: list[tuple[int, int]], most_bytes: int, more_bytes: int) -> None:
    before, after = (recorded_shares(bytes_by_tokens(actions), size) for size in (most_bytes, most_bytes + more_bytes))
    assert all(before[tokens] <= after[tokens] for tokens in before)


def test_actions_without_known_bytes_are_all_recorded() -> None:
    assert recorded_shares({16: 0, 8: 0}, 0) == {16: 1.0, 8: 1.0}


def test_the_example() -> None:
    assert recorded_shares({1024: 512, 512: 512}, 640) == {1024: 1.0, 512: 0.25}


def test_equal_actions_are_recorded_as_they_come() -> None:
    assert recording_order(["b", "aa", "c", "dd"], len) == ["aa", "dd", "b", "c"]
