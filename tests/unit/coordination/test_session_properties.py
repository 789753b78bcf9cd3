"""There is one owner at a time, whatever happens to the processes of a group, their network and the broker's clock."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kmq_spark.core.coordination.records import RecordType
from tests.unit.coordination_memory import Partition, Process, T

JUMPS_MS = st.sampled_from([0, 0, 0, -3_600_000, -5 * T, T, 5 * T, 3_600_000])
CLIENT_IDS = st.sampled_from(["a", "b", "c"])


class Members(RuleBasedStateMachine):
    """Sessions that are suspended, cut off, killed and started again, and a broker's clock that jumps."""

    @initialize()
    def begin(self) -> None:
        """Three members, and the first holds the resource."""
        self.partition = Partition()
        self.running = {client_id: Process(self.partition, client_id) for client_id in "abc"}
        self.gone: list[Process] = []
        self.numbers, self.jumped_at_ms = 1, 0.0
        for process in self.running.values():
            process.session.turn()
            process.join()
        self.running["a"].session.turn()
        assert self.running["a"].claim() is not None

    @rule(
        client_ids=st.sets(CLIENT_IDS, min_size=1), turns=st.integers(1, 25),
        step_ms=st.sampled_from([T // 10, T // 5]), wants=st.booleans(), jump_ms=JUMPS_MS,
    )  # fmt: skip
    def live(self, client_ids: set[str], turns: int, step_ms: int, wants: bool, jump_ms: int) -> None:  # noqa: FBT001
        """Some take turns and claim what they may; the others are suspended."""
        if jump_ms and self.partition.now_ms > self.jumped_at_ms + 3 * T:
            self.partition.ahead_ms += jump_ms
            self.jumped_at_ms = self.partition.now_ms
        for _ in range(turns):
            self.partition.now_ms += step_ms
            for client_id in sorted(client_ids):
                session = self.running[client_id].session
                session.turn()
                if wants and session.may_claim("r") and "r" not in session.claims:
                    session.send(RecordType.CLAIM, resource="r")
                self.there_is_one_owner()

    @rule(client_id=CLIENT_IDS, can_read=st.booleans(), can_write=st.booleans())
    def cut(self, client_id: str, can_read: bool, can_write: bool) -> None:  # noqa: FBT001
        """The network lets through one direction, both, or none; what is written is kept."""
        channel = self.running[client_id].channel
        channel.can_read, channel.can_write = can_read, can_write

    @rule(client_id=CLIENT_IDS, is_lost=st.booleans())
    def deliver(self, client_id: str, is_lost: bool) -> None:  # noqa: FBT001
        """What was kept is appended, or lost; that of processes that were killed too."""
        for process in [self.running[client_id], *self.gone]:
            if is_lost:
                process.channel.lose()
            could_write, process.channel.can_write = process.channel.can_write, True
            process.channel.serve()
            process.channel.can_write = could_write

    @rule(client_id=CLIENT_IDS, fast_reclaim=st.booleans())
    def kill_and_restart(self, client_id: str, fast_reclaim: bool) -> None:  # noqa: FBT001
        """The user's promise is kept."""
        self.numbers += 1
        self.gone.append(self.running[client_id])
        process = Process(self.partition, client_id, self.numbers, fast_reclaim=fast_reclaim)
        self.running[client_id] = process
        process.session.turn()
        process.send_join()

    @rule(client_id=CLIENT_IDS)
    def release(self, client_id: str) -> None:
        """A member gives the resource up."""
        for claim in list(self.running[client_id].session.claims.values()):
            claim.release()

    @rule(client_id=CLIENT_IDS, duration_ms=st.sampled_from([T, 5 * T]))
    def pause(self, client_id: str, duration_ms: int) -> None:
        """The group is paused for a while."""
        self.running[client_id].session.send(RecordType.PAUSE_GROUP, duration_ms=duration_ms)

    @invariant()
    def there_is_one_owner(self) -> None:
        """By the claims that `check` lets pass."""
        if hasattr(self, "partition"):
            sessions = [process.session for process in self.running.values()]
            holding = [
                claim
                for session in sessions
                for claim in session.claims.values()
                if not claim._end and self.partition.now_ms < session.until_ms
            ]
            assert len(holding) <= 1
            assert all(session.failure is None for session in sessions)


Members.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMembers = Members.TestCase
