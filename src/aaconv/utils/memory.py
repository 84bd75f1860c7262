"""How much memory the machine has, and how much this process has taken."""

import os
import sys

if sys.platform == "win32":

    def machine_bytes() -> int | None:
        """None: not known here."""
        return None

    def peak_bytes() -> int:
        """0: not known here."""
        return 0

else:
    import resource

    def machine_bytes() -> int | None:
        """All of it, free or not."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_bytes() -> int:
        """The most that this process has held at once."""
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
