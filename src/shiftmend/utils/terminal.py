"""Safe output: names and messages from files must not control a terminal or inject markup into a document."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # Control characters except tab and line break; escape sequences begin with one.
    "\u2028\u2029\u202a-\u202e\u2066-\u2069"  # Other line breaks, and characters that reorder a line.
    "\udc80-\udc9f]"  # Undecodable bytes of file names, which some terminals take for control characters.
)


def neutralise(text: str) -> str:
    r"""Escape characters that control a terminal, as Python's repr does, so that they are visible.

    >>> neutralise("a\x1b[2Jb\rc\td")
    'a\\x1b[2Jb\\x0dc\td'
    """
    return _STEERING.sub(lambda found: _escape(ord(found[0])), text)


def neutralise_cell(text: str) -> str:
    """Escape text for a CSV file, because spreadsheets would evaluate text that begins like a formula.

    >>> neutralise_cell("=1+1")
    "'=1+1"
    """
    return f"'{neutralise(text)}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else neutralise(text)


def open_console(**options: Any) -> Console:
    """Open a console that ignores markup, emoji codes and control characters in texts."""
    from rich.console import Console, RenderHook
    from rich.segment import Segment

    class Neutral:
        """A wrapper of a renderable that shows control characters in the text as escapes, as `neutralise` does.

        Control codes that rich itself emits, such as those that move the cursor, stay as they are.
        """

        def __init__(self, inner: ConsoleRenderable) -> None:
            self.inner = inner

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for segment in console.render(self.inner, options):
                yield segment if segment.control else Segment(neutralise(segment.text), segment.style)

    class Neutraliser(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [Neutral(one) for one in renderables]

    console = Console(highlight=False, markup=False, emoji=False, **options)
    console.push_render_hook(Neutraliser())
    return console


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
