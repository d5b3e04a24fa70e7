"""What the commands print with: consoles, progress, and text that is not ours to choose."""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LOG_WIDTH = 160
_BAR_WIDTH = 20


def wide_console() -> Console:
    """As wide as the terminal, or wide enough for a log."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


def progress_bars() -> Progress:
    """Bars on the terminal, gone at the end; disabled where there is no terminal."""
    console = wide_console()
    columns = (TextColumn("{task.description}"), BarColumn(_BAR_WIDTH), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def plain(text: str) -> str:
    """Lines of text without markup, and without anything that a terminal obeys."""
    return escape("".join(char if char.isprintable() or char == "\n" else "?" for char in text))
