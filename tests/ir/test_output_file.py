import os
import stat
import threading

import pytest
from kit.full_disk import REASONS, full_disk

from diffusionpipe.errors import ConfigError
from diffusionpipe.files import output_file
from diffusionpipe.files.output_file import check_folder, check_outputs, write_atomically


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def read_from(fifo, received):
    thread = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("through", ["itself", "link"])
def test_a_fifo_stays_one_and_receives_the_text(tmp_path, through):
    fifo, link, received = tmp_path / "fifo", tmp_path / "link", []
    os.mkfifo(fifo)
    link.symlink_to("fifo")
    before = fifo.stat()
    reader = read_from(fifo, received)
    write_atomically(fifo if through == "itself" else link, "text\n")
    reader.join(20)
    assert received == ["text\n"]
    assert (fifo.stat().st_mode, fifo.stat().st_ino) == (before.st_mode, before.st_ino)
    assert link.is_symlink()
    assert entries(tmp_path) == ["fifo", "link"]


def device(path, minor):
    """A device of the memory driver made for this test: the machine's own must never be at risk."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        path.open("wb").close()
    except OSError:
        pytest.skip("this process may not make devices; a FIFO shows the same elsewhere")


def test_a_device_stays_a_device(tmp_path):
    device(tmp_path / "null", minor=3)
    before = (tmp_path / "null").stat()
    check_outputs([tmp_path / "null"])
    write_atomically(tmp_path / "null", "text\n")
    after = (tmp_path / "null").stat()
    assert (after.st_mode, after.st_rdev, after.st_ino) == (before.st_mode, before.st_rdev, before.st_ino)


def test_a_device_without_room_is_an_error_and_stays_a_device(tmp_path):
    device(tmp_path / "full", minor=7)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_atomically(tmp_path / "full", "text\n")
    assert stat.S_ISCHR((tmp_path / "full").stat().st_mode)


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "second").symlink_to("folder/target")
    link.symlink_to("second")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "second").is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert entries(tmp_path / "folder") == ["target"]


def test_a_dangling_link_stays_and_its_target_is_made(tmp_path):
    (tmp_path / "link").symlink_to("target")
    check_outputs([tmp_path / "link"])
    assert entries(tmp_path) == ["link"]
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_an_open_file_behind_dev_fd_is_written_in_place(tmp_path):
    with (tmp_path / "file").open("w") as file:
        inode = os.fstat(file.fileno()).st_ino
        os.symlink(f"/proc/self/fd/{file.fileno()}", tmp_path / "stdout")
        write_atomically(tmp_path / "stdout", "text\n")
    assert (tmp_path / "file").stat().st_ino == inode
    assert (tmp_path / "file").read_text() == "text\n"


@pytest.mark.parametrize("act", [lambda path: write_atomically(path, ""), lambda path: check_outputs([path])])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "it is a folder; give the name of a file"),
        ("link to folder", "it is a folder; give the name of a file"),
        ("circle", "symbolic links"),
        ("missing/file", "No such file or directory"),
        ("file/file", "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_a_file_is_one_clear_error_and_leaves_nothing(tmp_path, act, name, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link to folder").symlink_to("folder")
    (tmp_path / "circle").symlink_to("circle")
    before = entries(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot write .*{name}: .*{says}"):
        act(tmp_path / name)
    assert entries(tmp_path) == before
    assert entries(tmp_path / "folder") == []


@pytest.mark.parametrize("act", [lambda path: write_atomically(path, "x" * 8192), lambda path: check_outputs([path])])
def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path, act):
    with full_disk(tmp_path, free=4096) as folder:
        (folder / "file").write_text("old")
        before = entries(folder)
        with pytest.raises(ConfigError, match=REASONS):
            act(folder / "file")
        assert entries(folder) == before
        assert (folder / "file").read_text() == "old"


def test_a_name_of_255_bytes_can_be_written(tmp_path):
    path = tmp_path / ("ä" * 127)
    write_atomically(path, b"x")
    assert entries(tmp_path) == [path.name]


def test_a_folder_to_be_made_is_checked_at_its_first_existing_parent(tmp_path):
    check_folder(tmp_path / "new" / "run")
    assert entries(tmp_path) == []
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, error in (
        ("file", NotADirectoryError),
        ("dangling", FileNotFoundError),
        ("file/run", NotADirectoryError),
    ):
        with pytest.raises(error, match=name.partition("/")[0]):
            check_folder(tmp_path / name)


def test_a_link_planted_at_the_name_of_the_draft_is_not_followed(tmp_path, monkeypatch):
    """Whoever may write to the folder could otherwise direct the text to any file of ours."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(output_file, "token_hex", lambda _: "0")
    (tmp_path / ".plan.json.0.tmp").symlink_to(victim)
    write_atomically(tmp_path / "plan.json", "text")
    assert victim.read_text() == "precious"
    assert (tmp_path / "plan.json").read_text() == "text"
    assert not (tmp_path / "plan.json").is_symlink()


def test_writers_with_one_process_id_on_two_machines_leave_a_whole_file(tmp_path, monkeypatch):
    path, write, written = tmp_path / "plan.json", output_file.write_durably, []

    def write_while_another_does(draft, data):
        write(draft, data)
        if not written:
            written.append(draft)
            write_atomically(path, "the other one's")

    monkeypatch.setattr(output_file, "write_durably", write_while_another_does)
    write_atomically(path, "ours")
    assert path.read_text() == "ours"
    assert entries(tmp_path) == ["plan.json"]
