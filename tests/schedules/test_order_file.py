"""Orders from outside: read, checked, and refused with the place in the file."""

from dataclasses import replace

import pytest

from diffusionpipe.errors import ConfigError, DiffusionPipeError, ScheduleError
from diffusionpipe.ir.files import write_schedule
from diffusionpipe.ir.torch_csv import schedule_to_csv
from diffusionpipe.schedules import REGISTRY, forward_only
from diffusionpipe.schedules.files.order_file import is_order_file, read_orders, untrainable

LEGAL = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems_of(path, *sizes):
    with pytest.raises(DiffusionPipeError) as caught:
        read_orders(path, *sizes)
    assert str(caught.value).startswith(str(path))
    return [line.strip().replace(str(path), path.name) for line in str(caught.value).splitlines()]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_csv_and_json_give_the_orders_that_were_written(name, file, tmp_path):
    schedule = REGISTRY[name](3, 4)
    path = tmp_path / "mine.json"
    write_schedule(schedule, path)
    assert read_orders(path) == replace(schedule, name="mine.json")
    assert read_orders(file(schedule_to_csv(schedule)), 3, 4) == replace(schedule, name="mine.csv")


def test_a_schedule_of_two_directions_has_the_sizes_of_both(tmp_path):
    path = tmp_path / "two.json"
    write_schedule(REGISTRY["chimera"](4, 8), path)
    assert read_orders(path, 4, 8).num_microbatches() == 8


def test_rules_suit_the_sizes_that_are_asked_for(file):
    path = file("stages: chain\nlimit: ranks - rank\npriority: F B", "mine.rules")
    assert read_orders(path, 3, 4).orders == REGISTRY["1f1b"](3, 4).orders
    assert problems_of(path) == [
        "mine.rules: rules suit any number of ranks and micro-batches; give --ranks and --microbatches"
    ]
    assert problems_of(file("stages: chain", "mine.rules"), 3, 4)[0] == "mine.rules: these rules cannot be read"
    stuck = file("stages: loop 2\nlimit: 1\npriority: F B", "mine.rules")
    assert problems_of(stuck, 2, 2)[0].startswith("mine.rules: with 2 ranks, 2 chunks, 2 microbatches the ranks wait")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n", ["line 2, cell 2: worker 1: 1B1 comes before 1F1"]),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            [
                "line 1, cell 2: deadlock: worker 0 waits at 0B0 for its inputs",
                "line 2, cell 1: deadlock: worker 1 waits at 1F1 for its inputs",
            ],
        ),
        (
            "0F0,0B0,0B0\n1F0,1B0\n",
            ["line 1, cell 3: worker 0: 0B0 is done 2 times"],
        ),
        ("0F0,0W0,0I0\n1F0,1B0\n", ["line 1, cell 2: worker 0: 0W0 comes before 0I0"]),
        ("0F0,0X0\n", ["torch CSV: line 1, cell 2: '0X0' is not an action; write e.g. 2F0, 2B0, 2I0 or 2W0"]),
        ("", ["torch CSV: holds no forward; give one row of actions per rank"]),
        ('"' + "0" * 200_000, None),
    ],
)
def test_an_illegal_order_is_named_with_its_place_and_its_rule(file, text, says):
    head, *problems = problems_of(file(text))
    if says is None:
        assert head == "mine.csv: this is not a CSV file: field larger than field limit (131072)"
        return
    assert head == "mine.csv: the orders are illegal:"
    assert problems == says


def test_an_action_of_a_json_file_has_its_place(tmp_path):
    path = tmp_path / "mine.json"
    schedule = REGISTRY["1f1b"](2, 3)
    first, *rest = schedule.orders[1]
    write_schedule(replace(schedule, orders=(schedule.orders[0], (*rest, first))), path)
    assert problems_of(path)[1] == "orders[1], action 0: worker 1: 1B0 comes before 1F0"


def test_messages_are_not_read(tmp_path):
    path = tmp_path / "mine.json"
    write_schedule(REGISTRY["1f1b"](2, 2), path)
    path.write_text(path.read_text().replace("0F0 0F1", "0F0 0SEND_F0>0 0F1"))
    assert problems_of(path)[1] == "there are the actions SEND_F; list only F, B, I and W, the rest is added"
    write_schedule(replace(REGISTRY["1f1b"](2, 2), orders=((), ())), path)
    assert problems_of(path)[1] == "there are no actions; list the actions of every rank"


def test_other_sizes_are_refused_with_both_numbers(file):
    assert problems_of(file(LEGAL), 4, 8) == [
        "mine.csv: it has orders for 2 ranks, but --ranks is 4; use 2, or another file",
        "mine.csv: it has orders for 2 micro-batches, but --microbatches is 8; use 2, or another file",
    ]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mine.txt", LEGAL, "the orders of ranks are in files whose names end in .csv, .json, .rules"),
        ("mine.csv", b"\xff\xfe", "is not UTF-8 text, so it has no orders; check the path"),
        ("mine.json", "{}", "a file of format 'diffusionpipe-schedule' is needed here"),
        ("mine.json", "{", "not valid JSON"),
    ],
)
def test_other_files_are_refused(file, name, text, says):
    assert says in problems_of(file(text, name))[0]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone.csv: cannot be read \(No such file or directory\)"):
        read_orders(tmp_path / "gone.csv")


def test_no_name_of_a_family_is_taken_for_a_file():
    assert not any(map(is_order_file, REGISTRY))
    assert all(map(is_order_file, ("a.csv", "b/c.JSON", "1f1b.rules")))


def test_all_families_can_be_trained_and_forwards_alone_cannot():
    for generator in REGISTRY.values():
        assert not list(untrainable(generator(4, 8)))
    assert list(untrainable(forward_only(2, 2))) == ["the schedule has only forwards; add the backwards"]


def test_every_reason_against_training_is_named(file):
    idle = read_orders(file("0F0,0B0\n\n1F0,1B0\n"))
    assert list(untrainable(idle)) == ["rank 1 has no stage; give every rank one"]
    schedule = REGISTRY["1f1b"](2, 2)
    (pipeline,) = schedule.placement.pipelines
    uneven = replace(schedule.placement, pipelines=(replace(pipeline, microbatches=(1, 2)),))
    swapped = replace(schedule.placement, stages=schedule.placement.stages[::-1])
    assert list(untrainable(replace(schedule, placement=uneven))) == [
        "the schedule has micro-batches of 1, 2 samples; make them equal"
    ]
    assert list(untrainable(replace(schedule, placement=swapped))) == [
        "the schedule does not take its blocks in the order 0, 1, 2, ...; number them in forward order"
    ]


def test_illegal_orders_are_a_schedule_error(file):
    with pytest.raises(ScheduleError):
        read_orders(file("0F0,0F0\n"))
