"""How this package writes to a terminal."""

from rich.console import Console


def console() -> Console:
    """Rich output, plain where it is not a terminal, and always wide enough that no digit is cut."""
    terminal = Console()
    return Console(width=max(terminal.width, 120) if terminal.is_terminal else 200)


def readable_bytes(size: int) -> str:
    """1.50 MiB, and so on."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
