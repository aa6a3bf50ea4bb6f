"""Sign-in page, to which links of `penstock ui` lead."""

from __future__ import annotations

from penstock.api.pages.shell import Page
from penstock.view.markup import Markup, element, join
from penstock.view.tables import card

COMMAND = element("code", "penstock ui")
WELCOME = join(("A link made by ", COMMAND, " signs this browser in."))
STALE = join(("This link was used already, or is older than a minute. Make a new one: ", COMMAND))


def login_page(message: Markup) -> Page:
    """Return a form that a script fills with the code in the URL's fragment, which browsers never send."""
    field = element(
        "input", id="code", name="code", type="password", autocomplete="off", spellcheck="false", required=""
    )
    form = element(
        "form",
        element("label", element("span", "Code"), field),
        element("button", "Sign in", class_="strong"),
        method="post",
        action="/login",
        id="login",
        class_="filters",
    )
    head = element("div", element("h1", "Sign in"), class_="head")
    return Page(title="Sign in", body=join((head, card(element("p", message), form))), scripts=("login.js",))
