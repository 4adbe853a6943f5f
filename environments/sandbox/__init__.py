"""Runs Python that nobody has read, in a process that can hurt nobody.

`client` is what the engine's process holds: it sends code and takes answers. `server` is a clean interpreter of its own
that forks one process for each call. `rooms` makes the file system that a call sees, `locks` takes every right away
from the process before the code is read. `python -m environments.sandbox` prints what of it this host allows.

Invariant: this file imports nothing, and `server`, `rooms` and `locks` only the standard library, as the fork server
loads them into an interpreter without any installed package.
"""
