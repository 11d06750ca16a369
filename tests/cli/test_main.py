import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import diffusionpipe
from diffusionpipe import cli
from diffusionpipe.errors import ConfigError, NonFiniteLossError, PeerError, RecipeError, ScheduleError
from diffusionpipe.runtime.job import interrupts
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import failed
from diffusionpipe.runtime.machine.error_file import INTERRUPTED

HEAVY = ("torch", "diffusers", "transformers", "matplotlib", "numpy", "PIL")


def exit_of(monkeypatch, error, *arguments):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("diffusionpipe.simulator.comparison.simulate", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments or ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"])
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a wrong size"), 2),
        (RecipeError("a wrong key"), 2),
        (ScheduleError(["worker 0 waits", "worker 1 waits"]), 2),
        (PeerError("rank 3 died"), 1),
        (NonFiniteLossError("step 7"), 1),
    ],
)
def test_each_of_our_errors_is_one_block_on_stderr_with_its_status(monkeypatch, capsys, error, status):
    assert exit_of(monkeypatch, error) == status
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error: " + "\n  ".join(str(error).splitlines()) + "\n"


def test_brackets_and_long_lines_of_a_message_are_printed_as_they_are(monkeypatch, capsys):
    message = "stages[0] of [bold]/a/long/path" + "/folder" * 40
    exit_of(monkeypatch, ConfigError(message))
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_interrupt_exits_with_130(monkeypatch):
    assert exit_of(monkeypatch, KeyboardInterrupt()) == 130


class _Torch:
    """Has no length if it is asked while Ctrl-C is pressed, as a storage of torch."""

    def __len__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
        return 1


@pytest.fixture
def own_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    interrupts.remember_interrupts()


def test_an_interrupt_that_a_library_turns_into_its_own_error_exits_with_130(monkeypatch, capsys, own_interrupts):
    monkeypatch.setattr("diffusionpipe.simulator.comparison.simulate", lambda *args, **kwargs: len(_Torch()))
    with pytest.raises(SystemExit) as caught:
        cli.main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"])
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_was_interrupted_says_so_whatever_error_it_meets(own_interrupts):
    interrupts.remember_interrupts()
    member = membership({})
    assert failed(ValueError("before"), member)[0] == 1
    with pytest.raises(ValueError, match="shape"):
        len(_Torch())
    assert failed(ValueError("could not determine the shape"), member) == (130, INTERRUPTED)


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("diffusionpipe.simulator.comparison.simulate", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"])


def test_the_version_is_printed():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"diffusionpipe {diffusionpipe.__version__}\n")


def test_a_mistyped_verb_is_refused_with_a_suggestion():
    result = CliRunner().invoke(cli.app, ["shedule"])
    assert result.exit_code == 2
    assert "Did you mean 'schedule'?" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in cli.VERBS)])
def test_help_lists_the_verbs_without_importing_anything_heavy(arguments):
    program = (
        "import sys\n"
        "from diffusionpipe.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        f"    print('heavy:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.endswith("heavy: []\n")
    assert all(verb in result.stdout for verb in (cli.VERBS if arguments == ["--help"] else arguments[:1]))


def test_the_module_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "diffusionpipe", "schedule", "nonsense", "--ranks", "2", "--microbatches", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "error: no schedule is called 'nonsense'; `diffusionpipe schedule list` lists the names\n"


@pytest.mark.parametrize(
    "arguments",
    [[], *([verb] for verb in cli.VERBS), ["schedule", "search"], ["schedule", "compare"], ["plan", "show"]],
)
def test_help_shows_no_type_beside_a_switch(arguments):
    shown = CliRunner().invoke(cli.app, [*arguments, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert "--help" in shown
    assert "<bool>" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_help_breaks_a_line_where_the_terminal_ends():
    for arguments in (["schedule"], ["schedule", "compare"]):
        shown = CliRunner().invoke(cli.app, [*arguments, "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
        assert "Times may be in any unit; the figures are in the same unit." in shown


def test_help_says_how_torch_reads_the_csv():
    shown = CliRunner().invoke(cli.app, ["schedule", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert '_load_csv(FILE, format="compute_only")' in " ".join(shown.replace("│", " ").split())
