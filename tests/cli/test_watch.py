import http.client
import json
from threading import Thread

import pytest
from report_runs import make_run

from diffusionpipe.cli import main
from diffusionpipe.trainer.launching.run_lock import acquire
from diffusionpipe.workflows.watching import FILES, TOKEN_HEADER, Watch


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
    assert json.loads(text)["items"][0]["progress"]["step"]["value"] == 30


def test_the_data_grow_with_the_run(watch, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": 0.25}\n{"step": 32, "lo')
    text = answer(watch, "GET", f"/data?token={watch.token}")[2]
    assert json.loads(text)["items"][0]["progress"]["step"]["value"] == 31


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
    assert (status, text) == (409, "no job trains in this folder now, so nothing has been asked")
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


def test_a_run_that_begins_later_is_waited_for(tmp_path):
    with Watch(tmp_path / "later") as server:
        assert server.report()["waiting"] == "later"
        make_run(tmp_path / "later", steps=5)
        assert "waiting" not in server.report()


def test_a_taken_port_is_refused_in_a_sentence(watch, run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(run), "--port", str(watch.server_address[1])])
    assert ended.value.code == 2
    assert "cannot be used" in capsys.readouterr().err
