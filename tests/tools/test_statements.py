"""`python -m tools.statements`."""

from __future__ import annotations

import textwrap

from tools.statements import modules_of, num_statements


def test_docstrings_are_no_statements() -> None:
    source = '''
    """Of the module."""
    import os

    class A:
        """Of the class."""
        b = "not one"

        def c(self):
            """Of the function."""
            if os:
                return (1,
                        2)
    '''
    assert num_statements(textwrap.dedent(source)) == 6


def test_every_component_is_counted() -> None:
    assert {"core", "planner", "api", "cli"} <= {component for component, _ in modules_of("")}
