"""`python -m wazn`: the same door as the `wazn` command."""

from __future__ import annotations

from wazn.cli.main import main

if __name__ == "__main__":
    main()
