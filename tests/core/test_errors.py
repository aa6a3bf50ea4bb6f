"""An error has one form of text, also across processes."""

from __future__ import annotations

from penstock.core.errors import UserError


def test_an_error_is_parsed_from_its_text() -> None:
    mistake = UserError(where="spec.model.heads", what="5 is too odd", remedy="choose 4")
    reported = UserError.reported(str(mistake))
    assert (reported.what, reported.remedy) == ("spec.model.heads: 5 is too odd", "choose 4")
    assert str(reported) == str(mistake)


def test_a_text_without_a_remedy_has_only_a_description() -> None:
    reported = UserError.reported("nothing fits\nat all")
    assert (reported.what, reported.remedy) == ("nothing fits\nat all", "")
