"""Stand-in for the api role; see `standin.common`."""

from __future__ import annotations

from standin.common import main

if __name__ == "__main__":
    main()
