"""A resuming producer on a broker with Kafka's own authorizer: what `kmq acls` lists is enough."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException, Producer

from kmq_spark.errors import KmqError
from kmq_spark.producer.resuming import ResumingProducer
from tests.kafka.secured import SecuredBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

QUEUE, PART = "orders", "resuming-producer"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with a queue that was made by a user who may make it."""
    folder = tmp_path_factory.mktemp("secured")
    with SecuredBroker.with_queue(folder, QUEUE, "producer", PART, "viewer") as broker:
        yield broker


def producer_of(secured: SecuredBroker, part: str = PART) -> ResumingProducer:
    """Return a resuming producer, as the user of a part."""
    return ResumingProducer(
        QUEUE, "copier", bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials(part)
    )


def test_producer_with_an_id_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    for number in (1, 2):
        with producer_of(secured) as producer:
            assert (producer.position, producer.sequence) == (number - 1 or None, number - 1)
            producer.send("x")
            producer.commit(number)
    listed = secured.kmq("viewer", "producer", "list", QUEUE, "-o", "json")
    assert [each["position"] for each in json.loads(listed.stdout)] == [2]
    doctor = secured.kmq("viewer", "doctor", QUEUE, "-o", "json")
    (finding,) = [each for each in json.loads(doctor.stdout) if each["check"] == "producers"]
    assert finding["level"] == "ok"


def test_error_of_a_producer_without_the_rights_for_an_id_names_where_they_are_listed(secured: SecuredBroker) -> None:
    with pytest.raises(KmqError, match="kmq acls orders"):
        producer_of(secured, "producer")


def test_producer_cannot_fence_other_parts_of_the_queue(secured: SecuredBroker) -> None:
    for transactional_id in ("kmq.orders.tracker", "kmq.orders.consumer.x", "kmq.orders2.producer.x"):
        client = Producer({
            "bootstrap.servers": secured.bootstrap_servers, **secured.credentials(PART),
            "transactional.id": transactional_id,
        })  # fmt: skip
        with pytest.raises(KafkaException) as raised:
            client.init_transactions(20)
        assert raised.value.args[0].name() == "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
