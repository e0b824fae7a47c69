"""The pending acknowledgements of the batched transport outlive a connection."""

from stepfleet.orchestrator.store.fleet.quarantine import KEPT_BYTES, entry, read_entry
from stepfleet.worker.engine.transport.ack_buffer import LostFetch, PendingAcks, pending_acks_of


def test_acknowledgements_are_taken_and_put_back_in_order() -> None:
    pending = PendingAcks()
    for tag in "abcd":
        pending.acknowledge(tag)
    taken = pending.take_acks(3)
    assert taken == ("a", "b", "c")
    pending.put_back(taken)
    assert pending.take_acks(10) == ("a", "b", "c", "d")


def test_an_acknowledged_delivery_is_running_no_longer() -> None:
    pending = PendingAcks(running={"a", "b"})
    pending.acknowledge("a")
    assert pending.running == {"b"}


def test_a_lost_fetch_leaves_its_messages_its_acknowledgements_and_its_fetcher() -> None:
    pending = PendingAcks()
    pending.acknowledge("later")
    pending.lost(LostFetch("fetcher", ("t1", "t2"), ("earlier",)))
    assert list(pending.lost_fetchers) == ["fetcher"]
    assert list(pending.restores) == [("t2", False), ("t1", False)]
    assert pending.take_acks(5) == ("earlier", "later")


def test_each_broker_has_its_pending_acks_once_per_process() -> None:
    assert pending_acks_of("h", 1) is pending_acks_of("h", 1)
    assert pending_acks_of("h", 1) is not pending_acks_of("h", 2)


def test_a_quarantined_message_is_cut_and_its_size_and_reason_are_kept() -> None:
    about, payload = read_entry(entry(b"\n" * 9000, "too odd", "q", at=5.0))
    assert about == {"at": 5.0, "reason": "too odd", "queue": "q", "bytes": 9000}
    assert payload == b"\n" * KEPT_BYTES
