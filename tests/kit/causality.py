"""Whether the actions of a timeline begin after the messages that they read were sent."""

from diffusionpipe.ir import SEND_OPS, Mesh, Schedule, Timeline
from diffusionpipe.timing.sends import waits_of


def assert_read_after_sent(timeline: Timeline, schedule: Schedule, mesh: Mesh) -> None:
    """Every forward and backward of every copy begins after each message that it waits for was sent."""
    spans = {(span.worker, span.action): span for span in timeline.spans}
    sends = {span.action.slot: span.action for span in timeline.spans if span.action.op in SEND_OPS}
    stages, messages, count = schedule.placement.stages, schedule.messages, 0
    for group in range(mesh.data_parallel):
        for action, slots in waits_of(schedule).items():
            reader = spans[mesh.rank(group, stages[action.stage].worker), action]
            for slot in slots:
                sender = spans[mesh.rank(group, stages[messages[slot].source].worker), sends[slot]]
                assert reader.start >= sender.start - 1e-8, (str(action), reader, sender)
                count += 1
    assert count
