"""Effort for making an order: less for the candidates of a search than for its result, and less for long orders."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """The seeds that are refined at a depth.

    They are V-Min (if ``has_leanest``), the ``num_blocks`` fullest blocks of all or of a few (if ``has_few_blocks``),
    as many that are fastest within their own memory (if ``is_ranking``), and list schedules that fill a wait with W
    from each of ``greedy`` percent of its time on; all with every one of ``patiences``. Then the best is improved by as
    many trials as ``trial_actions`` allow, at most `MOST_TRIALS`. The ``num_simulated`` fastest are simulated. Rounds
    of up to ``most_rounds`` micro-batches, or as many as a group has, are searched in the ``num_repeated`` shortest
    steps, at as many times of each.
    """

    num_blocks: int
    greedy: tuple[int, ...]
    patiences: tuple[int, ...]
    is_ranking: bool = True
    has_leanest: bool = True
    has_few_blocks: bool = False
    num_simulated: int = 1
    trial_actions: int = 0
    num_repeated: int = 3
    most_rounds: int = 4


LEAN = Effort(num_blocks=1, greedy=(0,), patiences=(0, 50, 100))
FULL = Effort(num_blocks=3, greedy=(0, 50), patiences=(0, 50, 100), num_simulated=3, trial_actions=40_000)

LONG = Effort(num_blocks=1, greedy=(0,), patiences=(0, 50), is_ranking=False)
LONGEST = Effort(num_blocks=1, greedy=(), patiences=(0, 50), is_ranking=False, has_leanest=False, most_rounds=2)
QUICK = Effort(
    num_blocks=1,
    greedy=(0,),
    patiences=(50,),
    is_ranking=False,
    has_leanest=False,
    has_few_blocks=True,
    num_repeated=1,
    most_rounds=1,
)
BRISK, QUICKEST = replace(QUICK, patiences=(0, 50)), replace(QUICK, greedy=())

LEAN_ACTIONS, FULL_ACTIONS, LONG_ACTIONS = 3_000, 10_000, 50_000
"""Pipelines with more than `LEAN_ACTIONS` actions get `LONG` effort instead of `LEAN`, and `Variants.best` compares
only their `LONG_VARIANTS`. Those with more than `FULL_ACTIONS` get `LONG` effort instead of `FULL`, and those with more
than `LONG_ACTIONS` get `LONGEST` effort instead of both.
"""

MOST_TRIALS = 20
"""Maximum number of trials to improve the best order of a depth."""


def affordable(effort: Effort, num_actions: int) -> Effort:
    """The effort, reduced for pipelines with many actions."""
    if effort == QUICK:
        return BRISK if num_actions <= LEAN_ACTIONS else QUICK if num_actions <= LONG_ACTIONS else QUICKEST
    if num_actions <= (LEAN_ACTIONS if effort == LEAN else FULL_ACTIONS):
        return effort
    return LONG if num_actions <= LONG_ACTIONS else LONGEST
