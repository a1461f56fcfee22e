"""Tests that are known to fail, and why: what mends one takes its line out.

They are strict: one that passes fails the run.
"""

# (backend, pattern of the tests' names, reason)
KNOWN_BUGS: list[tuple[str, str, str]] = []
