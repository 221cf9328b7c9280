"""The version, alone in a file so that both the build and `wazn --version` read it cheaply."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
