import http.client
import json
import re
import socket
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from kit.report_runs import make_run, write_samples
from PIL import Image

from diffusionpipe.cli import main
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.trainer.launching.run_lock import acquire
from diffusionpipe.workflows.report.page import report_of
from diffusionpipe.workflows.report.watching import FILES, TOKEN_HEADER, Watch


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "birds", steps=30)


@pytest.fixture
def job(run):
    """A job that trains in the run's folder, as far as its lock says."""
    with acquire(run):
        yield


@pytest.fixture
def watch(run):
    with Watch(run) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server, method, path, **headers):
    """Status, headers and body of a request to the server's port."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    found = connection.getresponse()
    body = found.read().decode()
    connection.close()
    return found.status, found.headers, body


def made(run):
    return {name for name in FILES.values() if (run / name).exists()}


def test_the_page_and_its_data_need_the_token_of_the_address(watch):
    assert watch.server_address[0] == "127.0.0.1"
    for path in ("/", "/data", "/?token=", "/data?token=wrong", f"/data?other={watch.token}"):
        assert answer(watch, "GET", path)[0] == 403
    status, headers, page = answer(watch, "GET", f"/?token={watch.token}")
    assert (status, headers["Cache-Control"], headers["Referrer-Policy"]) == (200, "no-store", "no-referrer")
    assert "connect-src 'self'" in page
    assert watch.token not in page
    status, _, text = answer(watch, "GET", f"/data?token={watch.token}")
    assert whole(text)["items"][0]["progress"]["step"]["value"] == 30


def whole(text):
    """The data of an answer for a page that has none."""
    return json.loads(text)["change"]["new"]


def test_the_data_grow_with_the_run(watch, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": 0.25}\n{"step": 32, "lo')
    text = answer(watch, "GET", f"/data?token={watch.token}")[2]
    assert whole(text)["items"][0]["progress"]["step"]["value"] == 31


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("path", "name"), [("/save", "save"), ("/stop", "save_quit"), ("/draw", "draw")])
def test_the_page_asks_the_run_to_save_to_stop_and_to_draw(watch, run, path, name):
    with (run / "recipe.toml").open("a") as recipe:
        recipe.write("[sampling]\nevery = 1000\n")
    host = f"127.0.0.1:{watch.server_address[1]}"
    headers = {TOKEN_HEADER: watch.token, "Origin": f"http://{host}"}
    assert answer(watch, "POST", path, **headers)[0] == 200
    assert made(run) == {name}


@pytest.mark.parametrize("path", FILES)
def test_an_ended_run_is_asked_for_nothing(watch, run, path):
    status, _, text = answer(watch, "POST", path, **{TOKEN_HEADER: watch.token})
    assert (status, text) == (409, "no job trains in this folder now, so there is nothing to ask")
    assert made(run) == set()


@pytest.mark.usefixtures("job")
def test_a_recipe_without_samples_is_not_asked_for_pictures(watch, run):
    status, _, text = answer(watch, "POST", "/draw", **{TOKEN_HEADER: watch.token})
    assert (status, made(run)) == (409, set())
    assert "set sampling.every" in text


@pytest.mark.usefixtures("job")
def test_a_forwarded_port_has_another_number(watch, run):
    headers = {"Host": "localhost:9999", "Origin": "http://localhost:9999", TOKEN_HEADER: watch.token}
    assert answer(watch, "POST", "/save", **headers)[0] == 200
    assert made(run) == {"save"}


@pytest.mark.usefixtures("job")
def test_no_other_page_and_no_other_user_changes_anything(watch, run):
    token, host = {TOKEN_HEADER: watch.token}, f"127.0.0.1:{watch.server_address[1]}"
    refused = [
        *(("POST", path, {}) for path in FILES),
        *(("GET", f"{path}?token={watch.token}", token) for path in FILES),
        ("POST", "/save", {TOKEN_HEADER: "wrong"}),
        ("POST", f"/save?token={watch.token}", {}),  # in the address, as the form of another page could send it
        ("POST", "/save", token | {"Host": "attacker.example"}),
        ("POST", "/save", token | {"Host": f"attacker.example:{watch.server_address[1]}"}),
        ("POST", "/save", token | {"Origin": "http://attacker.example"}),
        ("POST", "/save", token | {"Origin": "null"}),
        ("POST", "/save", token | {"Host": host, "Origin": "http://127.0.0.1:1"}),
        ("POST", "/../save", token),
    ]
    for method, path, headers in refused:
        assert answer(watch, method, path, **headers)[0] in (403, 404), (method, path, headers)
    assert answer(watch, "PUT", "/save", **token)[0] == 501
    assert made(run) == set()


def test_a_run_that_begins_later_is_waited_for_and_prepared_while_its_job_measures(tmp_path):
    folder = tmp_path / "later"
    with Watch(folder) as server:
        report = now(server)
        assert (report["waiting"], report["preparing"]) == ("later", False)
        with acquire(folder):
            report = now(server)
            assert (report["waiting"], report["preparing"]) == ("later", True)
        make_run(folder, steps=5)
        assert "waiting" not in now(server)


def now(server):
    """The data of the page as the folder is now, without a rest."""
    server.rest = 0
    return server.answer().report


def test_a_run_that_has_not_changed_is_not_read_again(tmp_path):
    """Bytes are counted for the kernel's reads, and CPU seconds for the work on them."""
    run = make_run(tmp_path / "long", steps=5_000)
    with Watch(run) as server:
        server.rest = 0
        now(server)  # imports
        text = (run / "metrics.jsonl").read_text()
        write_atomically(run / "metrics.jsonl", text)  # another file, as a resumed run leaves one
        first, again = spent(server), spent(server)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5001, "loss": 0.25, "step_s": 0.05}\n')
        grown = spent(server)
        assert server.answer().report["items"][0]["progress"]["step"]["value"] == 5001
    assert first.bytes >= len(text)
    assert again.bytes < 0.03 * first.bytes
    assert again.seconds < 0.05 * first.seconds
    assert grown.bytes < 0.03 * first.bytes


def spent(server):
    """The bytes that this process has read of files, and its CPU seconds, for one answer."""
    read, began = bytes_read(), time.process_time()
    server.answer()
    return SimpleNamespace(seconds=time.process_time() - began, bytes=bytes_read() - read)


def bytes_read():
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_what_is_kept_is_what_a_new_report_reads(tmp_path):
    """After a resumed run has written its numbers anew, a picture has changed, and a file is half written."""
    run = make_run(tmp_path / "birds", steps=60)
    with Watch(run) as server:
        now(server)
        for change in (appended, resumed, drawn, removed):
            change(run)
            kept = now(server)
            assert kept["items"] == report_of([run])["items"], change.__name__
            assert kept["recipes"] == report_of([run])["recipes"]


def appended(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": 0.25, "new_number": 1}\nnoise\n{"step": 62, "lo')


def resumed(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:40]
    write_atomically(run / "metrics.jsonl", "".join(lines) + '{"step": 41, "loss": 7.5, "step_s": 0.2}\n')


def drawn(run):
    write_samples(run, steps=(300,))
    Image.new("RGB", (16, 16), "red").save(run / "samples/step-00000100/000-sample.png")


def removed(run):
    for name in ("timeline.json", "survey.json", "ended.json"):
        (run / name).unlink()


def test_many_pages_and_pages_that_were_closed_cost_one_reading(watch, run, capfd):
    watch.rest = 1e9  # each reading rests for as long as it may
    answer(watch, "GET", f"/?token={watch.token}")
    looks, look = [], watch._files.state
    watch._files.state = lambda: looks.append(1) or look()
    for _ in range(20):
        with socket.create_connection(watch.server_address) as closed:
            closed.sendall(f"GET /data?token={watch.token} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
    for _ in range(5):
        assert answer(watch, "GET", f"/data?token={watch.token}")[0] == 200
    assert len(looks) == 1
    assert capfd.readouterr().err == ""  # nothing is said about a page that was closed


def test_data_that_the_page_has_are_not_sent_again(watch, run):
    path, watch.rest = f"/data?token={watch.token}", 0
    state = json.loads(answer(watch, "GET", path)[2])["state"]
    assert json.dumps(state) in answer(watch, "GET", f"/?token={watch.token}")[2]  # the page asks with it
    assert answer(watch, "GET", path, If_None_Match=state)[::2] == (304, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": 0.25}\n')
    status, _, text = answer(watch, "GET", path, If_None_Match=state)
    assert (status, json.loads(text)["state"] != state) == (200, True)
    assert list(json.loads(text)["change"]["keys"]) == ["items"]


def test_pictures_that_a_page_has_are_not_sent_again(watch, run):
    path, watch.rest = f"/data?token={watch.token}", 0
    write_noise(run, range(1, 61))
    first = answer(watch, "GET", path)[2]
    states = [json.loads(first)["state"]]
    for step in (61, 62, 63):
        write_noise(run, [step])
        change = answer(watch, "GET", path, If_None_Match=states[-1])[2]
        assert len(change) < 0.03 * len(first)
        assert change.count("data:image") == 3
        states.append(json.loads(change)["state"])
    late = answer(watch, "GET", path, If_None_Match=states[0])[2]  # another page asked last three samplings ago
    assert late.count("data:image") == 9
    assert len(answer(watch, "GET", path, If_None_Match='"another"')[2]) > len(first)


def write_noise(run, steps):
    """Three pictures of each sampling, each other than all before."""
    for step in steps:
        for place in range(3):
            path = run / f"samples/step-{step:08d}/{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng((step, place)).integers(0, 256, (48, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place: text_in(place / "birds.toml", '[run]\nfolder = "runs/birds"'), "run.folder, runs/birds"),
        (lambda place: text_in(place / "half.toml", "[run"), "the folder that this recipe names as run.folder"),
        (lambda place: place / "absent.toml", "the folder that this recipe names as run.folder"),
        (lambda place: text_in(place / "plan.json", "{}"), "report"),
        (lambda place: text_in(place / "notes.txt", "a"), "run.folder"),
        (lambda place: text_in(place / "models/model_index.json", "{}").parent, "run.folder"),
        (lambda place: make_run(place / "runs/birds", steps=2).parent, "runs/birds"),
    ],
)
def test_a_path_that_is_no_run_is_refused_in_a_sentence_that_names_the_one_to_give(tmp_path, capsys, make, words):
    path = make(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(path)])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert str(path).rpartition("/")[2] in said
    assert words in said
    assert "run.folder" in said


def text_in(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_taken_port_is_refused_in_a_sentence(watch, run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(run), "--port", str(watch.server_address[1])])
    assert ended.value.code == 2
    assert "cannot be used" in capsys.readouterr().err
