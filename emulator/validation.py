"""What requests the service refuses, with its status codes. Pure functions of the request; defaults are filled in here.

What the real service does and this one does not (push, BigQuery, schemas, …) is refused by name, never ignored.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf import field_mask_pb2

from emulator.filters import FilterError, parse_filter
from emulator.names import BadName, check_name

MAX_PUBLISH_BYTES = 10_000_000
"""Largest publish request."""
MAX_PUBLISH_MESSAGES = 1000
MAX_ATTRIBUTES = 100
MAX_ATTRIBUTE_KEY_BYTES = 256
MAX_ATTRIBUTE_VALUE_BYTES = 1024
MAX_ORDERING_KEY_BYTES = 1024

DAY_S = 24 * 3600
DEFAULT_RETENTION_S = 7 * DAY_S
"""How long a subscription keeps an unacknowledged message unless it says otherwise."""

_UNSUPPORTED_BY_TOPIC = ("schema_settings", "ingestion_data_source_settings", "message_transforms", "kms_key_name")
_UNSUPPORTED_BY_SUBSCRIPTION = (
    "push_config",
    "bigquery_config",
    "cloud_storage_config",
    "bigtable_config",
    "message_transforms",
)
_UPDATES = {
    "topic": {"labels", "message_retention_duration", "message_storage_policy"},
    "subscription": {
        "ack_deadline_seconds",
        "dead_letter_policy",
        "enable_exactly_once_delivery",
        "expiration_policy",
        "labels",
        "message_retention_duration",
        "push_config",
        "retain_acked_messages",
        "retry_policy",
    },
    "snapshot": {"labels", "expire_time"},
}
"""What of a resource can be changed after its creation."""


class Refused(Exception):
    """A request that the service answers with an error; `invalid_ack_ids` are those an exactly-once answer names."""

    def __init__(self, code: grpc.StatusCode, text: str, *, invalid_ack_ids: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.invalid_ack_ids = tuple(invalid_ack_ids)


def invalid(text: str) -> Refused:
    """An INVALID_ARGUMENT with this text."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, text)


def named(check: Callable[..., str], name: str, *collection: str) -> str:
    """`check(name, *collection)` with its refusal as an INVALID_ARGUMENT."""
    try:
        return check(name, *collection)
    except BadName as error:
        raise invalid(f"You have passed an invalid argument to the service: {error}.") from None


def check_range(
    what: str, value: float, low: float, high: float, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
) -> None:
    """Refuse a value outside of [low, high]."""
    if value < low:
        raise Refused(code, f"The value for {what} is too small. You passed {value}, but the minimum is {low}.")
    if value > high:
        raise Refused(code, f"The value for {what} is too large. You passed {value}, but the maximum is {high}.")


def check_topic(topic: Any) -> None:
    """Refuse a Topic that the service would refuse, or that asks for what this server lacks."""
    named(check_name, topic.name, "topics")
    _refuse_unsupported(topic, _UNSUPPORTED_BY_TOPIC)
    if topic.HasField("message_retention_duration"):
        check_range(
            "message_retention_duration in seconds", topic.message_retention_duration.ToSeconds(), 600, 31 * DAY_S
        )


def complete_subscription(subscription: Any) -> None:
    """Fill in a Subscription's defaults; refuse it if the service would, or if it asks for what this server lacks."""
    named(check_name, subscription.name, "subscriptions")
    if not subscription.push_config.ByteSize():
        subscription.ClearField("push_config")
    _refuse_unsupported(subscription, _UNSUPPORTED_BY_SUBSCRIPTION)
    subscription.ack_deadline_seconds = subscription.ack_deadline_seconds or 10
    check_range("ack_deadline_seconds", subscription.ack_deadline_seconds, 10, 600)
    if not subscription.HasField("message_retention_duration"):
        subscription.message_retention_duration.FromSeconds(DEFAULT_RETENTION_S)
    check_range(
        "message_retention_duration in seconds", subscription.message_retention_duration.ToSeconds(), 600, 31 * DAY_S
    )
    if not subscription.HasField("expiration_policy"):
        subscription.expiration_policy.ttl.FromSeconds(31 * DAY_S)
    elif subscription.expiration_policy.HasField("ttl"):
        check_range("expiration_policy.ttl in seconds", subscription.expiration_policy.ttl.ToSeconds(), DAY_S, 1e12)
    if subscription.HasField("dead_letter_policy"):
        policy = subscription.dead_letter_policy
        named(check_name, policy.dead_letter_topic, "topics")
        policy.max_delivery_attempts = policy.max_delivery_attempts or 5
        out_of_range = grpc.StatusCode.OUT_OF_RANGE
        check_range("max_delivery_attempts", policy.max_delivery_attempts, 5, 100, out_of_range)
    if subscription.HasField("retry_policy"):
        retry = subscription.retry_policy
        if not retry.HasField("minimum_backoff"):
            retry.minimum_backoff.FromSeconds(10)
        if not retry.HasField("maximum_backoff"):
            retry.maximum_backoff.FromSeconds(600)
        check_range("retry_policy.minimum_backoff in seconds", duration_s(retry.minimum_backoff), 0, 600)
        check_range(
            "retry_policy.maximum_backoff in seconds",
            duration_s(retry.maximum_backoff),
            duration_s(retry.minimum_backoff),
            600,
        )
    try:
        parse_filter(subscription.filter)
    except FilterError as error:
        raise invalid(f"Invalid filter: {error}") from None


def updated(kind: str, current: Any, wanted: Any, mask: Any) -> Any:
    """A copy of `current` with the fields of `mask` taken from `wanted`; `kind` is a key of _UPDATES."""
    if not mask.paths:
        raise invalid("The update_mask in the request must be set and name at least one field.")
    for path in mask.paths:
        field = path.split(".")[0]
        if field not in current.DESCRIPTOR.fields_by_name:
            raise invalid(f"Invalid update_mask provided in the request: {path!r} is no field of a {kind}.")
        if field not in _UPDATES[kind]:
            raise invalid(f"Invalid update_mask provided in the request: {path!r} of a {kind} cannot be changed.")
    result = type(current)()
    result.CopyFrom(current)
    try:
        field_mask_pb2.FieldMask(paths=mask.paths).MergeMessage(wanted, result, True, True)
    except ValueError as error:
        raise invalid(f"Invalid update_mask provided in the request: {error}.") from None
    return result


def check_publish(request: Any) -> None:
    """Refuse a PublishRequest over the service's limits or with nothing in it."""
    check_range("request_size", request.ByteSize(), 0, MAX_PUBLISH_BYTES)
    check_range("message_count", len(request.messages), 1, MAX_PUBLISH_MESSAGES)
    for message in request.messages:
        if not message.data and not message.attributes:
            raise invalid("One or more messages in the publish request is empty: each needs data or an attribute.")
        if len(message.ordering_key.encode()) > MAX_ORDERING_KEY_BYTES:
            raise invalid(f"ordering_key must have at most {MAX_ORDERING_KEY_BYTES} bytes")
        check_range("attribute_count", len(message.attributes), 0, MAX_ATTRIBUTES)
        for key, value in message.attributes.items():
            check_range("attribute_key_size", len(key.encode()), 1, MAX_ATTRIBUTE_KEY_BYTES)
            check_range("attribute_value_size", len(value.encode()), 0, MAX_ATTRIBUTE_VALUE_BYTES)


def duration_s(duration: Any) -> float:
    """A protobuf Duration in seconds."""
    return float(duration.ToNanoseconds() / 1e9)


def _refuse_unsupported(resource: Any, fields: Sequence[str]) -> None:
    present = {descriptor.name for descriptor, _ in resource.ListFields()}
    for field in fields:
        if field in present:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"this server does not support {field}: leave it out")
