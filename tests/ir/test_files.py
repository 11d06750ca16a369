import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionpipe.errors import ConfigError, FileFormatError
from diffusionpipe.ir import (
    COMPUTE_OPS,
    MESSAGE_OPS,
    STAGE_OPS,
    Action,
    Edge,
    Fill,
    MemorySample,
    Mesh,
    Message,
    Op,
    Pipeline,
    Placement,
    Plan,
    Range,
    Schedule,
    Share,
    Span,
    Stage,
    Timeline,
)
from diffusionpipe.ir.files import (
    MAX_PROBLEMS,
    TIMELINE,
    from_text,
    plan_from_text,
    plan_to_text,
    read_plan,
    read_schedule,
    read_timeline,
    schedule_from_text,
    schedule_to_text,
    to_text,
    write_plan,
    write_schedule,
    write_timeline,
)

sizes = st.integers(0, 40)
names = st.text(max_size=8)
times = st.one_of(st.integers(0, 1000), st.floats(0, 1e6))


def tuples(items, **limits):
    return st.lists(items, **limits).map(tuple)


actions = st.one_of(
    st.builds(Action, stage=sizes, op=st.sampled_from(sorted(COMPUTE_OPS)), microbatch=sizes),
    st.builds(Action, stage=sizes, op=st.sampled_from(sorted(MESSAGE_OPS)), microbatch=sizes, slot=sizes),
    st.builds(Action, stage=sizes, op=st.sampled_from(sorted(STAGE_OPS))),
    st.builds(Action, stage=sizes, op=st.just(Op.ENCODE), slot=sizes),
)
ranges = st.tuples(sizes, sizes).map(lambda pair: Range(min(pair), max(pair)))
shares = (
    st.lists(st.fractions(0, 1, max_denominator=12), min_size=2, max_size=2, unique=True)
    .map(sorted)
    .map(lambda s: Share(*s))
)
stages = st.builds(Stage, worker=sizes, weights=sizes, share=shares)
edges = st.builds(Edge, producer=sizes, consumer=sizes, tensors=tuples(names), gradients=tuples(names))
pipelines = st.builds(
    Pipeline,
    stages=tuples(sizes),
    microbatches=tuples(sizes),
    ops=st.frozensets(st.sampled_from(Op)),
    edges=tuples(edges, max_size=3),
    model=names,
)
messages = st.builds(
    Message,
    source=sizes,
    destination=sizes,
    microbatch=sizes,
    samples=ranges,
    tensors=tuples(names),
    is_gradient=st.booleans(),
)
fills = st.builds(Fill, stage=sizes, component=names, layers=ranges, samples=ranges)
placements = st.builds(Placement, stages=tuples(stages, max_size=4), pipelines=tuples(pipelines, max_size=2))
schedules = st.builds(
    Schedule,
    name=names,
    placement=placements,
    orders=tuples(tuples(actions, max_size=6), max_size=4),
    messages=tuples(messages, max_size=3),
    fills=tuples(fills, max_size=3),
)
meshes = st.builds(
    lambda copies, workers, is_sharded: Mesh(data_parallel=copies, pipeline=workers, shard=copies if is_sharded else 1),
    sizes,
    sizes,
    st.booleans(),
)
plans = st.builds(
    Plan,
    mesh=meshes,
    blocks=tuples(tuples(names)),
    train=schedules,
    validate=schedules,
    sample=st.tuples(schedules),
    checkpointed=tuples(names),
)
spans = st.builds(Span, worker=sizes, action=actions, start=times, end=times)
memory_samples = st.builds(MemorySample, worker=sizes, time=times, held=st.integers(0, 10**15))
timelines = st.builds(
    Timeline,
    num_workers=sizes,
    spans=tuples(spans, max_size=6),
    memory=tuples(memory_samples, max_size=4),
    source=st.sampled_from(["simulated", "measured"]),
)


def small_schedule() -> Schedule:
    pipeline = Pipeline(
        stages=(0, 1),
        microbatches=(2, 2),
        ops=frozenset({Op.F, Op.B}),
        edges=(Edge(producer=0, consumer=1),),
        model="unet",
    )
    halves = (Share(Fraction(0), Fraction(1, 2)), Share())
    placement = Placement(
        stages=tuple(Stage(worker=i, weights=i, share=share) for i, share in enumerate(halves)), pipelines=(pipeline,)
    )
    order = tuple(Action(stage=0, op=op, microbatch=i) for op in (Op.F, Op.B) for i in range(2))
    return Schedule(name="gpipe", placement=placement, orders=(order, ()))


@settings(deadline=None)
@given(schedules)
def test_a_schedule_survives_its_text_and_equal_schedules_have_equal_text(schedule):
    text = schedule_to_text(schedule)
    assert schedule_from_text(text) == schedule
    assert schedule_to_text(schedule_from_text(text)) == text


@settings(deadline=None)
@given(plans)
def test_a_plan_survives_its_text(plan):
    assert plan_from_text(plan_to_text(plan)) == plan


@settings(deadline=None)
@given(timelines)
def test_a_timeline_survives_its_text_with_integers_still_integers(timeline):
    again = from_text(to_text(timeline, TIMELINE), TIMELINE, source="timeline")
    assert again == timeline
    assert [type(span.start) for span in again.spans] == [type(span.start) for span in timeline.spans]


def test_a_schedule_file_is_what_a_reviewer_can_read():
    assert (
        schedule_to_text(small_schedule())
        == """\
{
  "format": "diffusionpipe-schedule",
  "version": 1,
  "name": "gpipe",
  "placement": {
    "stages": [{"worker": 0, "weights": 0, "share": "0:1/2"}, {"worker": 1, "weights": 1, "share": "0:1"}],
    "pipelines": [
      {
        "stages": [0, 1],
        "microbatches": [2, 2],
        "ops": ["B", "F"],
        "edges": [{"producer": 0, "consumer": 1, "tensors": ["hidden"], "gradients": ["hidden"]}],
        "model": "unet",
        "is_ahead": false,
        "first_sample": 0,
        "probes_from": null
      }
    ]
  },
  "orders": ["0F0 0F1 0B0 0B1", ""],
  "messages": [],
  "fills": []
}
"""
    )


def test_files_of_all_three_kinds_come_back_as_they_were_written(tmp_path):
    schedule = small_schedule()
    plan = Plan(mesh=Mesh(pipeline=2), blocks=(("a",), ("b",)), train=schedule, validate=schedule, sample=(schedule,))
    timeline = Timeline(num_workers=2, spans=(Span(worker=0, action=schedule.orders[0][0], start=0, end=0.1),))
    write_schedule(schedule, tmp_path / "schedule.json")
    write_plan(plan, tmp_path / "plan.json")
    write_timeline(timeline, tmp_path / "timeline.json")
    assert read_schedule(tmp_path / "schedule.json") == schedule
    assert read_plan(tmp_path / "plan.json") == plan
    assert read_timeline(tmp_path / "timeline.json") == timeline
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "schedule.json", "timeline.json"]


def altered(change) -> str:
    data = json.loads(schedule_to_text(small_schedule()))
    change(data)
    return json.dumps(data)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for key in path:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("format", "diffusionpipe-plan"), "holds 'diffusionpipe-plan'; a file of format 'diffusionpipe-schedule'"),
        (lambda data: data.pop("format"), 'has no key "format"'),
        (put("version", 7), "version 7 is unknown; this DiffusionPipe reads version 1"),
        (put("version", True), "version True is unknown"),
        (put("colour", "red"), "colour: unknown key; known are name, placement"),
        (lambda data: data.pop("orders"), "orders: is missing"),
        (put("orders", 0, "0F0 0G1"), "orders[0], action 1: must be a text like \"2F0\" ('0G1' is not an action"),
        (put("orders", 0, ["0F0"]), 'orders[0]: must be one text of actions like "0F0 1F0 0B0"; got ["0F0"]'),
        (put("orders", {"0": "0F0"}), "orders: must be a list"),
        (put("placement", "stages", 1, "share", "1/2:1/2"), "placement.stages[1].share: must be a text like"),
        (put("placement", "stages", 1, "share", "0:1/0"), "placement.stages[1].share: must be a text like"),
        (put("placement", "stages", 1, "worker", 1.5), "placement.stages[1].worker: must be a whole number; got 1.5"),
        (put("placement", "stages", 1, "worker", True), "placement.stages[1].worker: must be a whole number; got true"),
        (put("placement", "stages", 1, "worker", None), "placement.stages[1].worker: must be a whole number; got null"),
        (put("placement", "pipelines", 0, "ops", ["F", "Q"]), "placement.pipelines[0].ops[1]: must be one of F, B"),
        (put("placement", "pipelines", 0, "ops", ["F", []]), "placement.pipelines[0].ops[1]: must be one of F, B"),
        (put("placement", "pipelines", 0, "ops", ["F", "F"]), "must be a list without repetitions"),
        (put("placement", "pipelines", 0, "edges", 0, "tensors", "hidden"), "edges[0].tensors: must be a list"),
        (put("placement", []), "placement: must be an object with stages, pipelines; got []"),
        (put("name", 3), "name: must be a text; got 3"),
    ],
)
def test_a_wrong_schedule_is_refused_with_file_field_and_reason(change, says):
    with pytest.raises(FileFormatError) as caught:
        schedule_from_text(altered(change), source="my.json")
    assert str(caught.value).startswith("my.json: ")
    assert says in str(caught.value)


def test_all_problems_of_a_file_are_named_at_once():
    def change(data):
        data["colour"] = "red"
        data["name"] = 3
        data["placement"]["stages"][0]["worker"] = "zero"

    with pytest.raises(FileFormatError) as caught:
        schedule_from_text(altered(change))
    assert all(field in str(caught.value) for field in ("colour", "name", "placement.stages[0].worker"))


def test_a_file_full_of_problems_is_refused_in_a_short_message():
    with pytest.raises(FileFormatError, match="and 88 more") as caught:
        schedule_from_text(altered(put("orders", ["nonsense"] * 100)))
    assert len(str(caught.value).splitlines()) == MAX_PROBLEMS + 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (schedule_to_text(small_schedule())[:300], "not valid JSON"),
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"format": "diffusionpipe-timeline", "format": "x"}', "key 'format' appears twice"),
        ('{"format": "diffusionpipe-timeline", "version": 1, "num_workers": NaN}', "NaN is not a number"),
        (
            '{"format": "diffusionpipe-timeline", "version": 1, "num_workers": 1, "spans": [{"end": 1e999}]}',
            "spans[0].end: must be a finite number",
        ),
    ],
)
def test_a_text_that_is_no_timeline_is_refused(text, says):
    with pytest.raises(FileFormatError) as caught:
        from_text(text, TIMELINE, source="timeline")
    assert says in str(caught.value)


def test_a_missing_file_and_a_binary_file_are_refused_by_name(tmp_path):
    with pytest.raises(FileFormatError, match=r"cannot read .*nowhere\.json: No such file"):
        read_plan(tmp_path / "nowhere.json")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(FileFormatError, match=r"picture.png: not UTF-8 text"):
        read_plan(tmp_path / "picture.png")


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "schedule.json"
    write_schedule(small_schedule(), path)
    before = path.read_text()

    def disk_is_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left"):
        write_schedule(Schedule(name="other", placement=small_schedule().placement, orders=()), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*No such file or directory"):
        write_schedule(small_schedule(), tmp_path / "missing" / "schedule.json")


def test_an_object_with_many_keys_is_read_in_time_that_grows_with_them():
    keys = ",".join(f'"k{number}":1' for number in range(100_000))  # a search of each among all would take minutes
    with pytest.raises(FileFormatError, match='no key "format"'):
        plan_from_text("{" + keys + "}")
