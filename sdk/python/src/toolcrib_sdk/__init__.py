"""Toolcrib for Python. `toolcrib_sdk.utp` has all that a tool service needs."""

__version__ = "0.1.0"
