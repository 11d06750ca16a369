from diffusionpipe.trainer.reporting.rank_memory import RankMemory, memory_file, read_memory


def test_a_line_is_written_where_a_number_changes_and_rarely_where_none_does(tmp_path):
    used = RankMemory(tmp_path, 3, is_new=True)
    for step in range(1, 100_001):
        used.note(step, {"host_memory_gib": 2.0 if step != 5000 else 2.1})
    rows = read_memory(tmp_path)[3]
    assert len(rows) < 700
    assert {row["step"]: row["host_memory_gib"] for row in rows if row["host_memory_gib"] != 2.0} == {5000: 2.1}
    assert rows[0] == {"step": 1, "host_memory_gib": 2.0}
    assert any(row["step"] == 5001 for row in rows)  # the return


def test_a_resumed_run_appends_and_a_new_one_begins_again(tmp_path):
    RankMemory(tmp_path, 0, is_new=True).note(10, {"host_memory_gib": 1.0})
    RankMemory(tmp_path, 0, is_new=False).note(10, {"host_memory_gib": 2.0})
    with memory_file(tmp_path, 0).open("a") as file:
        file.write('{"step": 11, "host_mem')  # killed here
    assert read_memory(tmp_path) == {0: [{"step": 10, "host_memory_gib": 2.0}]}
    RankMemory(tmp_path, 0, is_new=True)
    assert read_memory(tmp_path) == {}


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "memory").write_text("a file in the way")
    used = RankMemory(tmp_path, 0, is_new=True)
    used.note(1, {"host_memory_gib": 1.0})
    assert used.problem
    assert read_memory(tmp_path) == {}
