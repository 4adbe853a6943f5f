"""What environments write before the first turn, and read in the others.

Invariant: reading a turn takes time in proportion to its length, whatever the policy wrote.
"""

from __future__ import annotations

from environments.environment import Message


def opening(system: str, text: str) -> list[Message]:
    """The conversation before the first turn; without a system message where `system` is ""."""
    asked = Message("user", text)
    return [Message("system", system), asked] if system else [asked]


def between_tags(text: str, tag: str) -> str | None:
    """What stands in the last `<tag>` of a turn, without space around it; the whole turn with tag ""."""
    if not tag:
        return text.strip()
    found, at, begin, end = None, 0, f"<{tag}>", f"</{tag}>"
    # By hand, as a regular expression takes the square of the time for a turn that repeats its opening tag.
    while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
        found, at = text[start + len(begin) : stop], stop + len(end)
    return None if found is None else found.strip()
