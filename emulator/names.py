"""Resource names as the service takes them: `projects/{project}/{topics|subscriptions|snapshots}/{id}`."""

import re

DELETED_TOPIC = "_deleted-topic_"
"""What a subscription names as its topic once that topic is deleted."""

_PROJECT = r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|[0-9]{6,20}"
_ID = r"(?!goog)[A-Za-z][A-Za-z0-9\-_.~+%]{2,254}"
_NAMES = {
    collection: re.compile(rf"projects/(?P<project>{_PROJECT})/{collection}/(?P<id>{_ID})")
    for collection in ("topics", "subscriptions", "snapshots")
}
_PROJECT_NAME = re.compile(rf"projects/(?:{_PROJECT})")


class BadName(ValueError):
    """A resource name that the service would refuse; says what a good one looks like."""


def check_name(name: str, collection: str) -> str:
    """`name` itself, if it names one of the `collection` ("topics", "subscriptions" or "snapshots"). Raises BadName."""
    if not _NAMES[collection].fullmatch(name):
        raise BadName(
            f"found {name!r}, expected projects/{{project}}/{collection}/{{id}}: a project of 6 to 30 lower-case "
            "letters, digits and dashes, and an id of 3 to 255 of A-Za-z0-9-_.~+% that starts with a letter, not goog"
        )
    return name


def check_project(name: str) -> str:
    """`name` itself, if it reads `projects/{project}`. Raises BadName."""
    if not _PROJECT_NAME.fullmatch(name):
        raise BadName(f"found {name!r}, expected projects/{{project}}")
    return name
