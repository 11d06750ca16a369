"""What a pass that makes messages explicit must not change."""

from diffusionpipe.ir import Op, Schedule


def assert_computes_kept(messages: Schedule, before: Schedule) -> None:
    """Every worker does the same; only reductions may stand later among its computes."""
    for order, own in zip(messages.orders, before.orders, strict=True):
        rest = [action for action in order if action.slot is None or action.op is Op.ENCODE]
        assert [a for a in rest if a.op is not Op.REDUCE_GRAD] == [a for a in own if a.op is not Op.REDUCE_GRAD]
        assert sorted(map(str, rest)) == sorted(map(str, own))
