"""Read the status page as a visitor does: by its tables, lists and figures."""

from __future__ import annotations

from typing import Any

from tests.support.browser import Page

_ROWS = """
[...document.getElementById('%s').children].map((row) => Object.fromEntries(
  [...row.querySelectorAll('[data-field]')].map((part) => [part.dataset.field, part.textContent])))
"""


def rows(page: Page, table: str) -> list[dict[str, str]]:
    """Return what the parts of each row or item say, top to bottom; `table` is the id of their parent."""
    found: list[dict[str, str]] = page.evaluate(_ROWS % table)
    return found


def figures(page: Page) -> dict[str, str]:
    """Return the key figures."""
    return {name: text for row in rows(page, "figures") for name, text in row.items()}


def chips(page: Page, url: str) -> list[str]:
    """Return the policies that the fleet's table shows on the replica at `url`."""
    found: list[str] = page.evaluate(
        f"[...document.querySelectorAll('#replicas tr[data-key=\"{url}\"] .chips li')].map((chip) => chip.textContent)"
    )
    return found


def number(text: Any) -> int:
    """Return the whole number that a cell shows."""
    return int(str(text).replace(",", ""))
