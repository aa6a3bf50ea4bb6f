"""Why a page cannot be shown, for people."""

from __future__ import annotations

from penstock.api.pages.shell import Page
from penstock.api.problems import PROBLEMS, Problem
from penstock.view.markup import element, join
from penstock.view.tables import card


def problem_page(problem: Problem) -> Page:
    """The problem document as a page."""
    title = PROBLEMS[problem.kind].title
    words = card(element("strong", problem.detail), element("p", problem.remedy), class_="failure")
    head = element("div", element("h1", title), class_="head")
    back = element("p", element("a", "To the jobs", href="/"))
    return Page(title=title, body=join((head, words, back)))
